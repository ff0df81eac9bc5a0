package bind

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/cut"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/scan"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/watch"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/vfio"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/persistenced"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/sysfs"
)

func TestMain(m *testing.M) {
	nvidiatest.Main(m, map[string]func() error{
		"bind":      func() error { return Serve(context.Background(), os.Stdin, os.Stdout) },
		"partition": func() error { return cut.Serve(os.Stdin, os.Stdout) },
		"watch":     func() error { return watch.Serve(context.Background(), os.Stdin, os.Stdout) },
	})
}

// site is a simulated node with a sysfs that behaves.
type site struct {
	nvidiatest.Site
	*Binder
	cards *cut.Partitions
	// functions are the addresses of all functions, whose drivers and overrides snapshot returns.
	functions []device.PCIAddress
}

func newSite(t *testing.T, node string, edit func(*model.Node)) *site {
	t.Helper()
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("needs /dev/fuse for the simulated sysfs")
	}
	described, err := model.ReadNode(filepath.Join(nvidiatest.Simulator, "nodes", node+".yaml"), nvidiatest.Seed)
	if err != nil {
		t.Fatal(err)
	}
	if edit != nil {
		edit(described)
	}
	s := &site{Site: nvidiatest.NewSiteOf(t, described, layout.Container, "")}
	server, err := sysfs.Mount(s.Root)
	if err != nil {
		t.Fatal(err)
	}
	config, err := layout.Load(s.Root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.clearFaults()
		if err := layout.Down(s.Root); err != nil {
			t.Error(err)
		}
		server.Wait()
	})
	s.cards = cut.New(s.Paths(), nil, s.Role("partition")...)
	t.Cleanup(func() { nvidiatest.StopWorkers(s.cards) })
	paths := s.Paths()
	paths.Modules = config.ModulesPath()
	s.Binder = New(Options{Paths: paths, Dev: config.Dev, Command: s.Role("bind"), Cards: s.cards})
	for _, g := range described.GPUs {
		s.functions = append(s.functions, device.PCIAddress(g.PCI))
	}
	for _, other := range described.Others {
		s.functions = append(s.functions, device.PCIAddress(other.PCI))
	}
	return s
}

func (s *site) clearFaults() {
	s.T.Helper()
	s.Change(func(_ *layout.Config, f *state.File) error { return f.ClearFaults() })
}

// fault lets the n-th of the next writes of this name, and all after it, meet the fault.
func (s *site) fault(f state.Fault, name string) {
	s.T.Helper()
	f.GPU = state.AnyGPU
	s.Change(func(_ *layout.Config, file *state.File) error { return file.AddFault(f, name, 1) })
}

// snapshot returns driver and override of each function.
func (s *site) snapshot() (all []string) {
	s.T.Helper()
	for _, f := range s.functions {
		driver, override, err := vfio.Sysfs(s.Paths().Sysfs).Driver(f)
		if err != nil {
			s.T.Fatal(err)
		}
		all = append(all, fmt.Sprintf("%s: %q, override %q", f, driver, override))
	}
	return all
}

func (s *site) is(want []string) {
	s.T.Helper()
	if got := s.snapshot(); !slices.Equal(got, want) {
		s.T.Errorf("the functions are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func (s *site) has(function device.PCIAddress, want string) {
	s.T.Helper()
	if driver, _, err := vfio.Sysfs(s.Paths().Sysfs).Driver(function); err != nil || driver != want {
		s.T.Errorf("driver of %s is %q, %v, want %q", function, driver, err, want)
	}
}

func (s *site) look(card device.Card) vfio.Found {
	s.T.Helper()
	f, err := s.Look(s.T.Context(), card)
	if err != nil {
		s.T.Fatal(err)
	}
	return f
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestCardGoesToVFIOAndComesBackAsItWas(t *testing.T) {
	s := newSite(t, "h100-passthrough", nil)
	before, card := s.snapshot(), s.Card(1)
	found := s.look(card)
	if !found.Persistence || len(found.Functions) != 1 || found.Functions[0].VFIO != "vfio-pci" || found.Functions[0].Driver != "nvidia" {
		t.Fatalf("found %+v", found)
	}
	for range 2 { // idempotent
		must(t, s.Bind(t.Context(), card, found))
	}
	s.has(card.PCIAddress, "vfio-pci")
	for _, c := range []struct {
		prefer bool
		want   vfio.Access
	}{
		{false, vfio.Access{Node: "/dev/vfio/11", API: "/dev/vfio/vfio"}},
		{true, vfio.Access{Node: "/dev/vfio/devices/vfio0", API: "/dev/iommu"}},
	} {
		if got, err := s.Access(t.Context(), card.PCIAddress, c.prefer); err != nil || got != c.want {
			t.Errorf("%+v, %v, want %+v", got, err, c.want)
		}
	}
	for range 2 {
		must(t, s.Release(t.Context(), card, found))
	}
	s.is(before)
	if on, err := s.cards.Persistence(t.Context(), card); err != nil || !on {
		t.Errorf("persistence mode afterwards: %v, %v", on, err)
	}
}

// TestPersistencedClosesTheCard lets nvidia-persistenced keep all cards open. It closes the one
// that goes to VFIO, and the kernel's driver has persistence mode on afterwards.
func TestPersistencedClosesTheCard(t *testing.T) {
	s := newSite(t, "h100-passthrough", nil)
	card, other := s.Card(1), s.Card(2)
	must(t, s.cards.SetPersistence(t.Context(), card, false)) // the daemon replaces it
	daemon, err := persistenced.Start(s.Root)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- daemon.Serve(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	gpus := []device.GPU{{PCIAddress: card.PCIAddress, Minor: 1}, {PCIAddress: other.PCIAddress, Minor: 2}}
	if users := scan.Users(s.Paths(), gpus); len(users[card.PCIAddress]) != 1 || len(users[other.PCIAddress]) != 1 {
		t.Errorf("the cards are open in %v", users)
	}
	if foreign := scan.Foreign(s.Paths(), gpus); len(foreign) > 0 {
		t.Errorf("%v keep virtual machines away", foreign)
	}
	found := s.look(card)
	must(t, s.Bind(t.Context(), card, found))
	s.has(card.PCIAddress, "vfio-pci")
	must(t, s.Release(t.Context(), card, found))
	if on, err := s.cards.Persistence(t.Context(), card); err != nil || !on {
		t.Errorf("persistence mode afterwards: %v, %v", on, err)
	}
	again := s.look(card)
	must(t, s.Bind(t.Context(), card, again))
	must(t, s.Release(t.Context(), card, again))
	if kept := s.look(other); !kept.Persistence {
		t.Error("nvidia-persistenced closed another card")
	}
}

// watched is a running watch of all cards. A gap in it is an error.
type watched struct {
	*site
	card  device.Card
	reach chan device.Reach // of the card
	began chan struct{}     // closed when the watch has begun
}

func (s *site) startWatch(card device.Card) (watched, func()) {
	w := watched{s, card, make(chan device.Reach), make(chan struct{})}
	begin := sync.OnceFunc(func() { close(w.began) })
	ctx, cancel := context.WithCancel(s.T.Context())
	ended := make(chan error, 1)
	go func() {
		options := watch.Options{Paths: s.Paths(), Command: s.Role("watch"), Interval: 200 * time.Millisecond, Partitions: s.cards}
		ended <- watch.Run(ctx, options, func(signal device.Signal) {
			if now := signal.Watcher; now != nil && !now.Up && !now.Released {
				s.T.Errorf("a gap in the watch: %s", now.Error)
			} else if now != nil && now.Up {
				begin()
			}
			if c := signal.Condition; c != nil && c.Card.PCIAddress == card.PCIAddress {
				select {
				case w.reach <- c.Reach:
				case <-ctx.Done():
				}
			}
		})
	}()
	return w, func() {
		cancel()
		must(s.T, <-ended)
	}
}

func (w watched) await(want device.Reach) {
	w.T.Helper()
	limit := time.After(nvidiatest.Patience)
	for {
		select {
		case got := <-w.reach:
			if got == want {
				return
			}
		case <-limit:
			w.T.Fatalf("the watch never reported %s", want)
		}
	}
}

func (w watched) during(do func(context.Context, device.Card, vfio.Found) error, found vfio.Found) {
	w.T.Helper()
	done := make(chan error, 1)
	go func() { done <- do(w.T.Context(), w.card, found) }()
	for {
		select {
		case <-w.reach:
		case err := <-done:
			must(w.T, err)
			return
		}
	}
}

// TestWatchLeavesTheCardOutWithoutAGap watches all cards while one goes to VFIO and comes back.
func TestWatchLeavesTheCardOutWithoutAGap(t *testing.T) {
	s := newSite(t, "h100-passthrough", nil)
	card := s.Card(1)
	found := s.look(card)
	w, stop := s.startWatch(card)
	w.await(device.ReachOK)
	w.during(s.Bind, found)
	w.await(device.ReachNotOurs)
	w.during(s.Release, found)
	w.await(device.ReachOK)
	stop()
}

// A driver that is loaded while a virtual machine has the card does not take it from VFIO. When the
// card is released, the driver gets it, and the watch takes it in.
func TestReleasedCardGetsTheDriverThatWasLoadedMeanwhile(t *testing.T) {
	s := newSite(t, "vfio-awkward", nil)
	home := s.snapshot()
	s.Change(func(c *layout.Config, f *state.File) error { return c.DriverAway(f, false, true) })
	card := s.Card(0)
	uuid := card.UUID
	card.UUID = ""
	found := s.look(card)
	must(t, s.Bind(t.Context(), card, found))
	s.Change(func(c *layout.Config, f *state.File) error { return c.DriverBack(f, "", "") })
	s.has(card.PCIAddress, "vfio-pci")
	w, stop := s.startWatch(card)
	w.during(func(context.Context, device.Card, vfio.Found) error { <-w.began; return nil }, found)
	w.during(s.Release, found)
	s.is(home)
	card.UUID = uuid
	if _, err := s.cards.Look(t.Context(), card); err != nil {
		t.Errorf("NVIDIA's driver does not have the card: %v", err)
	}
	w.await(device.ReachOK)
	stop()
}

func TestCompanionsGoAlongAndHaveLateNodes(t *testing.T) {
	s := newSite(t, "vfio-awkward", nil)
	before := s.snapshot()
	for i, audio := range []device.PCIAddress{"0000:21:00.1", "0000:22:00.1"} {
		card := s.Card(i)
		found := s.look(card)
		if len(found.Functions) != 2 || found.Functions[0].Address != audio || found.Functions[1].Address != card.PCIAddress {
			t.Fatalf("found %+v", found)
		}
		must(t, s.Bind(t.Context(), card, found))
		s.has(audio, "vfio-pci")
		if a, err := s.Access(t.Context(), card.PCIAddress, false); err != nil || a.Node != fmt.Sprintf("/dev/vfio/%d", 40+i) {
			t.Errorf("access %+v, %v", a, err)
		}
		must(t, s.Release(t.Context(), card, found))
	}
	s.is(before)
	for i, want := range map[int]string{2: "cannot reset", 3: "virtual functions"} {
		if _, err := s.Look(t.Context(), s.Card(i)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("GPU %d: %v, want %q", i, err, want)
		}
	}
}

// Kernels before 5.15 have no file reset_method, but reset if they can reset the function.
func TestKernelWithoutResetMethodsIsAskedForReset(t *testing.T) {
	s := newSite(t, "vfio-awkward", func(n *model.Node) { n.VFIO.NoResetMethods = true })
	card := s.Card(0)
	found := s.look(card)
	must(t, s.Bind(t.Context(), card, found))
	s.has(card.PCIAddress, "vfio-pci")
	must(t, s.Release(t.Context(), card, found))
	if _, err := s.Look(t.Context(), s.Card(2)); err == nil || !strings.Contains(err.Error(), "cannot reset") {
		t.Errorf("the GPU without a reset: %v", err)
	}
}

func TestMissingModuleIsNamed(t *testing.T) {
	s := newSite(t, "h100-passthrough", func(n *model.Node) { n.VFIO.Module = model.VFIOUnloaded })
	if _, err := s.Look(t.Context(), s.Card(0)); err == nil || !strings.Contains(err.Error(), "modprobe vfio_pci") {
		t.Error(err)
	}
}

func TestVariantDriverIsForTheGPUAlone(t *testing.T) {
	s := newSite(t, "vfio-awkward", func(n *model.Node) {
		n.VFIO.Module = model.VFIOLoaded
		n.VFIO.Variants = []model.VFIOVariant{{Driver: "nv-vfio-pci", Module: "nv_vfio_pci", Vendor: "0x10de", Device: "0x26b9"}}
	})
	before, card := s.snapshot(), s.Card(0)
	found := s.look(card)
	must(t, s.Bind(t.Context(), card, found))
	s.has(card.PCIAddress, "nv-vfio-pci")
	s.has("0000:21:00.1", "vfio-pci")
	must(t, s.Release(t.Context(), card, found))
	s.is(before)
}

func TestProcessWithTheCardOpenIsNamedBeforeAnyWrite(t *testing.T) {
	s := newSite(t, "h100-passthrough", nil)
	before, card := s.snapshot(), s.Card(0)
	found := s.look(card)
	pid, end := s.Foreign("hold", 0)
	nvidiatest.RefusedBy(t, s.Bind(t.Context(), card, found), pid)
	s.is(before)
	end()
	must(t, s.Bind(t.Context(), card, found))
	s.has(card.PCIAddress, "vfio-pci")
}

// nvidia_drm makes DRM devices of the card, which keep it as its own device node does.
func TestUserOfADRMNodeIsNamed(t *testing.T) {
	s := newSite(t, "h100-passthrough", func(n *model.Node) { n.DRMNodes = true })
	before, card := s.snapshot(), s.Card(1)
	found := s.look(card)
	must(t, os.Symlink(fmt.Sprintf("/proc/%d", os.Getpid()), filepath.Join(s.Root, "proc", fmt.Sprint(os.Getpid()))))
	for _, name := range []string{"card33", "renderD161"} {
		node, err := unix.Open(filepath.Join(s.options.Dev, "dri", name), unix.O_PATH|unix.O_CLOEXEC, 0)
		must(t, err)
		limited, cancel := context.WithTimeout(t.Context(), nvidiatest.Patience)
		nvidiatest.RefusedBy(t, s.Bind(limited, card, found), os.Getpid())
		cancel()
		must(t, unix.Close(node))
		s.is(before)
	}
	other, err := unix.Open(filepath.Join(s.options.Dev, "dri/renderD162"), unix.O_PATH|unix.O_CLOEXEC, 0)
	must(t, err)
	defer func() { _ = unix.Close(other) }()
	must(t, s.Bind(t.Context(), card, found))
	s.has(card.PCIAddress, "vfio-pci")
}

// There the unbind would hang until the next boot, and no process could be ended to end it.
func TestCardThatModesetKeepsIsRefused(t *testing.T) {
	s := newSite(t, "h100-passthrough", func(n *model.Node) { n.DRMNodes, n.DRMModeset = true, true })
	card := s.Card(0)
	found := vfio.Found{Functions: []vfio.Binding{{Address: card.PCIAddress, Driver: "nvidia", VFIO: "vfio-pci"}}}
	limited, cancel := context.WithTimeout(t.Context(), nvidiatest.Patience)
	defer cancel()
	_, err := s.Look(limited, card)
	for _, err := range []error{err, s.Bind(limited, card, found)} {
		if err == nil || !strings.Contains(err.Error(), "modeset=0") || !strings.Contains(err.Error(), "580.105.08") {
			t.Errorf("%v: want the way out", err)
		}
	}
	// During a hung unbind the driver's override cannot be read, but the link is gone.
	driver, err := os.Readlink(filepath.Join(s.Paths().Sysfs, "bus/pci/devices", string(card.PCIAddress), "driver"))
	if filepath.Base(driver) != "nvidia" {
		t.Errorf("the card has driver %q (%v)", driver, err)
	}
}

func TestVirtualMachineWithTheCardIsNamed(t *testing.T) {
	s := newSite(t, "h100-passthrough", nil)
	card := s.Card(0)
	found := s.look(card)
	must(t, s.Bind(t.Context(), card, found))
	a, err := s.Access(t.Context(), card.PCIAddress, false)
	must(t, err)
	machine, err := unix.Open(filepath.Join(s.options.Dev, strings.TrimPrefix(a.Node, "/dev")), unix.O_PATH|unix.O_CLOEXEC, 0)
	must(t, err)
	must(t, os.Symlink(fmt.Sprintf("/proc/%d", os.Getpid()), filepath.Join(s.Root, "proc", fmt.Sprint(os.Getpid()))))
	nvidiatest.RefusedBy(t, s.Release(t.Context(), card, found), os.Getpid())
	s.has(card.PCIAddress, "vfio-pci")
	must(t, unix.Close(machine))
	must(t, s.Release(t.Context(), card, found))
	s.has(card.PCIAddress, "nvidia")
}

func TestHungUnbindCostsOneCardAndOneProcess(t *testing.T) {
	s := newSite(t, "h100-passthrough", nil)
	before, card := s.snapshot(), s.Card(0)
	found := s.look(card)
	// A process that takes the card between the check and the unbind, and that /proc does not show.
	holder, err := state.Open(layout.StatePath(s.Root))
	must(t, err)
	must(t, holder.Take(state.Device{GPU: 0}))
	limited, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	began := time.Now()
	var failed *nvidia.Error
	if err := s.Bind(limited, card, found); !errors.As(err, &failed) || failed.Code != device.FailureTimeout {
		t.Fatal(err)
	}
	hung := s.slot(card.PCIAddress).process
	if err := s.Release(t.Context(), card, found); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("process %d", hung.PID)) {
		t.Errorf("the next call: %v, want it to name process %d", err, hung.PID)
	}
	if s.slot(card.PCIAddress).process != hung {
		t.Error("another process was started for the card")
	}
	if took := time.Since(began); took > nvidiatest.Patience {
		t.Errorf("both calls took %s", took)
	}
	other := s.Card(1)
	found1 := s.look(other)
	must(t, s.Bind(t.Context(), other, found1))
	s.has(other.PCIAddress, "vfio-pci")
	must(t, s.Release(t.Context(), other, found1))

	must(t, holder.Close())
	<-hung.Gone
	must(t, s.Release(t.Context(), card, found))
	s.is(before)
}

// TestEveryWriteWithEveryFault interrupts the bind and the release at each kind of write. After
// that the same call succeeds, and a release restores the card.
func TestEveryWriteWithEveryFault(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-unit runs it without the race detector")
	}
	s := newSite(t, "vfio-awkward", nil)
	before, card := s.snapshot(), s.Card(0)
	found := s.look(card)
	for _, call := range []struct {
		name    string
		prepare func()
		do      func(context.Context, device.Card, vfio.Found) error
		want    string
	}{
		{"bind", func() {}, s.Bind, "vfio-pci"},
		{"release", func() { must(t, s.Bind(t.Context(), card, found)) }, s.Release, "nvidia"},
	} {
		for _, write := range []string{state.SysfsOverride, state.SysfsUnbind, state.SysfsProbe} {
			for _, function := range found.Functions {
				for name, fault := range map[string]state.Fault{
					"error": {Kind: state.FaultFail, Error: uint32(syscall.EIO)}, "no effect": {Kind: state.FaultIgnore},
					"kill before": {Kind: state.FaultKill}, "kill after": {Kind: state.FaultKill, After: 1},
				} {
					call.prepare()
					s.fault(fault, write+"@"+string(function.Address))
					if err := call.do(t.Context(), card, found); err == nil {
						if s.has(card.PCIAddress, call.want); call.name == "release" {
							s.is(before)
						}
					}
					s.clearFaults()
					must(t, call.do(t.Context(), card, found))
					s.has(card.PCIAddress, call.want)
					must(t, s.Release(t.Context(), card, found))
					if got := s.snapshot(); !slices.Equal(got, before) {
						t.Fatalf("%s, %s of %s, %s: %v", call.name, write, function.Address, name, got)
					}
				}
			}
		}
	}
}

func TestCardWithoutNVIDIADriver(t *testing.T) {
	s := newSite(t, "vfio-awkward", nil)
	s.Change(func(c *layout.Config, f *state.File) error { return c.DriverAway(f, false, true) })
	before, card := s.snapshot(), s.Card(0)
	card.UUID = ""
	found := s.look(card)
	must(t, s.Bind(t.Context(), card, found))
	s.has(card.PCIAddress, "vfio-pci")
	must(t, s.Release(t.Context(), card, found))
	s.is(before)
}

// Two GPUs in one IOMMU group always go to the same virtual machine, so neither is bound for a
// claim, whatever drivers they have.
func TestGPUThatSharesItsGroupWithAnotherIsRefused(t *testing.T) {
	s := newSite(t, "vfio-awkward", nil)
	bus := vfio.Sysfs(s.Paths().Sysfs)
	cards := []device.Card{s.Card(4), s.Card(5)}
	for _, driver := range []string{"nvidia", "", "vfio-pci"} {
		for _, c := range cards {
			if was, _, err := bus.Driver(c.PCIAddress); err == nil && was != "" && was != driver {
				must(t, bus.Unbind(c.PCIAddress, was))
			}
			if driver != "" {
				must(t, bus.SetOverride(c.PCIAddress, driver))
				must(t, bus.Probe(c.PCIAddress))
			}
			s.has(c.PCIAddress, driver)
		}
		before := s.snapshot()
		for i, c := range cards {
			other := cards[1-i].PCIAddress
			if _, err := s.Look(t.Context(), c); err == nil || !strings.Contains(err.Error(), string(other)) {
				t.Errorf("look with driver %q: %v, want one that names %s", driver, err, other)
			}
		}
		s.is(before)
	}
}

// A GPU may be plugged into the group after the look, and the record of an earlier version of the
// driver may name another GPU.
func TestOtherGPUIsNeitherBoundNorReleased(t *testing.T) {
	s := newSite(t, "vfio-awkward", nil)
	bus := vfio.Sysfs(s.Paths().Sysfs)
	card, other := s.Card(4), s.Card(5)
	own := vfio.Binding{Address: card.PCIAddress, Driver: "nvidia", VFIO: "vfio-pci"}
	before := s.snapshot()
	for name, found := range map[string]vfio.Found{
		"plugged in later": {Functions: []vfio.Binding{own}},
		"recorded":         {Functions: []vfio.Binding{{Address: other.PCIAddress, Driver: "nvidia", VFIO: "vfio-pci"}, own}},
	} {
		if err := s.Bind(t.Context(), card, found); err == nil || !strings.Contains(err.Error(), string(other.PCIAddress)) {
			t.Errorf("%s: bind: %v, want one that names %s", name, err, other.PCIAddress)
		}
		s.is(before)
		for _, c := range []device.Card{card, other} { // another claim has the other GPU
			must(t, bus.SetOverride(c.PCIAddress, "vfio-pci"))
			must(t, bus.Unbind(c.PCIAddress, "nvidia"))
			must(t, bus.Probe(c.PCIAddress))
		}
		must(t, s.Release(t.Context(), card, found))
		s.has(card.PCIAddress, "nvidia")
		s.has(other.PCIAddress, "vfio-pci")
		found := vfio.Found{Functions: []vfio.Binding{{Address: other.PCIAddress, Driver: "nvidia", VFIO: "vfio-pci"}}}
		must(t, s.Release(t.Context(), other, found))
		s.is(before)
	}
}
