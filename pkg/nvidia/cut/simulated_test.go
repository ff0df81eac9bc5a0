package cut

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
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	gocmp "github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/scan"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

func TestModeChangeWaitsForIdleWorkerOfAnotherGPU(t *testing.T) {
	s := nvidiatest.NewSite(t, "awkward", layout.Container, "")
	name, value, _ := strings.Cut(nvidia.ChildMark, "=")
	t.Setenv(name, value)
	_, end := s.Foreign("hold", 1) // NVML may open this GPU in a worker
	time.AfterFunc(idleLimit, end)
	s.Changer(partitionsOf(s), 1).Mode(true)
}

func TestFirstCreateInUseIsRetried(t *testing.T) {
	s := nvidiatest.NewSite(t, "awkward", layout.Container, "")
	c := s.Changer(partitionsOf(s), 1)
	c.Mode(true)
	c.Remove(c.Make(14, device.Placement{Start: 2, Size: 2}))
	// If the GPU stays in use, the error must name the process that has it open.
	pid, _ := s.Foreign("hold", 1)
	s.Fault(state.Fault{Kind: state.FaultFail, GPU: 1, Error: uint32(nvml.ERROR_IN_USE)}, "nvmlDeviceCreateGpuInstanceWithPlacement", 0)
	// The retries end 2 s before this deadline.
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err := c.CreateInstance(ctx, c.Card, 14, device.Placement{Start: 2, Size: 2})
	nvidiatest.RefusedBy(t, err, pid)
}

func TestComputeInstanceInUseIsRetried(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	c := s.Changer(partitionsOf(s), 1)
	c.Mode(true)
	s.Fault(state.Fault{Kind: state.FaultFail, GPU: 1, Error: uint32(nvml.ERROR_IN_USE)}, "nvmlGpuInstanceCreateComputeInstance", 2)
	c.Remove(c.Make(14, device.Placement{Start: 2, Size: 2}))
}

// partitionsOf returns Partitions whose worker processes are the test binary, on the site's GPUs.
func partitionsOf(s nvidiatest.Site) *Partitions {
	s.T.Helper()
	p := New(s.Paths(), nil, s.Role("partition")...)
	s.T.Cleanup(func() { nvidiatest.StopWorkers(p) })
	return p
}

func TestEveryPlacementOfEveryModel(t *testing.T) {
	models, err := model.ReadGPUs(filepath.Join(nvidiatest.Simulator, "models"))
	if err != nil {
		t.Fatal(err)
	}
	for key, m := range models {
		if !m.MIG.Supported.Value {
			continue
		}
		t.Run(key, func(t *testing.T) {
			s := nvidiatest.NewSiteOf(t, oneCard(t, key, m.MIG.NeedsReset.Value), layout.Container, "")
			c := s.Changer(partitionsOf(s), 0)
			c.Mode(true)
			for _, p := range m.MIG.Profiles {
				for _, start := range p.Placements.Starts {
					at := device.Placement{Start: start, Size: p.Placements.Size}
					made := c.Make(p.ID, at)
					if made.ProfileID != p.ID || made.Placement != at || len(made.Compute) != 1 {
						t.Fatalf("%+v", made)
					}
					if ci := made.Compute[0]; ci.Name != strings.TrimPrefix(p.Name, "MIG ") || ci.Multiprocessors != p.SM ||
						!strings.HasPrefix(ci.UUID, "MIG-") {
						t.Errorf("%+v is not what fills %+v", ci, p)
					}
					if diff := gocmp.Diff([]device.Instance{made}, c.Instances()); diff != "" {
						t.Error(diff)
					}
					for _, n := range scan.CapabilityEdits(s.Paths(), specs.ContainerEdits{}, made, made.Compute[0]).DeviceNodes {
						var node unix.Stat_t
						path := filepath.Join(s.Paths().DeviceRoot(), n.Path)
						if err := unix.Stat(path, &node); err != nil || node.Mode&unix.S_IFMT != unix.S_IFCHR ||
							node.Rdev != unix.Mkdev(uint32(n.Major), uint32(n.Minor)) {
							t.Errorf("%s has the number %#x, not %d:%d, %v", path, node.Rdev, n.Major, n.Minor, err)
						}
					}
					c.Remove(made)
				}
			}
			if left := c.Instances(); len(left) > 0 {
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
		"- {model: %s, pci: \"0000:1b:00.0\", pciRoot: \"pci0000:15\", mig: {enabled: %v}}\n", nvidiatest.Version, key, on)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	node, err := model.ReadNode(file, nvidiatest.Seed)
	if err != nil {
		t.Fatal(err)
	}
	return node
}

func TestScanFindsCreatedInstances(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	p := partitionsOf(s)
	c := s.Changer(p, 3)
	c.Mode(true)
	made := []device.Instance{c.Make(19, device.Placement{Start: 1, Size: 1}), c.Make(15, device.Placement{Start: 2, Size: 2}),
		c.Make(9, device.Placement{Start: 4, Size: 4})}
	slices.SortFunc(made, func(a, b device.Instance) int { return cmp.Compare(a.ID, b.ID) })
	before := scan.Fingerprint(s.Paths())
	node, err := scan.Isolated(s.Paths(), s.Role("scan")...)(t.Context())
	if err != nil || len(node.Problems) > 0 {
		t.Fatal(err, node.Problems)
	}
	if diff := gocmp.Diff(made, node.GPUs[3].MIG.Instances); diff != "" {
		t.Error(diff)
	}
	c.Remove(made[0])
	if scan.Fingerprint(s.Paths()) == before {
		t.Error("the fingerprint ignores the removal")
	}
}

func TestOverlappingPlacementsAreRefused(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	c := s.Changer(partitionsOf(s), 0)
	if _, err := c.CreateInstance(t.Context(), c.Card, 19, device.Placement{Start: 0, Size: 1}); codeOf(err) != device.FailureNotSupported {
		t.Errorf("with MIG mode off: %v", err)
	}
	c.Mode(true)
	c.Make(9, device.Placement{Start: 0, Size: 4})
	for profile, at := range map[uint32]device.Placement{19: {Start: 3, Size: 1}, 0: {Start: 0, Size: 8}, 9: {Start: 0, Size: 4}} {
		if _, err := c.CreateInstance(t.Context(), c.Card, profile, at); codeOf(err) != device.FailureInsufficient {
			t.Errorf("profile %d at %v: %v", profile, at, err)
		}
	}
	if _, err := c.CreateInstance(t.Context(), c.Card, 9, device.Placement{Start: 1, Size: 4}); codeOf(err) != device.FailureNotSupported {
		t.Errorf("an invalid placement: %v", err)
	}
	if _, err := c.CreateInstance(t.Context(), c.Card, 4242, device.Placement{Start: 1, Size: 4}); codeOf(err) != device.FailureNotSupported {
		t.Errorf("an invalid profile: %v", err)
	}
	if _, err := c.SetMode(t.Context(), c.Card, false); codeOf(err) != device.FailureInUse ||
		!strings.Contains(err.Error(), "1 GPU instances") {
		t.Errorf("disabling MIG mode: %v", err)
	}
}

func TestSetModeFailures(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	c := s.Changer(partitionsOf(s), 0)
	pid, end := s.Foreign("hold", 0)
	s.Change(func(_ *layout.Config, f *state.File) error { return f.SetBusy(0, state.Process{PID: uint32(pid)}) })
	_, err := c.SetMode(t.Context(), c.Card, true)
	nvidiatest.RefusedBy(t, err, pid)
	end()
	if state, err := c.Look(t.Context(), c.Card); err != nil || state.MIG.Pending {
		t.Errorf("the next reset would enable MIG mode: %+v, %v", state, err)
	}
	s.Change(func(_ *layout.Config, f *state.File) error { return f.ClearBusy(0) })
	c.Mode(true)

	ampere := nvidiatest.NewSite(t, "dgx-a100", layout.Container, "")
	a := ampere.Changer(partitionsOf(ampere), 0)
	if _, err := a.SetMode(t.Context(), a.Card, true); codeOf(err) != device.FailureReset {
		t.Errorf("an A100: %v", err)
	}
	if state, err := a.Look(t.Context(), a.Card); err != nil || state.MIG.Pending || state.MIG.Enabled {
		t.Errorf("an A100 afterwards: %+v, %v", state, err)
	}
}

// A GPU joins its fabric again when it leaves MIG mode, or already after its last instance.
func TestLeavingMIGModeWaitsForFabric(t *testing.T) {
	for _, byInstances := range []uint32{0, 1} {
		s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
		s.Change(func(_ *layout.Config, f *state.File) error {
			f.Header().FabricByInstances = byInstances
			return f.SetFabricSettle(time.Hour)
		})
		p := partitionsOf(s)
		c := s.Changer(p, 0)
		c.Mode(true)
		c.Remove(c.Make(19, device.Placement{Start: 0, Size: 1}))
		ctx, cancel := p.until(t, "fabric ")
		defer cancel()
		if _, err := c.SetMode(ctx, c.Card, false); codeOf(err) != device.FailureTimeout || !strings.Contains(err.Error(), "fabric") {
			t.Errorf("a fabric that takes an hour: %v", err)
		}
		s.Change(func(_ *layout.Config, f *state.File) error {
			return f.SetFabric(0, nvml.GPU_FABRIC_STATE_COMPLETED, time.Millisecond)
		})
		c.Mode(false)
	}
}

func TestBusyInstanceIsDestroyedOnceFree(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	p := partitionsOf(s)
	c := s.Changer(p, 0)
	c.Mode(true)
	made := c.Make(19, device.Placement{Start: 0, Size: 1})
	s.Change(func(_ *layout.Config, f *state.File) error {
		return f.SetBusy(0, state.Process{PID: uint32(os.Getpid()), InInstance: true, Instance: made.ID, Compute: made.Compute[0].ID})
	})
	result := make(chan error)
	go func() { result <- c.Destroy(t.Context(), c.Card, made) }()
	select {
	case err := <-result:
		t.Fatalf("Destroy ended while a process used the instance: %v", err)
	case <-time.After(500 * time.Millisecond): // several attempts
	}
	s.Change(func(_ *layout.Config, f *state.File) error { return f.ClearBusy(0) })
	if err := <-result; err != nil || len(c.Instances()) > 0 {
		t.Errorf("%v, %v", err, c.Instances())
	}
}

func TestHungMIGChangeBlocksOnlyItsGPU(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	s.Change(func(_ *layout.Config, f *state.File) error { return f.SetCutLock(state.CutLockGPU) })
	p := partitionsOf(s)
	c, other := s.Changer(p, 0), s.Changer(p, 1)
	c.Mode(true)
	other.Mode(true)
	s.Fault(state.Fault{Kind: state.FaultSlow, GPU: 0, DelayMS: 3600_000}, "nvmlDeviceCreateGpuInstanceWithPlacement", 1)
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	go func() {
		s.AwaitHit(ctx)
		<-time.After(nvidiatest.HangLimit) // meanwhile the other GPU is changed
		cancel(context.DeadlineExceeded)
	}()
	result := make(chan error)
	go func() {
		_, err := c.TryMake(ctx, 19, device.Placement{Start: 0, Size: 1})
		result <- err
	}()
	other.Remove(other.Make(19, device.Placement{Start: 0, Size: 1}))
	if err := <-result; codeOf(err) != device.FailureTimeout || !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	c.Remove(c.Make(19, device.Placement{Start: 0, Size: 1}))
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
	s := nvidiatest.NewSiteOf(t, oneCard(t, "h100-sxm5-80gb", false), layout.Container, "")
	p := partitionsOf(s)
	c := s.Changer(p, 0)
	at := device.Placement{Start: 2, Size: 2}
	cycle := func(ctx context.Context) error {
		if _, err := c.SetMode(ctx, c.Card, true); err != nil {
			return err
		}
		made, err := c.TryMake(ctx, 14, at)
		if err != nil {
			return err
		}
		if err := c.Destroy(ctx, c.Card, made); err != nil {
			return err
		}
		_, err = c.SetMode(ctx, c.Card, false)
		return err
	}
	for _, m := range all {
		name := fmt.Sprintf("%s kind %d after %d", m.function, m.fault.Kind, m.fault.After)
		if err := p.slot(c.Card.PCIAddress).stop(t.Context()); err != nil { // so that the next request makes every NVML call again
			t.Fatal(err)
		}
		s.Fault(m.fault, m.function, 1)
		ctx, cancel := context.WithCancel(t.Context())
		if m.fault.Kind == state.FaultSlow {
			go func() {
				s.AwaitHit(ctx)
				cancel()
			}()
		}
		err := cycle(ctx)
		cancel()
		modeDecides := m.function == "nvmlDeviceSetMigMode" && m.fault.Kind == state.FaultFail && m.fault.After == 1
		want := device.FailureOther
		switch m.fault.Kind {
		case state.FaultKill:
			want = device.FailureDied
		case state.FaultSlow:
			want = device.FailureTimeout
		}
		if modeDecides && err != nil || !modeDecides && codeOf(err) != want {
			t.Errorf("%s: %v", name, err)
		}
		s.Change(func(_ *layout.Config, f *state.File) error { return f.ClearFaults() })
		for _, left := range c.Instances() {
			if left.Placement != at || left.ProfileID != 14 {
				t.Errorf("%s: %+v was left", name, left)
			}
			c.Remove(left)
		}
		if err := cycle(t.Context()); err != nil {
			t.Errorf("%s: afterwards: %v", name, err)
		}
	}
}

func TestScanWaitsForDriverBlockedByMIGChange(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	s.Change(func(_ *layout.Config, f *state.File) error { return f.SetCutLock(state.CutLockAll) })
	c := s.Changer(partitionsOf(s), 0)
	c.Mode(true)
	s.Fault(state.Fault{Kind: state.FaultSlow, GPU: 0, DelayMS: 100}, "nvmlDeviceCreateGpuInstanceWithPlacement", 0)
	var changes sync.WaitGroup
	changes.Go(func() {
		for start := range uint32(7) {
			c.Make(19, device.Placement{Start: start, Size: 1})
		}
	})
	node, err := scan.Isolated(s.Paths(), s.Role("scan")...)(t.Context())
	if err != nil || len(node.Problems) > 0 || len(node.GPUs) != 8 {
		t.Error(err, node.Problems)
	}
	changes.Wait()
	if node, err = scan.Isolated(s.Paths(), s.Role("scan")...)(t.Context()); err != nil || len(node.GPUs[0].MIG.Instances) != 7 {
		t.Error(err, node.Problems)
	}
}

func TestScanDuringMIGChangesIsConsistent(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	c := s.Changer(partitionsOf(s), 0)
	c.Mode(true)
	ctx, stop := context.WithCancel(t.Context())
	var changes sync.WaitGroup
	changes.Go(func() {
		for ctx.Err() == nil {
			made, err := c.TryMake(t.Context(), 19, device.Placement{Start: 5, Size: 1})
			if err == nil {
				err = c.Destroy(t.Context(), c.Card, made)
			}
			if err != nil {
				t.Error(err)
				return
			}
		}
	})
	for range 20 {
		node, err := scan.Isolated(s.Paths(), s.Role("scan")...)(t.Context())
		if err != nil || len(node.Problems) > 0 || len(node.GPUs) != 8 || len(node.GPUs[0].MIG.Instances) > 1 {
			t.Errorf("%v, %v", err, node.Problems)
			break
		}
	}
	stop()
	changes.Wait()
}
