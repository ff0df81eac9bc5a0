package nvidia

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	gocmp "github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// describedMIG returns what a scan should report about MIG for a card of the simulated node.
func describedMIG(card model.Card, m *model.GPU) *device.MIG {
	if !m.MIG.Supported.Value {
		return nil
	}
	mig := &device.MIG{ModeFixed: m.MIG.NeedsReset.Value, ReadOnly: card.Virtualization == "vgpu"}
	if card.MIG != nil {
		mig.Enabled, mig.Pending = card.MIG.Enabled, card.MIG.Enabled
		if card.MIG.Pending != nil {
			mig.Pending = *card.MIG.Pending
		}
	}
	for _, p := range m.MIG.Profiles {
		mig.Profiles = append(mig.Profiles, device.Profile{
			ID: p.ID, Name: strings.TrimPrefix(p.Name, "MIG "), Slices: p.Slices, MaxInstances: p.InstancesMax, MemoryBytes: p.MemoryMiB << 20,
			Engines: device.Engines{
				Multiprocessors: p.SM, CopyEngines: p.CopyEngines, Decoders: p.Decoders, Encoders: p.Encoders, JPEGEngines: p.JPEGEngines,
				OFAEngines: p.OFAEngines,
			},
			Size: p.Placements.Size, Starts: slices.Sorted(slices.Values(p.Placements.Starts)),
		})
	}
	slices.SortFunc(mig.Profiles, func(a, b device.Profile) int { return cmp.Compare(a.ID, b.ID) })
	return mig
}

func expectedInstances(card model.Card) int {
	if card.MIG == nil {
		return 0
	}
	return len(card.MIG.Instances)
}

// partitions returns Partitions whose worker processes are the test binary, on the site's GPUs.
func (s site) partitions() *Partitions {
	s.t.Helper()
	s.t.Setenv(roleVariable, "partition")
	self, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	p := NewPartitions(s.paths(), self)
	s.t.Cleanup(p.Close)
	return p
}

// scanDuringChange scans the site in a child process with the role "scan". The tests' other child
// processes, such as workers, may have another role at the same time.
func (s site) scanDuringChange() (Node, error) {
	self, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	return Isolated(s.paths(), "env", roleVariable+"=scan", self)(context.Background())
}

func (s site) fault(f state.Fault, function string, times int) {
	s.t.Helper()
	s.change(func(_ *layout.Config, file *state.File) error { return file.AddFault(f, function, times) })
}

// awaitHit returns when the only fault that was injected into the site has triggered, or when ctx
// ends.
func (s site) awaitHit(ctx context.Context) {
	f, err := state.Open(layout.StatePath(s.root))
	if err != nil {
		s.t.Error(err)
		return
	}
	defer func() { _ = f.Close() }()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for atomic.LoadUint64(&f.Fault(0).Hits) == 0 {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// changer changes the partitioning of one card. If a change fails, it fails the test.
type changer struct {
	*Partitions
	t    *testing.T
	card Card
}

func (s site) changer(p *Partitions, index int) changer {
	s.t.Helper()
	f, err := state.Open(layout.StatePath(s.root))
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	g := f.GPU(index)
	return changer{p, s.t, Card{PCIAddress: device.PCIAddress(g.Address()), UUID: state.Text(g.UUID[:])}}
}

func (c changer) make(profile uint32, at device.Placement) device.Instance {
	c.t.Helper()
	made, err := c.tryMake(c.t.Context(), profile, at)
	if err != nil {
		c.t.Fatal(err)
	}
	return made
}

func (c changer) tryMake(ctx context.Context, profile uint32, at device.Placement) (device.Instance, error) {
	made, err := c.CreateInstance(ctx, c.card, profile, at)
	if err != nil {
		return made, err
	}
	return c.CreateCompute(ctx, c.card, made.ID)
}

func (c changer) destroy(i device.Instance) {
	c.t.Helper()
	if err := c.Destroy(c.t.Context(), c.card, i); err != nil {
		c.t.Fatal(err)
	}
}

func (c changer) instances() []device.Instance {
	c.t.Helper()
	s, err := c.Look(c.t.Context(), c.card)
	if err != nil {
		c.t.Fatal(err)
	}
	return s.MIG.Instances
}

func (c changer) mode(on bool) {
	c.t.Helper()
	s, err := c.SetMode(c.t.Context(), c.card, on)
	if err != nil || s.MIG.Enabled != on {
		c.t.Fatal(s, err)
	}
}

func TestEveryPlacementOfEveryModel(t *testing.T) {
	models, err := model.ReadGPUs(filepath.Join(simulator, "models"))
	if err != nil {
		t.Fatal(err)
	}
	for key, m := range models {
		if !m.MIG.Supported.Value {
			continue
		}
		t.Run(key, func(t *testing.T) {
			s := newSiteOf(t, oneCard(t, key, m.MIG.NeedsReset.Value), layout.Container, "")
			c := s.changer(s.partitions(), 0)
			c.mode(true)
			for _, p := range m.MIG.Profiles {
				for _, start := range p.Placements.Starts {
					at := device.Placement{Start: start, Size: p.Placements.Size}
					made := c.make(p.ID, at)
					if made.ProfileID != p.ID || made.Placement != at || len(made.Compute) != 1 {
						t.Fatalf("%+v", made)
					}
					if ci := made.Compute[0]; ci.Name != strings.TrimPrefix(p.Name, "MIG ") || ci.Multiprocessors != p.SM ||
						!strings.HasPrefix(ci.UUID, "MIG-") {
						t.Errorf("%+v is not what fills %+v", ci, p)
					}
					if diff := gocmp.Diff([]device.Instance{made}, c.instances()); diff != "" {
						t.Error(diff)
					}
					for _, n := range s.paths().CapabilityEdits(specs.ContainerEdits{}, made, made.Compute[0]).DeviceNodes {
						if !isCharDevice(s.paths().Visible(n.HostPath)) {
							t.Errorf("%s is no device node", n.HostPath)
						}
					}
					c.destroy(made)
				}
			}
			if left := c.instances(); len(left) > 0 {
				t.Error(left)
			}
		})
	}
}

// oneCard returns a simulated node with one GPU. key is the name of the GPU's model, and on is its
// MIG mode.
func oneCard(t *testing.T, key string, on bool) *model.Node {
	t.Helper()
	file := filepath.Join(t.TempDir(), "one.yaml")
	text := fmt.Sprintf("driverVersion: %q\ncudaVersion: \"13.0\"\ngpus:\n"+
		"- {model: %s, pci: \"0000:1b:00.0\", pciRoot: \"pci0000:15\", mig: {enabled: %v}}\n", fakeVersion, key, on)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	node, err := model.ReadNode(file, seed)
	if err != nil {
		t.Fatal(err)
	}
	return node
}

func TestScanFindsCreatedInstances(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Container, "")
	p := s.partitions()
	c := s.changer(p, 3)
	c.mode(true)
	made := []device.Instance{c.make(19, device.Placement{Start: 1, Size: 1}), c.make(15, device.Placement{Start: 2, Size: 2}),
		c.make(9, device.Placement{Start: 4, Size: 4})}
	slices.SortFunc(made, func(a, b device.Instance) int { return cmp.Compare(a.ID, b.ID) })
	before := NewChangeDetector(s.paths()).Fingerprint()
	node, err := s.scanDuringChange()
	if err != nil || len(node.Problems) > 0 {
		t.Fatal(err, node.Problems)
	}
	if diff := gocmp.Diff(made, node.GPUs[3].MIG.Instances); diff != "" {
		t.Error(diff)
	}
	c.destroy(made[0])
	if NewChangeDetector(s.paths()).Fingerprint() == before {
		t.Error("the fingerprint ignores the removal")
	}
}

func TestOverlappingPlacementsAreRefused(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Container, "")
	c := s.changer(s.partitions(), 0)
	if _, err := c.CreateInstance(t.Context(), c.card, 19, device.Placement{Start: 0, Size: 1}); codeOf(err) != CodeNotSupported {
		t.Errorf("with MIG mode off: %v", err)
	}
	c.mode(true)
	c.make(9, device.Placement{Start: 0, Size: 4})
	for profile, at := range map[uint32]device.Placement{19: {Start: 3, Size: 1}, 0: {Start: 0, Size: 8}, 9: {Start: 0, Size: 4}} {
		if _, err := c.CreateInstance(t.Context(), c.card, profile, at); codeOf(err) != CodeInsufficient {
			t.Errorf("profile %d at %v: %v", profile, at, err)
		}
	}
	if _, err := c.CreateInstance(t.Context(), c.card, 9, device.Placement{Start: 1, Size: 4}); codeOf(err) != CodeNotSupported {
		t.Errorf("an invalid placement: %v", err)
	}
	if _, err := c.CreateInstance(t.Context(), c.card, 4242, device.Placement{Start: 1, Size: 4}); codeOf(err) != CodeNotSupported {
		t.Errorf("an invalid profile: %v", err)
	}
	if _, err := c.SetMode(t.Context(), c.card, false); codeOf(err) != CodeInUse || !strings.Contains(err.Error(), "1 GPU instances") {
		t.Errorf("disabling MIG mode: %v", err)
	}
}

func TestSetModeFailures(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Container, "")
	c := s.changer(s.partitions(), 0)
	s.change(func(_ *layout.Config, f *state.File) error {
		return f.SetBusy(0, state.Process{PID: uint32(os.Getpid())})
	})
	_, err := c.SetMode(t.Context(), c.card, true)
	var failed *PartitionError
	if !errors.As(err, &failed) || failed.Code != CodeInUse || len(failed.Processes) != 1 || failed.Processes[0].PID != uint32(os.Getpid()) {
		t.Errorf("in use: %v", err)
	}
	if state, err := c.Look(t.Context(), c.card); err != nil || state.MIG.Pending {
		t.Errorf("the next reset would enable MIG mode: %+v, %v", state, err)
	}
	s.change(func(_ *layout.Config, f *state.File) error { return f.ClearBusy(0) })
	c.mode(true)

	ampere := newSite(t, "dgx-a100", layout.Container, "")
	a := ampere.changer(ampere.partitions(), 0)
	if _, err := a.SetMode(t.Context(), a.card, true); codeOf(err) != CodeReset {
		t.Errorf("an A100: %v", err)
	}
	if state, err := a.Look(t.Context(), a.card); err != nil || state.MIG.Pending || state.MIG.Enabled {
		t.Errorf("an A100 afterwards: %+v, %v", state, err)
	}
}

func TestLeavingMIGModeWaitsForFabric(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Container, "")
	c := s.changer(s.partitions(), 0)
	c.mode(true)
	s.change(func(_ *layout.Config, f *state.File) error { return f.SetFabricSettle(time.Hour) })
	ctx, cancel := c.until(t, "fabric ")
	defer cancel()
	if _, err := c.SetMode(ctx, c.card, false); codeOf(err) != CodeTimeout || !strings.Contains(err.Error(), "fabric") {
		t.Errorf("a fabric that takes an hour: %v", err)
	}
	s.change(func(_ *layout.Config, f *state.File) error {
		return f.SetFabric(0, nvml.GPU_FABRIC_STATE_COMPLETED, time.Millisecond)
	})
	c.mode(false)
}

func TestBusyInstanceIsDestroyedOnceFree(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Container, "")
	p := s.partitions()
	c := s.changer(p, 0)
	c.mode(true)
	made := c.make(19, device.Placement{Start: 0, Size: 1})
	busy := make(chan struct{})
	var once sync.Once
	p.Observe = func(_ string, _ time.Duration, code string) {
		if code == string(CodeInUse) {
			once.Do(func() { close(busy) })
		}
	}
	s.change(func(_ *layout.Config, f *state.File) error {
		return f.SetBusy(0, state.Process{PID: uint32(os.Getpid()), InInstance: true, Instance: made.ID, Compute: made.Compute[0].ID})
	})
	result := make(chan error)
	go func() { result <- c.Destroy(t.Context(), c.card, made) }()
	<-busy
	s.change(func(_ *layout.Config, f *state.File) error { return f.ClearBusy(0) })
	if err := <-result; err != nil || len(c.instances()) > 0 {
		t.Errorf("%v, %v", err, c.instances())
	}
}

func TestHungMIGChangeBlocksOnlyItsGPU(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Container, "")
	s.change(func(_ *layout.Config, f *state.File) error { return f.SetCutLock(state.CutLockGPU) })
	p := s.partitions()
	c, other := s.changer(p, 0), s.changer(p, 1)
	c.mode(true)
	other.mode(true)
	s.fault(state.Fault{Kind: state.FaultSlow, GPU: 0, DelayMS: 3600_000}, "nvmlDeviceCreateGpuInstanceWithPlacement", 1)
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	go func() {
		s.awaitHit(ctx)
		<-time.After(hangLimit) // meanwhile the other GPU is changed
		cancel(context.DeadlineExceeded)
	}()
	result := make(chan error)
	go func() {
		_, err := c.tryMake(ctx, 19, device.Placement{Start: 0, Size: 1})
		result <- err
	}()
	other.destroy(other.make(19, device.Placement{Start: 0, Size: 1}))
	if err := <-result; codeOf(err) != CodeTimeout || !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	c.destroy(c.make(19, device.Placement{Start: 0, Size: 1}))
}

// The test injects an error, a crash and a hang into every NVML call, before and after the call's
// effect. It expects that Look then reports the MIG instances that are left, and that Destroy
// removes them.
func TestLookIsAccurateAfterAnyFailure(t *testing.T) {
	reading := []string{
		"nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetMigMode",
		"nvmlDeviceGetGpuInstanceProfileInfo", "nvmlDeviceGetGpuInstanceById", "nvmlGpuInstanceGetInfo",
		"nvmlGpuInstanceGetComputeInstanceProfileInfo",
		"nvmlComputeInstanceGetInfo_v2", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex",
		"nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId",
	}
	changing := []string{
		"nvmlDeviceSetMigMode", "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance",
		"nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy",
	}
	type meeting struct {
		function string
		fault    state.Fault
	}
	var all []meeting
	for _, function := range slices.Concat(reading, changing) {
		fail := state.Fault{Kind: state.FaultFail, GPU: state.AnyGPU, Error: uint32(nvml.ERROR_UNKNOWN)}
		kill := state.Fault{Kind: state.FaultKill, GPU: state.AnyGPU}
		hang := state.Fault{Kind: state.FaultSlow, GPU: state.AnyGPU, DelayMS: 3600_000}
		all = append(all, meeting{function, fail}, meeting{function, kill}, meeting{function, hang})
		if slices.Contains(changing, function) {
			fail.After, kill.After, hang.After = 1, 1, 1
			all = append(all, meeting{function, fail}, meeting{function, kill}, meeting{function, hang})
		}
	}
	// In short mode, run every seventh case, because worker processes start slowly under the race
	// detector.
	if testing.Short() {
		for i := range all[:len(all)/7] {
			all[i] = all[7*i]
		}
		all = all[:len(all)/7]
	}
	s := newSiteOf(t, oneCard(t, "h100-sxm5-80gb", false), layout.Container, "")
	p := s.partitions()
	c := s.changer(p, 0)
	at := device.Placement{Start: 2, Size: 2}
	cycle := func(ctx context.Context) error {
		if _, err := c.SetMode(ctx, c.card, true); err != nil {
			return err
		}
		made, err := c.tryMake(ctx, 14, at)
		if err != nil {
			return err
		}
		if err := c.Destroy(ctx, c.card, made); err != nil {
			return err
		}
		_, err = c.SetMode(ctx, c.card, false)
		return err
	}
	for _, m := range all {
		name := fmt.Sprintf("%s kind %d after %d", m.function, m.fault.Kind, m.fault.After)
		if err := p.slot(c.card.PCIAddress).stop(t.Context()); err != nil { // so that the next request makes every NVML call again
			t.Fatal(err)
		}
		s.fault(m.fault, m.function, 1)
		ctx, cancel := context.WithCancel(t.Context())
		if m.fault.Kind == state.FaultSlow {
			go func() {
				s.awaitHit(ctx)
				cancel()
			}()
		}
		err := cycle(ctx)
		cancel()
		modeDecides := m.function == "nvmlDeviceSetMigMode" && m.fault.Kind == state.FaultFail && m.fault.After == 1
		want := CodeOther
		switch m.fault.Kind {
		case state.FaultKill:
			want = CodeDied
		case state.FaultSlow:
			want = CodeTimeout
		}
		if modeDecides && err != nil || !modeDecides && codeOf(err) != want {
			t.Errorf("%s: %v", name, err)
		}
		s.change(func(_ *layout.Config, f *state.File) error { return f.ClearFaults() })
		for _, left := range c.instances() {
			if left.Placement != at || left.ProfileID != 14 {
				t.Errorf("%s: %+v was left", name, left)
			}
			c.destroy(left)
		}
		if err := cycle(t.Context()); err != nil {
			t.Errorf("%s: afterwards: %v", name, err)
		}
	}
}

func TestScanWaitsForDriverBlockedByMIGChange(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Container, "")
	s.change(func(_ *layout.Config, f *state.File) error { return f.SetCutLock(state.CutLockAll) })
	c := s.changer(s.partitions(), 0)
	c.mode(true)
	s.fault(state.Fault{Kind: state.FaultSlow, GPU: 0, DelayMS: 100}, "nvmlDeviceCreateGpuInstanceWithPlacement", 0)
	var changes sync.WaitGroup
	changes.Go(func() {
		for start := range uint32(7) {
			c.make(19, device.Placement{Start: start, Size: 1})
		}
	})
	node, err := s.scanDuringChange()
	if err != nil || len(node.Problems) > 0 || len(node.GPUs) != 8 {
		t.Error(err, node.Problems)
	}
	changes.Wait()
	if node, err = s.scanDuringChange(); err != nil || len(node.GPUs[0].MIG.Instances) != 7 {
		t.Error(err, node.Problems)
	}
}

func TestScanDuringMIGChangesIsConsistent(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Container, "")
	c := s.changer(s.partitions(), 0)
	c.mode(true)
	ctx, stop := context.WithCancel(t.Context())
	var changes sync.WaitGroup
	changes.Go(func() {
		for ctx.Err() == nil {
			made, err := c.tryMake(t.Context(), 19, device.Placement{Start: 5, Size: 1})
			if err == nil {
				err = c.Destroy(t.Context(), c.card, made)
			}
			if err != nil {
				t.Error(err)
				return
			}
		}
	})
	for range 20 {
		node, err := s.scanDuringChange()
		if err != nil || len(node.Problems) > 0 || len(node.GPUs) != 8 || len(node.GPUs[0].MIG.Instances) > 1 {
			t.Errorf("%v, %v", err, node.Problems)
			break
		}
	}
	stop()
	changes.Wait()
}
