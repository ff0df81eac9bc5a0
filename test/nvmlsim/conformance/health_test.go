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
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// listen registers for event types of a device in a new event set.
func listen(t *testing.T, library nvml.Interface, device nvml.Device, types uint64) nvml.EventSet {
	t.Helper()
	set, ret := library.EventSetCreate()
	want(t, "create event set", ret, nvml.SUCCESS)
	want(t, "register", device.RegisterEvents(types, set), nvml.SUCCESS)
	return set
}

// An XID on a MIG instance must name the MIG instance. Any other XID must name none.
func TestXIDNamesItsInstance(t *testing.T) {
	w := newWorld(t, readNode(t, "dgx-h100")).onHost()
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
		if event.EventData != wanted.EventData || event.GpuInstanceId != wanted.GpuInstanceId ||
			event.ComputeInstanceId != wanted.ComputeInstanceId {
			t.Errorf("XID %d of %d/%d, want %d of %d/%d", event.EventData, event.GpuInstanceId, event.ComputeInstanceId,
				wanted.EventData, wanted.GpuInstanceId, wanted.ComputeInstanceId)
		}
	}
}

// A process can register only for supported event types. If one of several types is not supported,
// none must be registered.
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
	check(0xff9f) // as a real H100 says: test/hardware
	w.must(w.state.SetEventTypes(0, nvml.EventTypeXidCriticalError|nvml.EventTypeGpuRecoveryAction))
	check(nvml.EventTypeXidCriticalError | nvml.EventTypeGpuRecoveryAction)
	set, _ := library.EventSetCreate()
	want(
		t,
		"register for one that it has not",
		device.RegisterEvents(nvml.EventTypeXidCriticalError|nvml.EventTypeDoubleBitEccError, set),
		nvml.ERROR_NOT_SUPPORTED,
	)
	const meaningless = 0x20 // a real driver accepts a bit without a meaning
	want(t, "register for a bit without a meaning", device.RegisterEvents(meaningless, set), nvml.SUCCESS)
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

// A process that listens must get each of a thousand quick XIDs, in order.
func TestBurstOfEventsIsNotLost(t *testing.T) {
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

// An injected fault must be able to fail or block a wait for NVML events, either in every event set
// or only in the event sets that listen to one GPU.
func TestWaitingFailsAndHangs(t *testing.T) {
	w := newWorld(t, readNode(t, "l40s-x2"))
	library := initialize(t)
	all := devices(t, library)
	one, two := listen(t, library, all[0], nvml.EventTypeXidCriticalError), listen(t, library, all[1], nvml.EventTypeXidCriticalError)
	fault := func(kind uint32, gpu int32, times int) {
		w.must(w.state.ClearFaults())
		w.must(
			w.state.AddFault(state.Fault{Kind: kind, Error: uint32(nvml.ERROR_UNKNOWN), DelayMS: 3600000, GPU: gpu}, "nvmlEventSetWait_v2", times),
		)
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

// A driver that does not know the recovery action field must return NOT_SUPPORTED, not the value
// for "no action".
func TestRecoveryActionNeedsDriverSupport(t *testing.T) {
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

// After an uncorrectable error, a row must wait for a reset to be remapped. A failed remap must
// stay failed after the reset. A GPU that remaps rows must not support retired pages.
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

// nvml.h: with MIG instances the remapped rows are not supported. It is silent about the fields.
func TestRemappedRowsOfAPartitionedGPU(t *testing.T) {
	for node, answer := range map[string]nvml.Return{"static-mig": nvml.SUCCESS, "awkward": nvml.ERROR_NOT_SUPPORTED} {
		t.Run(node, func(t *testing.T) {
			described := readNode(t, node)
			described.AttachCost.Duration = 0
			profile := uint32(19) // one slice of an H100
			described.GPUs[0].MIG = &model.CardMIG{Enabled: true, Instances: []model.CardInstance{{Profile: profile}}}
			newWorld(t, described)
			device := devices(t, initialize(t))[0]
			_, _, _, _, ret := device.GetRemappedRows()
			want(t, "remapped rows", ret, nvml.ERROR_NOT_SUPPORTED)
			fields := []nvml.FieldValue{{FieldId: nvml.FI_DEV_REMAPPED_PENDING}, {FieldId: nvml.FI_DEV_REMAPPED_FAILURE}}
			want(t, "field values", device.GetFieldValues(fields), nvml.SUCCESS)
			for _, f := range fields {
				want(t, "field", nvml.Return(f.NvmlReturn), answer)
			}
		})
	}
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

// A GPU reset and a driver load must restart the energy counter and the volatile ECC counts, and
// clear the recovery action.
func TestResetRestartsCounters(t *testing.T) {
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

func TestFailedFabricRegistration(t *testing.T) {
	w := newWorld(t, readNode(t, "dgx-h100"))
	device := devices(t, initialize(t))[0]
	w.must(w.state.SetFabricStatus(0, uint32(nvml.ERROR_UNKNOWN)))
	info, ret := device.GetGpuFabricInfo()
	want(t, "fabric", ret, nvml.SUCCESS)
	if info.State != nvml.GPU_FABRIC_STATE_COMPLETED || nvml.Return(info.Status) != nvml.ERROR_UNKNOWN {
		t.Errorf("fabric state %d, status %d", info.State, info.Status)
	}
}

// For processes that have an unplugged GPU open, it must be lost; other processes must not find it.
// After a GPU is plugged in, a new enumeration must find it, but old handles must stay lost.
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

// Unplugging a GPU must remove its device node and its files in sysfs and /proc. Plugging it in
// must restore them.
func TestUnplugOnDisk(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Host, "")
	address := s.options.Config.Node.GPUs[3].PCI
	paths := []string{
		filepath.Join(
			s.dev,
			"nvidia3",
		), filepath.Join(s.root, "sys/bus/pci/devices", address), filepath.Join(s.root, "proc/driver/nvidia/gpus", address),
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

// The kernel module's reference count must rise with processes that use NVML and with GPUs that
// they open. It must fall when the processes shut NVML down or are killed.
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
