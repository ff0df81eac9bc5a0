package conformance

import (
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// listen registers for these events of a device, in a set of its own.
func listen(t *testing.T, library nvml.Interface, device nvml.Device, types uint64) nvml.EventSet {
	t.Helper()
	set, ret := library.EventSetCreate()
	want(t, "create event set", ret, nvml.SUCCESS)
	want(t, "register", device.RegisterEvents(types, set), nvml.SUCCESS)
	return set
}

// An XID that can be tied to an instance names it; the others, and those of GPUs without MIG, name none.
func TestAnXIDNamesItsInstance(t *testing.T) {
	w := newWorld(t, readNode(t, "dgx-h100"))
	library := initialize(t)
	device := devices(t, library)[4]
	set := listen(t, library, device, nvml.EventTypeXidCriticalError)
	w.must(w.state.XIDOn(4, 9, 1, 43))
	w.must(w.state.XID(4, 79))
	for _, wanted := range []nvml.EventData{
		{EventData: 43, GpuInstanceId: 9, ComputeInstanceId: 1}, {EventData: 79, GpuInstanceId: 0xffffffff, ComputeInstanceId: 0xffffffff},
	} {
		event, ret := set.Wait(1000)
		want(t, "wait", ret, nvml.SUCCESS)
		if event.EventData != wanted.EventData || event.GpuInstanceId != wanted.GpuInstanceId || event.ComputeInstanceId != wanted.ComputeInstanceId {
			t.Errorf("XID %d of %d/%d, want %d of %d/%d", event.EventData, event.GpuInstanceId, event.ComputeInstanceId,
				wanted.EventData, wanted.GpuInstanceId, wanted.ComputeInstanceId)
		}
	}
}

// Only what a GPU supports can be registered for: one kind too many, and nothing is.
func TestSupportedEvents(t *testing.T) {
	w := newWorld(t, readNode(t, "dgx-h100"))
	library := initialize(t)
	device := devices(t, library)[0]
	check := func(mask uint64) {
		t.Helper()
		types, ret := device.GetSupportedEventTypes()
		want(t, "supported events", ret, nvml.SUCCESS)
		if types != mask {
			t.Errorf("supported events %#x, want %#x", types, mask)
		}
	}
	check(nvml.EventTypeXidCriticalError | nvml.EventTypeSingleBitEccError | nvml.EventTypeDoubleBitEccError)
	w.must(w.state.SetEventTypes(0, nvml.EventTypeXidCriticalError|nvml.EventTypeGpuRecoveryAction))
	check(nvml.EventTypeXidCriticalError | nvml.EventTypeGpuRecoveryAction)
	set, _ := library.EventSetCreate()
	want(t, "register for one that it has not", device.RegisterEvents(nvml.EventTypeXidCriticalError|nvml.EventTypeDoubleBitEccError, set), nvml.ERROR_NOT_SUPPORTED)
	w.must(w.state.XID(0, 1))
	_, ret := set.Wait(0)
	want(t, "wait after a registration that failed", ret, nvml.ERROR_TIMEOUT)
	want(t, "register", device.RegisterEvents(nvml.EventTypeXidCriticalError|nvml.EventTypeGpuRecoveryAction, set), nvml.SUCCESS)
	w.must(w.state.AnnounceRecovery(0, 2))
	for _, kind := range []uint64{nvml.EventTypeXidCriticalError, nvml.EventTypeGpuRecoveryAction} {
		event, ret := set.Wait(1000)
		want(t, "wait", ret, nvml.SUCCESS)
		if event.EventType != kind {
			t.Errorf("event %#x, want %#x", event.EventType, kind)
		}
	}
	w.must(w.state.SetEventTypes(0, 0))
	check(0)
}

// A thousand XIDs at once, and none is lost to one who listens.
func TestABurstOfEvents(t *testing.T) {
	w := newWorld(t, readNode(t, "dgx-h100"))
	library := initialize(t)
	all := devices(t, library)
	set, _ := library.EventSetCreate()
	for _, device := range all {
		want(t, "register", device.RegisterEvents(nvml.EventTypeXidCriticalError, set), nvml.SUCCESS)
	}
	const count = 1000
	posted := make(chan error, 1)
	go func() {
		for i := range uint64(count) {
			if err := w.state.XID(int(i)%len(all), i); err != nil {
				posted <- err
				return
			}
		}
		posted <- nil
	}()
	for i := range uint64(count) {
		event, ret := set.Wait(10000)
		if ret != nvml.SUCCESS || event.EventData != i {
			t.Fatalf("event %d: XID %d (%v)", i, event.EventData, ret)
		}
	}
	w.must(<-posted)
}

// Waiting can fail or hang: for every set, or only for those that listen to one GPU.
func TestWaitingFailsAndHangs(t *testing.T) {
	w := newWorld(t, readNode(t, "l40s-x2"))
	library := initialize(t)
	all := devices(t, library)
	one, two := listen(t, library, all[0], nvml.EventTypeXidCriticalError), listen(t, library, all[1], nvml.EventTypeXidCriticalError)
	fault := func(kind uint32, gpu int32, times int) {
		w.must(w.state.ClearFaults())
		w.must(w.state.AddFault(state.Fault{Kind: kind, Error: uint32(nvml.ERROR_UNKNOWN), DelayMS: 3600000, GPU: gpu}, "nvmlEventSetWait_v2", times))
	}
	wait := func(set nvml.EventSet) nvml.Return { _, ret := set.Wait(0); return ret }
	fault(state.FaultFail, state.AnyGPU, 0)
	want(t, "one", wait(one), nvml.ERROR_UNKNOWN)
	want(t, "two", wait(two), nvml.ERROR_UNKNOWN)
	fault(state.FaultFail, 1, 1)
	want(t, "one, when the other fails", wait(one), nvml.ERROR_TIMEOUT)
	want(t, "two, ordered to fail once", wait(two), nvml.ERROR_UNKNOWN)
	want(t, "two again", wait(two), nvml.ERROR_TIMEOUT)
	fault(state.FaultSlow, 1, 0)
	done := make(chan nvml.Return, 1)
	go func() { done <- wait(two) }()
	waitFor(t, "the wait to hang", func() bool { return atomic.LoadUint64(&w.state.Fault(0).Hits) == 1 })
	want(t, "one, when the other hangs", wait(one), nvml.ERROR_TIMEOUT)
	w.must(w.state.ClearFaults())
	want(t, "two, let go", <-done, nvml.ERROR_TIMEOUT)
}

// A driver that does not know the field of the recovery action says so: that is not the same as no action.
func TestTheRecoveryActionNeedsItsDriver(t *testing.T) {
	for version, known := range map[string]bool{"550.163.01": false, "560.35.05": false, "565.57.01": true, "580.95.05": true} {
		node := readNode(t, "l40s-x2")
		node.DriverVersion = version
		w := newWorld(t, node)
		w.must(w.state.SetRecovery(0, 7))
		library := nvml.New(nvml.WithLibraryPath(simulated))
		want(t, "nvmlInit", library.Init(), nvml.SUCCESS)
		device := devices(t, library)[0]
		fields := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
		want(t, "field values", device.GetFieldValues(fields), nvml.SUCCESS)
		switch ret := nvml.Return(fields[0].NvmlReturn); {
		case !known && ret != nvml.ERROR_NOT_SUPPORTED:
			t.Errorf("driver %s: %v", version, ret)
		case known && (ret != nvml.SUCCESS || fields[0].Value[0] != 7):
			t.Errorf("driver %s: %v, action %d", version, ret, fields[0].Value[0])
		}
		want(t, "shutdown", library.Shutdown(), nvml.SUCCESS)
	}
}

// Bad memory waits for a reset, on old GPUs as a page and on newer ones as a row; what could not be remapped stays so.
func TestRemappedRowsAndRetiredPages(t *testing.T) {
	w := newWorld(t, readNode(t, "dgx-h100"))
	device := devices(t, initialize(t))[0]
	check := func(what string, pending, failed bool) {
		t.Helper()
		_, _, p, f, ret := device.GetRemappedRows()
		want(t, what, ret, nvml.SUCCESS)
		if p != pending || f != failed {
			t.Errorf("%s: pending %t, failed %t; want %t, %t", what, p, f, pending, failed)
		}
	}
	check("at first", false, false)
	w.must(w.state.ECC(0, true))
	check("after an uncorrectable error", true, false)
	w.must(w.state.SetRemap(0, true, true))
	check("failed too", true, true)
	w.must(w.state.Reset(0, false))
	check("after a reset", false, true)
	_, ret := device.GetRetiredPagesPendingStatus()
	want(t, "pages of a GPU that remaps rows", ret, nvml.ERROR_NOT_SUPPORTED)
}

func TestRetiredPages(t *testing.T) {
	w := newWorld(t, readNode(t, "t4-x1"))
	device := devices(t, initialize(t))[0]
	_, _, _, _, ret := device.GetRemappedRows()
	want(t, "rows of a GPU that retires pages", ret, nvml.ERROR_NOT_SUPPORTED)
	w.must(w.state.ECC(0, true))
	pending, ret := device.GetRetiredPagesPendingStatus()
	want(t, "retired pages", ret, nvml.SUCCESS)
	if pending != nvml.FEATURE_ENABLED {
		t.Error("no page waits for a reset after an uncorrectable error")
	}
}

// A reset and a driver load are seen: counters begin anew.
func TestCountersBeginAnew(t *testing.T) {
	for name, again := range map[string]func(*state.File) error{
		"reset": func(f *state.File) error { return f.Reset(0, false) },
		"load":  func(f *state.File) error { return f.Load("", "", true) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, readNode(t, "l40s-x2"))
			w.state.GPU(0).EnergySinceMS -= uint64(time.Hour.Milliseconds())
			w.must(w.state.ECC(0, true))
			w.must(w.state.SetRecovery(0, 1))
			read := func() (energy, errors uint64) {
				t.Helper()
				library := nvml.New(nvml.WithLibraryPath(simulated))
				want(t, "nvmlInit", library.Init(), nvml.SUCCESS)
				defer func() { _ = library.Shutdown() }()
				device := devices(t, library)[0]
				energy, ret := device.GetTotalEnergyConsumption()
				want(t, "energy", ret, nvml.SUCCESS)
				errors, ret = device.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
				want(t, "ECC errors", ret, nvml.SUCCESS)
				return energy, errors
			}
			before, errorsBefore := read()
			w.must(again(w.state))
			after, errorsAfter := read()
			if after >= before || errorsBefore != 1 || errorsAfter != 0 {
				t.Errorf("energy %d, then %d; errors %d, then %d", before, after, errorsBefore, errorsAfter)
			}
			if action := w.state.GPU(0).RecoveryAction; action != 0 {
				t.Errorf("recovery action %d afterwards", action)
			}
		})
	}
}

func TestAFailedFabricRegistration(t *testing.T) {
	w := newWorld(t, readNode(t, "dgx-h100"))
	device := devices(t, initialize(t))[0]
	w.must(w.state.SetFabricStatus(0, uint32(nvml.ERROR_UNKNOWN)))
	info, ret := device.GetGpuFabricInfo()
	want(t, "fabric", ret, nvml.SUCCESS)
	if info.State != nvml.GPU_FABRIC_STATE_COMPLETED || nvml.Return(info.Status) != nvml.ERROR_UNKNOWN {
		t.Errorf("fabric state %d, status %d", info.State, info.Status)
	}
}

// A card that is pulled is lost to those who have it and unknown to the others; one that is plugged in is found by those who look anew, and a handle of
// before stays lost.
func TestUnplugAndPlug(t *testing.T) {
	w := newWorld(t, readNode(t, "dgx-h100"))
	library := initialize(t)
	old := devices(t, library)
	set := listen(t, library, old[3], nvml.EventTypeXidCriticalError)
	w.must(w.state.Unplug(3))
	_, ret := old[3].GetName()
	want(t, "a handle of the pulled card", ret, nvml.ERROR_GPU_IS_LOST)
	_, ret = set.Wait(1000)
	want(t, "wait for it", ret, nvml.ERROR_GPU_IS_LOST)
	count := func() int {
		t.Helper()
		p := start(t, "count")
		var n int
		if _, err := fmt.Sscan(p.says(), &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := count(); n != 7 {
		t.Errorf("%d GPUs without it, want 7", n)
	}
	w.must(w.state.Plug(3, "GPU-00000000-1111-2222-3333-444444444444"))
	if err := w.state.Plug(3, ""); err == nil {
		t.Error("a second card fits into the slot")
	}
	if n := count(); n != 8 {
		t.Errorf("%d GPUs, want 8", n)
	}
	_, ret = old[3].GetName()
	want(t, "a handle of before, when another card is there", ret, nvml.ERROR_GPU_IS_LOST)
	want(t, "shutdown", library.Shutdown(), nvml.SUCCESS)
	want(t, "nvmlInit", library.Init(), nvml.SUCCESS)
	uuid, ret := devices(t, library)[3].GetUUID()
	want(t, "UUID", ret, nvml.SUCCESS)
	if uuid != "GPU-00000000-1111-2222-3333-444444444444" {
		t.Errorf("UUID %s", uuid)
	}
}

// On disk a pulled card leaves nothing: no node, no sysfs, no proc.
func TestUnplugOnDisk(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Host, "")
	address := s.options.Config.Node.GPUs[3].PCI
	paths := []string{
		filepath.Join(s.dev, "nvidia3"), filepath.Join(s.root, "sys/bus/pci/devices", address), filepath.Join(s.root, "proc/driver/nvidia/gpus", address),
	}
	there := func(wanted bool) {
		t.Helper()
		for _, path := range paths {
			if _, err := os.Stat(path); (err == nil) != wanted {
				t.Errorf("%s: %v, want it there: %t", path, err, wanted)
			}
		}
	}
	there(true)
	s.change(func(c *layout.Config, f *state.File) error {
		if err := f.Unplug(3); err != nil {
			return err
		}
		return c.Apply(f)
	})
	there(false)
	s.change(func(c *layout.Config, f *state.File) error {
		if err := f.Plug(3, ""); err != nil {
			return err
		}
		return c.Apply(f)
	})
	there(true)
}

// The module's references go up with who has NVML initialised and has GPUs open, and down to nothing when they end, however they do.
func TestReferencesGoToZero(t *testing.T) {
	w := newWorld(t, readNode(t, "dgx-h100"))
	check := func(when string, wanted int) {
		t.Helper()
		got, err := w.state.References()
		if err != nil || got != wanted {
			t.Errorf("%s: %d references (%v), want %d", when, got, err, wanted)
		}
	}
	check("at first", 0)
	library := nvml.New(nvml.WithLibraryPath(simulated))
	want(t, "nvmlInit", library.Init(), nvml.SUCCESS)
	check("initialised", 1)
	_ = devices(t, library)
	check("with eight GPUs open", 9)
	p := start(t, "hold", gpuVariable+"=2")
	p.expect("ready")
	check("with another process that has one", 11)
	p.kill()
	check("when that is killed", 9)
	want(t, "shutdown", library.Shutdown(), nvml.SUCCESS)
	check("after the last shutdown", 0)
	w.must(w.state.Unload(false))
}
