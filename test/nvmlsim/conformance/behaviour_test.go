package conformance

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

func TestProcessSeesOnlyItsGPUs(t *testing.T) {
	w := newWorld(t, readNode(t, "dgx-h100"))
	for _, minor := range []int{0, 1, 2, 4, 5, 7} {
		w.take(fmt.Sprintf("nvidia%d", minor))
	}
	library := initialize(t)
	all := devices(t, library)
	if len(all) != 2 {
		t.Fatalf("%d GPUs, want 2", len(all))
	}
	for index, number := range []int{3, 6} {
		uuid, ret := all[index].GetUUID()
		want(t, "UUID", ret, nvml.SUCCESS)
		if uuid != state.Text(w.state.GPU(number).UUID[:]) {
			t.Errorf("index %d is %s, want GPU %d", index, uuid, number)
		}
	}
	_, ret := library.DeviceGetHandleByUUID(state.Text(w.state.GPU(0).UUID[:]))
	want(t, "handle by the UUID of a GPU that was not given", ret, nvml.ERROR_NOT_FOUND)
	_, ret = library.DeviceGetHandleByIndex(2)
	want(t, "index beyond the last", ret, nvml.ERROR_INVALID_ARGUMENT)
}

func TestInitNeedsControlDevice(t *testing.T) {
	w := newWorld(t, readNode(t, "t4-x1"))
	w.take("nvidiactl")
	want(t, "nvmlInit", nvml.New(nvml.WithLibraryPath(simulated)).Init(), nvml.ERROR_DRIVER_NOT_LOADED)
}

func TestCallsNeedInit(t *testing.T) {
	newWorld(t, readNode(t, "t4-x1"))
	library := initialize(t)
	device := devices(t, library)[0]
	want(t, "nvmlShutdown", library.Shutdown(), nvml.SUCCESS)
	want(t, "nvmlInit", library.Init(), nvml.SUCCESS)
	_, ret := device.GetName()
	want(t, "a handle of before, after another nvmlInit", ret, nvml.SUCCESS)
}

func TestLostGPUComesBack(t *testing.T) {
	w := newWorld(t, readNode(t, "dgx-h100"))
	library := initialize(t)
	all := devices(t, library)
	w.must(w.state.Lose(2))
	_, ret := all[2].GetName()
	want(t, "name of the lost GPU", ret, nvml.ERROR_GPU_IS_LOST)
	_, ret = library.DeviceGetHandleByIndex(2)
	want(t, "handle of the lost GPU", ret, nvml.ERROR_GPU_IS_LOST)
	_, ret = all[3].GetName()
	want(t, "name of its neighbour", ret, nvml.SUCCESS)
	count, _ := library.DeviceGetCount()
	if count != 8 {
		t.Errorf("%d GPUs: the driver still counts the lost one, want 8", count)
	}
	w.must(w.state.Restore(2))
	_, ret = all[2].GetName()
	want(t, "name after it came back", ret, nvml.SUCCESS)
}

func TestDriverLoadDropsLostGPU(t *testing.T) {
	w := newWorld(t, readNode(t, "dgx-h100"))
	w.must(w.state.Lose(2))
	w.must(w.state.Load("", "", false))
	all := devices(t, initialize(t))
	if len(all) != 7 {
		t.Fatalf("%d GPUs, want 7", len(all))
	}
	minor, _ := all[2].GetMinorNumber()
	if minor != 2 {
		t.Errorf("index 2 has minor %d: indexes and minors close up, want 2", minor)
	}
}

func TestOrderedFailures(t *testing.T) {
	w := newWorld(t, readNode(t, "l40s-x2"))
	all := devices(t, initialize(t))
	fail := func(function string, code nvml.Return, gpu int32, times int) {
		w.must(w.state.AddFault(state.Fault{Kind: state.FaultFail, Error: uint32(code), GPU: gpu}, function, times))
	}
	name := func(i int) nvml.Return { _, ret := all[i].GetName(); return ret }

	fail("nvmlDeviceGetName", nvml.ERROR_UNKNOWN, 1, 2)
	want(t, "the other GPU", name(0), nvml.SUCCESS)
	want(t, "first call", name(1), nvml.ERROR_UNKNOWN)
	_, ret := all[1].GetUUID()
	want(t, "another function", ret, nvml.SUCCESS)
	want(t, "second call", name(1), nvml.ERROR_UNKNOWN)
	want(t, "third call", name(1), nvml.SUCCESS)

	fail("*", nvml.ERROR_GPU_IS_LOST, 0, 0)
	for range 3 {
		want(t, "every call", name(0), nvml.ERROR_GPU_IS_LOST)
	}
	fail("nvmlDeviceGetPowerSource", nvml.ERROR_IRQ_ISSUE, state.AnyGPU, 1)
	_, ret = all[1].GetPowerSource()
	want(t, "a function that is not simulated", ret, nvml.ERROR_IRQ_ISSUE)
	w.must(w.state.ClearFaults())
	want(t, "after clear", name(0), nvml.SUCCESS)
	_, ret = all[1].GetPowerSource()
	want(t, "a function that is not simulated, after clear", ret, nvml.ERROR_NOT_SUPPORTED)
}

// A call that an injected fault delays must be counted as soon as it begins, and must return when
// the fault is cleared. Tests that use such calls thus need no guessed times.
func TestSlowCallIsCountedAndReleased(t *testing.T) {
	w := newWorld(t, readNode(t, "l40s-x2"))
	all := devices(t, initialize(t))
	w.must(w.state.AddFault(state.Fault{Kind: state.FaultSlow, DelayMS: uint64(time.Hour.Milliseconds()), GPU: 0}, "nvmlDeviceGetName", 0))
	done := make(chan nvml.Return)
	go func() { _, ret := all[0].GetName(); done <- ret }()
	waitFor(t, "the call to arrive", func() bool { return atomic.LoadUint64(&w.state.Fault(0).Hits) == 1 })
	_, ret := all[1].GetName()
	want(t, "the other GPU meanwhile", ret, nvml.SUCCESS)
	select {
	case ret := <-done:
		t.Fatalf("the slow call came back: %v", ret)
	default:
	}
	w.must(w.state.ClearFaults())
	want(t, "the call, released", <-done, nvml.SUCCESS)
}

func TestModesArePersistentAndVisible(t *testing.T) {
	w := newWorld(t, readNode(t, "l40s-x2"))
	device := devices(t, initialize(t))[1]
	want(t, "set compute mode", device.SetComputeMode(nvml.COMPUTEMODE_EXCLUSIVE_PROCESS), nvml.SUCCESS)
	mode, ret := device.GetComputeMode()
	want(t, "compute mode", ret, nvml.SUCCESS)
	if mode != nvml.COMPUTEMODE_EXCLUSIVE_PROCESS || w.state.GPU(1).ComputeMode != uint32(nvml.COMPUTEMODE_EXCLUSIVE_PROCESS) {
		t.Errorf("compute mode %d here, %d in the state", mode, w.state.GPU(1).ComputeMode)
	}
	want(t, "set persistence mode", device.SetPersistenceMode(nvml.FEATURE_DISABLED), nvml.SUCCESS)
	persistence, _ := device.GetPersistenceMode()
	if persistence != nvml.FEATURE_DISABLED {
		t.Errorf("persistence mode %d, want disabled", persistence)
	}
	want(t, "a compute mode that does not exist", device.SetComputeMode(17), nvml.ERROR_INVALID_ARGUMENT)
}

func TestEventsReachOnlyRegisteredProcesses(t *testing.T) {
	w := newWorld(t, readNode(t, "dgx-h100"))
	library := initialize(t)
	all := devices(t, library)
	set, ret := library.EventSetCreate()
	want(t, "create event set", ret, nvml.SUCCESS)
	w.must(w.state.XID(1, 31)) // before any process registered for events
	want(t, "register", all[1].RegisterEvents(nvml.EventTypeXidCriticalError, set), nvml.SUCCESS)
	w.must(w.state.XID(0, 13)) // on another GPU
	w.must(w.state.ECC(1, true))
	w.must(w.state.XID(1, 94))

	event, ret := set.Wait(1000)
	want(t, "wait", ret, nvml.SUCCESS)
	if event.EventType != nvml.EventTypeXidCriticalError || event.EventData != 94 {
		t.Errorf("event type %d data %d, want XID 94", event.EventType, event.EventData)
	}
	if index, _ := event.Device.GetIndex(); index != 1 {
		t.Errorf("event of GPU %d, want 1", index)
	}
	_, ret = set.Wait(1)
	want(t, "nothing more", ret, nvml.ERROR_TIMEOUT)
	want(t, "free", set.Free(), nvml.SUCCESS)
	_, ret = set.Wait(1)
	want(t, "a freed set", ret, nvml.ERROR_INVALID_ARGUMENT)
}

func TestEventRingOverrunDropsOldest(t *testing.T) {
	w := newWorld(t, readNode(t, "t4-x1"))
	library := initialize(t)
	set, _ := library.EventSetCreate()
	want(t, "register", devices(t, library)[0].RegisterEvents(nvml.EventTypeXidCriticalError, set), nvml.SUCCESS)
	capacity := uint64(w.state.Header().EventCount)
	for code := range capacity + 10 {
		w.must(w.state.XID(0, code))
	}
	for code := uint64(10); code < capacity+10; code++ {
		event, ret := set.Wait(0)
		if ret != nvml.SUCCESS || event.EventData != code {
			t.Fatalf("XID %d (%v), want %d", event.EventData, ret, code)
		}
	}
	_, ret := set.Wait(0)
	want(t, "after the last", ret, nvml.ERROR_TIMEOUT)
}

func TestLostGPUWakesWaiters(t *testing.T) {
	w := newWorld(t, readNode(t, "l40s-x2"))
	library := initialize(t)
	set, _ := library.EventSetCreate()
	want(t, "register", devices(t, library)[0].RegisterEvents(nvml.EventTypeXidCriticalError, set), nvml.SUCCESS)
	w.must(w.state.Lose(0))
	event, ret := set.Wait(1000)
	want(t, "wait", ret, nvml.SUCCESS)
	if event.EventData != 79 {
		t.Errorf("XID %d, want 79", event.EventData)
	}
	_, ret = set.Wait(1000)
	want(t, "wait again", ret, nvml.ERROR_GPU_IS_LOST)
}

func TestHealthFields(t *testing.T) {
	w := newWorld(t, readNode(t, "dgx-h100"))
	device := devices(t, initialize(t))[0]
	w.must(w.state.ECC(0, false))
	w.must(w.state.ECC(0, true))
	w.must(w.state.SetRecovery(0, 1))
	const recoveryAction = 230
	fields := []nvml.FieldValue{
		{FieldId: recoveryAction}, {FieldId: nvml.FI_DEV_ECC_DBE_VOL_TOTAL}, {FieldId: nvml.FI_DEV_ECC_SBE_AGG_TOTAL},
		{FieldId: nvml.FI_DEV_REMAPPED_PENDING}, {FieldId: 9999},
	}
	want(t, "field values", device.GetFieldValues(fields), nvml.SUCCESS)
	for i, field := range fields[:4] {
		if nvml.Return(field.NvmlReturn) != nvml.SUCCESS || field.Value[0] != 1 {
			t.Errorf("field %d: %d (%v), want 1", fields[i].FieldId, field.Value[0], nvml.Return(field.NvmlReturn))
		}
	}
	want(t, "an unknown field", nvml.Return(fields[4].NvmlReturn), nvml.ERROR_INVALID_ARGUMENT)
	count, ret := device.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
	want(t, "ECC errors", ret, nvml.SUCCESS)
	if count != 1 {
		t.Errorf("%d uncorrected errors, want 1", count)
	}
}

func TestDriverUnloadAndLoad(t *testing.T) {
	w := newWorld(t, readNode(t, "l40s-x2"))
	library := initialize(t)
	device := devices(t, library)[0]
	if err := w.state.Unload(false); !errors.Is(err, state.ErrInUse) {
		t.Fatalf("unload under a process that has NVML initialised: %v, want ErrInUse", err)
	}
	w.must(w.state.Unload(true))
	_, ret := device.GetName()
	want(t, "a call while the driver is away", ret, nvml.ERROR_DRIVER_NOT_LOADED)
	want(t, "shutdown", library.Shutdown(), nvml.SUCCESS)
	want(t, "nvmlInit while the driver is away", library.Init(), nvml.ERROR_DRIVER_NOT_LOADED)
	w.must(w.state.Load("590.48.01", "13.1", false))
	want(t, "nvmlInit after it came back", library.Init(), nvml.SUCCESS)
	version, _ := library.SystemGetDriverVersion()
	if version != "590.48.01" {
		t.Errorf("driver version %s", version)
	}
}

func TestForeignStateFileIsRefused(t *testing.T) {
	w := newWorld(t, readNode(t, "t4-x1"))
	for what, damage := range map[string]func(*state.Header){
		"magic":       func(h *state.Header) { h.Magic++ },
		"layout":      func(h *state.Header) { h.Layout++ },
		"struct size": func(h *state.Header) { h.GPUSize++ },
		"GPU count":   func(h *state.Header) { h.GPUCount = 1 << 30 },
		"offset":      func(h *state.Header) { h.EventOffset = 1 << 60 },
	} {
		t.Run(what, func(t *testing.T) {
			good := *w.state.Header()
			damage(w.state.Header())
			defer func() { *w.state.Header() = good }()
			// The library does not check a file a second time while it uses the file, so nvmlInit gets a
			// copy of the damaged file.
			data, err := os.ReadFile(w.state.Path())
			w.must(err)
			path := t.TempDir() + "/state.bin"
			w.must(os.WriteFile(path, data, 0o600))
			t.Setenv("NVMLSIM_STATE", path)
			want(t, "nvmlInit", nvml.New(nvml.WithLibraryPath(simulated)).Init(), nvml.ERROR_DRIVER_NOT_LOADED)
			if _, err := state.Open(path); err == nil {
				t.Error("the tool opens it")
			}
		})
	}
}

// waitFor waits up to 10 s for a condition that another thread or process brings about.
func waitFor(t *testing.T, what string, condition func() bool) {
	t.Helper()
	look, end := time.NewTicker(time.Millisecond), time.After(10*time.Second)
	defer look.Stop()
	for !condition() {
		select {
		case <-look.C:
		case <-end:
			t.Fatalf("waited 10 s for %s", what)
		}
	}
}
