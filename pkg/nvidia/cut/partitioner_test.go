package cut

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/mig"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
)

// bench is a fake card with MIG and a partitioner for this card.
type bench struct {
	*nvidiatest.MIG
	t           *testing.T
	card        device.Card
	partitioner partitioner
}

func newBench(t *testing.T, change func(*nvidiatest.Card)) bench {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes with the driver's numbers")
	}
	h := nvidiatest.NewHost(t)
	h.File("proc/devices", "Character devices:\n  0 nvidia-caps\n")
	cards := nvidiatest.TwoCards()
	c := &cards[1]
	c.Major, c.MIG = 9, nvidiatest.NewMIG(h, 1)
	if change != nil {
		change(c)
	}
	library := nvidiatest.NVML(cards...)
	return bench{c.MIG, t, device.Card{PCIAddress: "0000:1b:00.0", UUID: "GPU-00000000-0000-0000-0000-00000000001b"},
		partitioner{Reader: mig.NewReader(h.Paths().WithDefaults(), library, func() {})}}
}

// opens adds a process to the host that has the device node with these numbers open.
func (b bench) opens(pid int, name string, major, minor uint32) {
	b.t.Helper()
	process, node := fmt.Sprintf("proc/%d/", pid), fmt.Sprintf("container/dev/nvidia-of-%d", pid)
	b.Host.File(process+"comm", name+"\n")
	b.Host.File(node+".txt", "") // makes the folder
	b.Host.Must(unix.Mknod(filepath.Join(b.Host.Root, node), unix.S_IFCHR|0o600, int(unix.Mkdev(major, minor))))
	b.Host.Link(filepath.Join(b.Host.Root, node), process+"fd/3")
}

// gpuMajor is the major number of the device nodes of GPUs.
const gpuMajor = 195

func (b bench) do(r request) answer {
	r.Card = b.card
	return b.partitioner.do(r)
}

// fails expects that the worker's answer a is an error with this code. The message must contain the
// card's name and each of the strings in says.
func (b bench) fails(a answer, code device.FailureCode, says ...string) {
	b.t.Helper()
	if a.Error == nil || a.Error.Code != code {
		b.t.Fatalf("answer is %+v, %v; want an error with code %s", a, a.Error, code)
	}
	for _, part := range append(says, "gpu-0000-1b-00-0") {
		if !strings.Contains(a.Error.Error(), part) {
			b.t.Errorf("error %q does not contain %q", a.Error, part)
		}
	}
}

func (b bench) works(a answer) answer {
	b.t.Helper()
	if a.Error != nil {
		b.t.Fatal(a.Error)
	}
	return a
}

func TestCreateAndDestroyInstances(t *testing.T) {
	b := newBench(t, nil)
	if s := b.works(b.do(request{Op: opSetMode, On: true})).State; !s.MIG.Enabled || s.Minor != 1 {
		t.Errorf("%+v", s)
	}
	at := device.Placement{Start: 4, Size: 4}
	made := b.works(b.do(request{Op: opCreateInstance, Profile: 9, At: at})).Instance
	if diff := cmp.Diff(device.Instance{ID: 1, ProfileID: 9, Placement: at, Minor: 147}, made); diff != "" {
		t.Error(diff)
	}
	whole := b.works(b.do(request{Op: opCreateCompute, Instance: made})).Instance
	want := made
	want.Compute = []device.ComputeInstance{{
		ProfileID: 2, Placement: device.Placement{Start: 0, Size: 1}, Name: "3g.40gb", Multiprocessors: 48, UUID: b.UUID(1, 0), Minor: 148,
	}}
	if diff := cmp.Diff(want, whole); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]device.Instance{want}, b.works(b.do(request{Op: opLook})).State.MIG.Instances); diff != "" {
		t.Error(diff)
	}
	for range 2 { // a missing instance is no error
		b.works(b.do(request{Op: opDestroy, Instance: want}))
	}
	if s := b.works(b.do(request{Op: opSetMode, On: false})).State; s.MIG.Enabled || len(b.Instances) > 0 {
		t.Errorf("%+v, %v", s, b.Instances)
	}
	if diff := cmp.Diff([]string{
		"nvmlDeviceSetMigMode 1", "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance",
		"nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy", "nvmlDeviceSetMigMode 0",
	}, b.Calls); diff != "" {
		t.Error(diff)
	}
	b.works(b.do(request{Op: opSetMode, On: false}))
	b.works(b.do(request{Op: opDestroy, Instance: want}))
	if len(b.Calls) != 6 {
		t.Errorf("changed what was right already: %v", b.Calls[6:])
	}
}

func TestComputeInstanceFillsHighMemoryInstance(t *testing.T) {
	b := newBench(t, nil)
	id := b.Partition(t, 19, 0, 1)
	c := b.works(b.do(request{Op: opCreateCompute, Instance: device.Instance{ID: id}})).Instance.Compute[0]
	if c.ProfileID != 7 || c.Multiprocessors != 26 || c.Name != "1g.10gb" {
		t.Errorf("%+v", c)
	}
}

func TestRefusedModeChangeIsExplainedAndUndone(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*nvidiatest.MIG)
		code   device.FailureCode
		says   []string
		calls  []string
	}{
		"in use": {
			func(f *nvidiatest.MIG) {
				f.Activation = nvml.ERROR_IN_USE
			},
			device.FailureInUse, []string{"switch MIG mode on", "in use", "it is open in dcgm-exporter (process 4711), python (process 4712)"},
			[]string{"nvmlDeviceSetMigMode 1", "nvmlDeviceSetMigMode 0"},
		},
		"a reset": {func(f *nvidiatest.MIG) { f.NeedsReset = true }, device.FailureReset, []string{"reset"},
			[]string{"nvmlDeviceSetMigMode 1", "nvmlDeviceSetMigMode 0"}},
		"no permission": {
			func(f *nvidiatest.MIG) { f.Answers["nvmlDeviceSetMigMode 1"] = nvml.ERROR_NO_PERMISSION },
			device.FailureNoPermission, []string{"privileged"},
			[]string{"nvmlDeviceSetMigMode 1"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, nil)
			tc.change(b.MIG)
			b.opens(4711, "dcgm-exporter", gpuMajor, 1)
			b.opens(4712, "python", gpuMajor, 1)
			b.opens(4713, "another-gpu", gpuMajor, 0)
			a := b.do(request{Op: opSetMode, On: true})
			b.fails(a, tc.code, tc.says...)
			if named := strings.Contains(a.Error.Error(), "process 47"); named != (tc.code == device.FailureInUse) {
				t.Error(a.Error)
			}
			if b.Next || !slices.Equal(b.Calls, tc.calls) {
				t.Errorf("the next reset enables MIG mode: %v; calls %v", b.Next, b.Calls)
			}
		})
	}
	b := newBench(t, nil)
	b.Partition(t, 19, 0, 1)
	b.fails(b.do(request{Op: opSetMode, On: false}), device.FailureInUse, "1 GPU instances")
	// A process of a user stays, so a retry would only delay the refusal.
	b = newBench(t, nil)
	b.opens(4711, "python", gpuMajor, 1)
	b.Answers["nvmlDeviceSetMigMode 1"] = nvml.ERROR_IN_USE
	a := b.do(request{Op: opSetMode, On: true})
	b.fails(a, device.FailureInUse, "python (process 4711)")
	if a.Error.Transient {
		t.Errorf("a GPU that a user's process has open: %+v", a.Error)
	}
	b = newBench(t, nil)
	b.opens(4711, "gpu-kubelet-plu", gpuMajor, 1)
	b.Host.File("proc/4711/environ", nvidia.ChildMark+"\x00")
	b.Answers["nvmlDeviceSetMigMode 1"] = nvml.ERROR_IN_USE
	if a := b.do(request{Op: opSetMode, On: true}); a.Error == nil || !a.Error.Transient {
		t.Errorf("a GPU that is briefly in use: %+v", a.Error)
	}
	b = newBench(t, nil)
	b.After["nvmlDeviceSetMigMode 1"] = nvml.ERROR_UNKNOWN
	if s := b.works(b.do(request{Op: opSetMode, On: true})).State; !s.MIG.Enabled {
		t.Errorf("the mode read afterwards decides: %+v", s)
	}
}

func TestOtherCardAtAddressIsNotTouched(t *testing.T) {
	for _, r := range []request{{Op: opLook}, {Op: opSetMode, On: true}, {Op: opCreateInstance, Profile: 19}, {Op: opCreateCompute},
		{Op: opDestroy}, {Op: opFabric}, {Op: opSetComputeMode, ComputeMode: device.ComputeProhibited}, {Op: opTimeSlice}, {Op: opSetTimeSlice}} {
		b := newBench(t, nil)
		b.card.UUID = "GPU-another"
		b.fails(b.do(r), device.FailureReplaced, "GPU-00000000-0000-0000-0000-00000000001b")
		b.card.PCIAddress = "0000:99:00.0"
		if a := b.do(r); a.Error == nil || a.Error.Code != device.FailureNotFound {
			t.Errorf("%+v", a)
		}
		if len(b.Calls) > 0 {
			t.Error(b.Calls)
		}
	}
	b := newBench(t, func(c *nvidiatest.Card) { c.MIG = nil })
	b.fails(b.do(request{Op: opSetMode, On: true}), device.FailureNotSupported, "no MIG")
	if s := b.works(b.do(request{Op: opLook})).State; s.MIG.Enabled || s.ComputeMode != "" {
		t.Errorf("%+v", s)
	}
}

func TestCreateInstanceRejectsTakenPlacement(t *testing.T) {
	b := newBench(t, nil)
	b.Partition(t, 9, 0, 4)
	b.fails(b.do(request{Op: opCreateInstance, Profile: 19, At: device.Placement{Start: 3, Size: 1}}),
		device.FailureInsufficient, "profile 19 at 3:1", "-lgi")
	b = newBench(t, nil)
	b.fails(b.do(request{Op: opCreateInstance, Profile: 19, At: device.Placement{Start: 3, Size: 1}}), device.FailureNotSupported)
}

func TestUnexpectedInstanceIsDestroyedAgain(t *testing.T) {
	at := device.Placement{Start: 2, Size: 1}
	create := request{Op: opCreateInstance, Profile: 19, At: at}
	for name, change := range map[string]func(bench){
		"unreadable":           func(b bench) { b.Answers["nvmlGpuInstanceGetInfo"] = nvml.ERROR_UNKNOWN },
		"at another placement": func(b bench) { b.Misplaces = true },
		"without a capability": func(b bench) { b.NoCapabilities = true },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, nil)
			b.On = true
			change(b)
			b.fails(b.do(create), device.FailureOther, "destroyed again")
			if len(b.Instances) > 0 {
				t.Error(b.Instances)
			}
		})
	}
	for name, change := range map[string]func(bench){
		"unreadable compute instance": func(b bench) { b.Answers["nvmlComputeInstanceGetInfo"] = nvml.ERROR_UNKNOWN },
		"no MIG device":               func(b bench) { b.Answers["nvmlDeviceGetMaxMigDeviceCount"] = nvml.ERROR_UNKNOWN },
		"no capability":               func(b bench) { b.NoCapabilities = true },
		"no device node":              func(b bench) { b.Host.Remove("proc/devices") },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, nil)
			id := b.Partition(t, 19, 2, 1)
			change(b)
			b.fails(b.do(request{Op: opCreateCompute, Instance: device.Instance{ID: id}}), device.FailureOther, "destroyed again")
			if len(b.Instances[id].Compute) > 0 {
				t.Error(b.Instances[id])
			}
		})
	}
}

func TestDestroyRemovesOnlyRequestedInstance(t *testing.T) {
	b := newBench(t, nil)
	id := b.Partition(t, 19, 2, 1, 0)
	mine := device.Instance{ID: id, ProfileID: 19, Placement: device.Placement{Start: 2, Size: 1},
		Compute: []device.ComputeInstance{{UUID: b.UUID(id, 0)}}}
	for name, change := range map[string]func(*device.Instance){
		"another profile":          func(i *device.Instance) { i.ProfileID = 20 },
		"another placement":        func(i *device.Instance) { i.Placement.Start = 3 },
		"another UUID":             func(i *device.Instance) { i.Compute = []device.ComputeInstance{{UUID: "MIG-another"}} },
		"another compute instance": func(i *device.Instance) { i.Compute = []device.ComputeInstance{{ID: 3}} },
	} {
		t.Run(name, func(t *testing.T) {
			other := mine
			change(&other)
			b.t = t
			b.fails(b.do(request{Op: opDestroy, Instance: other}), device.FailureChanged, "another tool created it")
		})
	}
	if len(b.Calls) > 0 {
		t.Error(b.Calls)
	}
	mine.ID = 9
	if b.works(b.do(request{Op: opDestroy, Instance: mine})); len(b.Instances) != 1 {
		t.Error("another instance was destroyed")
	}
	mine.ID, mine.Compute = id, nil // it is unknown whether a compute instance was created
	if b.works(b.do(request{Op: opDestroy, Instance: mine})); len(b.Instances) > 0 {
		t.Error("the instance still exists")
	}
}

func TestBusyInstanceErrorNamesProcesses(t *testing.T) {
	b := newBench(t, nil)
	id := b.Partition(t, 19, 2, 1, 0)
	capability := 3 + 135 + 9*id // of GPU 1
	b.opens(4711, "dcgm-exporter", 0, capability)
	b.opens(4712, "neighbour", 0, capability+9)
	b.opens(4713, "whole-gpu", gpuMajor, 1)
	b.Answers["nvmlComputeInstanceDestroy"] = nvml.ERROR_IN_USE
	r := request{Op: opDestroy, Instance: device.Instance{ID: id, ProfileID: 19, Placement: device.Placement{Start: 2, Size: 1}}}
	a := b.do(r)
	b.fails(a, device.FailureInUse, "dcgm-exporter (process 4711)")
	if len(a.Error.Processes) != 1 {
		t.Error(a.Error.Processes)
	}
	b.Answers["nvmlGpuInstanceDestroy"] = nvml.ERROR_IN_USE
	b.fails(b.do(r), device.FailureInUse)
	b.works(b.do(r))
}

// The driver's own use of the GPU ends soon, even if other processes have it open.
func TestRefusedCreationIsTransient(t *testing.T) {
	b := newBench(t, nil)
	b.works(b.do(request{Op: opSetMode, On: true}))
	b.opens(4711, "dcgm-exporter", gpuMajor, 1)
	b.Answers["nvmlDeviceCreateGpuInstanceWithPlacement"] = nvml.ERROR_IN_USE
	r := request{Op: opCreateInstance, Profile: 19, At: device.Placement{Start: 2, Size: 1}}
	a := b.do(r)
	b.fails(a, device.FailureInUse, "dcgm-exporter (process 4711)")
	if !a.Error.Transient {
		t.Error(a.Error)
	}
	b.works(b.do(r))
}

func TestFabricState(t *testing.T) {
	for state, waiting := range map[uint8]bool{
		nvml.GPU_FABRIC_STATE_NOT_SUPPORTED: false, nvml.GPU_FABRIC_STATE_NOT_STARTED: true, nvml.GPU_FABRIC_STATE_IN_PROGRESS: true,
		nvml.GPU_FABRIC_STATE_COMPLETED: false,
	} {
		b := newBench(t, func(c *nvidiatest.Card) { c.Fabric = &nvml.GpuFabricInfo{State: state} })
		if a := b.works(b.do(request{Op: opFabric})); (a.Waiting != "") != waiting {
			t.Errorf("state %d: %+v", state, a)
		}
	}
	b := newBench(t, func(c *nvidiatest.Card) {
		c.Fabric = &nvml.GpuFabricInfo{State: nvml.GPU_FABRIC_STATE_COMPLETED, Status: uint32(nvml.ERROR_UNKNOWN)}
	})
	b.fails(b.do(request{Op: opFabric}), device.FailureOther, "fabricmanager")
	b = newBench(t, nil)
	b.works(b.do(request{Op: opFabric}))
}

func TestUnexpectedNVMLAnswersAreNamed(t *testing.T) {
	b := newBench(t, nil)
	id := b.Partition(t, 77, 0, 1)
	b.fails(b.do(request{Op: opCreateCompute, Instance: device.Instance{ID: id}}), device.FailureOther, "profile 77")
	b.fails(b.do(request{Op: "paint"}), device.FailureOther, `"paint"`)
	b.Profiles = nil
	b.partitioner.Reader = mig.NewReader(b.partitioner.Paths, b.partitioner.Lib, func() {}) // it caches the profiles
	b.fails(b.do(request{Op: opCreateCompute, Instance: device.Instance{ID: id}}), device.FailureOther, "profile 77")
	b.fails(b.do(request{Op: opCreateCompute, Instance: device.Instance{ID: 5}}), device.FailureNotFound)
}
