package watch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/cut"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/scan"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

func TestMain(m *testing.M) {
	nvidiatest.Main(m, map[string]func() error{
		"scan":      func() error { return scan.Serve(context.Background(), os.Stdin, os.Stdout) },
		"partition": func() error { return cut.Serve(os.Stdin, os.Stdout) },
		"watch":     func() error { return Serve(context.Background(), os.Stdin, os.Stdout) },
		"locked":    runLockedWatcher,
	})
}

func TestWatchCoversEveryGPU(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	w := watchSite(s, nil)
	for i := range 8 {
		c := w.awaitCondition(s.Card(i), func(device.Condition) bool { return true })
		if c.Reach != device.ReachOK || c.Error != "" || c.Recovery != device.RecoveryNone || c.Remap == nil || c.Remap.Pending ||
			c.Remap.Failed ||
			c.Uncorrected == nil || *c.Uncorrected != 0 || c.Fabric == nil || c.Fabric.State != device.FabricCompleted || c.At.IsZero() {
			t.Errorf("%+v", c)
		}
	}
	if state := w.awaitListening(); state.Driver == "" || state.Error != "" {
		t.Errorf("%+v", state)
	}
	s.Change(func(_ *layout.Config, f *state.File) error { return f.XID(3, 48) })
	if e := w.awaitEvent(s.Card(3)); e.Kind != device.EventXID || e.XID != 48 || e.GPUInstance != nil || e.ComputeInstance != nil ||
		e.Place != nil || e.Count != 1 {
		t.Errorf("%+v", e)
	}
	s.Change(func(_ *layout.Config, f *state.File) error { return f.ECC(4, true) })
	if e := w.awaitEvent(s.Card(4)); e.Kind != device.EventDoubleBitECC || e.XID != 0 {
		t.Errorf("%+v", e)
	}
	w.awaitCondition(s.Card(4), func(c device.Condition) bool { return c.Uncorrected != nil && *c.Uncorrected == 1 })
	s.Change(func(_ *layout.Config, f *state.File) error { return f.SetRecovery(5, 1) })
	w.awaitCondition(s.Card(5), func(c device.Condition) bool { return c.Recovery == device.RecoveryReset })
}

func TestWatchReportsFeaturesOfEveryModel(t *testing.T) {
	for node, has := range map[string]func(device.Condition) bool{
		"p4-x2":      func(c device.Condition) bool { return c.Fabric == nil && c.Remap != nil }, // retired pages
		"t4-x1":      func(c device.Condition) bool { return c.Fabric == nil && c.Remap != nil },
		"l40s-x2":    func(c device.Condition) bool { return c.Fabric == nil && c.Remap != nil },
		"gb200-tray": func(c device.Condition) bool { return c.Fabric != nil && c.Remap != nil },
		"vgpu-guest": func(device.Condition) bool { return true },
		"static-mig": func(device.Condition) bool { return true },
		"dgx-a100":   func(c device.Condition) bool { return c.Remap != nil },
		"mixed-mig":  func(device.Condition) bool { return true },
		"dgx-b200":   func(c device.Condition) bool { return c.Remap != nil },
		"gb10":       func(c device.Condition) bool { return c.Fabric == nil && c.Uncorrected == nil },
		"mixed":      func(device.Condition) bool { return true },
	} {
		t.Run(node, func(t *testing.T) {
			s := nvidiatest.NewSite(t, node, layout.Host, "")
			w := watchSite(s, nil)
			if c := w.awaitCondition(s.Card(0), answers); !has(c) {
				t.Errorf("%+v", c)
			}
			w.awaitListening()
			if err := w.stop(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestEventNamesInstance(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	w, p := newWatchedSite(s, nil)
	c := s.Changer(p, 1)
	c.Mode(true)
	made := c.Make(14, device.Placement{Start: 2, Size: 2})
	w.awaitCondition(c.Card, func(c device.Condition) bool { return c.MIG != nil && c.MIG.Enabled })
	w.awaitListening()
	s.Change(func(_ *layout.Config, f *state.File) error { return f.XIDOn(1, made.ID, made.Compute[0].ID, 94) })
	e := w.awaitEvent(c.Card)
	if e.XID != 94 || e.GPUInstance == nil || *e.GPUInstance != made.ID || e.ComputeInstance == nil ||
		*e.ComputeInstance != made.Compute[0].ID {
		t.Errorf("%+v", e)
	}
	if e.Place == nil || e.Place.ProfileID != 14 || e.Place.Placement != made.Placement || e.Place.Part {
		t.Errorf("place is %+v", e.Place)
	}
	// The test expects no placement in an event of a MIG instance that was destroyed before the
	// event arrived.
	c.Remove(made)
	s.Change(func(_ *layout.Config, f *state.File) error { return f.XIDOn(1, made.ID, made.Compute[0].ID, 94) })
	if e := w.awaitEvent(c.Card); e.GPUInstance == nil || e.Place != nil {
		t.Errorf("%+v", e)
	}
}

func TestLostGPURecoversAlone(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	w := watchSite(s, nil)
	w.awaitCondition(s.Card(2), answers)
	w.awaitListening()
	s.Change(func(_ *layout.Config, f *state.File) error { return f.Lose(2) })
	if e := w.awaitEvent(s.Card(2)); e.XID != 79 {
		t.Errorf("%+v", e)
	}
	lost := w.awaitCondition(s.Card(2), func(c device.Condition) bool { return c.Reach != device.ReachOK })
	if lost.Reach != device.ReachLost || !strings.Contains(lost.Error, "fallen off the bus") || lost.Recovery != device.RecoveryUnknown {
		t.Errorf("%+v", lost)
	}
	w.awaitListening() // to the events of the other GPUs
	s.Change(func(_ *layout.Config, f *state.File) error { return f.XID(6, 31) })
	if e := w.awaitEvent(s.Card(6)); e.XID != 31 {
		t.Errorf("%+v", e)
	}
	s.Change(func(_ *layout.Config, f *state.File) error { return f.Restore(2) })
	w.awaitCondition(s.Card(2), answers)
	w.awaitListening()
	s.Change(func(_ *layout.Config, f *state.File) error { return f.XID(2, 43) })
	if e := w.awaitEvent(s.Card(2)); e.XID != 43 {
		t.Errorf("%+v", e)
	}
}

func TestLostGPUKeepsKnownUUID(t *testing.T) {
	s := nvidiatest.NewSite(t, "l40s-x2", layout.Container, "")
	w := watchSite(s, nil)
	w.awaitCondition(s.Card(1), answers)
	s.Change(func(_ *layout.Config, f *state.File) error { return f.Lose(1) })
	w.awaitCondition(s.Card(1), func(c device.Condition) bool { return c.Reach == device.ReachLost })
	// The new child process cannot read the lost card's UUID, so the parent must add it.
	w.killChild(s)
	w.awaitState(func(state device.WatcherState) bool { return !state.Up })
	w.awaitCondition(s.Card(1), func(c device.Condition) bool { return c.Reach == device.ReachLost })
}

func TestWedgedGPUDoesNotBlockOthers(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	w := watchSite(s, func(w *watcher) { w.wedged = nvidiatest.HangLimit })
	w.awaitCondition(s.Card(3), answers)
	w.awaitListening()
	s.Fault(state.Fault{Kind: state.FaultSlow, GPU: 3, DelayMS: 3600_000}, "nvmlDeviceGetRemappedRows", 0)
	c := w.awaitCondition(s.Card(3), func(c device.Condition) bool { return c.Reach != device.ReachOK })
	if c.Reach != device.ReachWedged || !strings.Contains(c.Error, "has not answered for") {
		t.Errorf("%+v", c)
	}
	// A GPU that goes on hanging is reported as wedged again at each interval.
	w.awaitCondition(s.Card(3), func(c device.Condition) bool { return c.Reach == device.ReachWedged })
	s.Change(func(_ *layout.Config, f *state.File) error { return errors.Join(f.XID(4, 63), f.XID(3, 64)) })
	if e := w.awaitEvent(s.Card(4)); e.XID != 63 {
		t.Errorf("%+v", e)
	}
	w.awaitCondition(s.Card(5), answers)
	s.Change(func(_ *layout.Config, f *state.File) error { return f.ClearFaults() })
	w.awaitCondition(s.Card(3), answers)
}

func TestFailedEventSetIsRecreated(t *testing.T) {
	s := nvidiatest.NewSite(t, "l40s-x2", layout.Container, "")
	w := watchSite(s, nil)
	w.awaitCondition(s.Card(0), answers)
	w.awaitCondition(s.Card(1), answers)
	w.awaitListening()
	for n, function := range []string{"nvmlEventSetWait_v2", "nvmlEventSetCreate", "nvmlDeviceRegisterEvents",
		"nvmlDeviceGetSupportedEventTypes"} {
		fail := func(function string, times int) {
			s.Fault(state.Fault{Kind: state.FaultFail, GPU: state.AnyGPU, Error: uint32(nvml.ERROR_IRQ_ISSUE)}, function, times)
		}
		fail(function, 3)
		if n > 0 { // the existing event sets must fail first
			fail("nvmlEventSetWait_v2", 2)
		}
		code := uint64(100 + n)
		xid := func() {
			s.Change(func(_ *layout.Config, f *state.File) error { return errors.Join(f.XID(0, code), f.XID(1, code)) })
		}
		xid() // ends the waits in progress
		if state := w.awaitState(func(s device.WatcherState) bool { return !s.Events }); !state.Up ||
			!strings.Contains(state.Error, "gpu-0000-") ||
			!strings.Contains(state.Error, "interrupt problem") {
			t.Errorf("%s: %+v", function, state)
		}
		code += 100
		for _, index := range []int{0, 1} {
			w.await("an event after the failure of "+function, func(signal device.Signal) bool {
				if signal.Condition != nil {
					xid() // events without a listener are lost
				}
				return signal.Event != nil && signal.Event.XID == code && signal.Event.Card == s.Card(index)
			})
		}
		w.awaitListening()
		s.Change(func(_ *layout.Config, f *state.File) error { return f.ClearFaults() })
	}
}

// An event's taint has a second. So a wait that NVML ends too early must not be followed by a pause
// of seconds in which nothing listens.
func TestEarlyEndOfWaitDelaysNoEvent(t *testing.T) {
	s := nvidiatest.NewSite(t, "l40s-x2", layout.Host, "")
	s.Change(func(_ *layout.Config, f *state.File) error { f.Header().EarlyWait = 1; return nil })
	w := watchSite(s, nil)
	w.awaitListening()
	slowest := func() (slowest time.Duration) {
		for range 4 { // at different times of the loop
			<-time.After(700 * time.Millisecond)
			at := time.Now()
			s.Change(func(_ *layout.Config, f *state.File) error { return f.XID(0, 999) })
			w.awaitEvent(s.Card(0))
			slowest = max(slowest, time.Since(at))
		}
		return slowest
	}
	// A busy machine may delay some events, but not in each of three rounds.
	for round := 1; ; round++ {
		took := slowest()
		if took <= time.Second {
			return
		}
		if round == 3 {
			t.Fatalf("an event came after %s", took)
		}
	}
}

// A GPU whose system processor does not answer reports XID 119 again and again, and XIDs that NVML
// does not know are all 999. Such a storm must neither delay nor hide another GPU's events.
func TestXIDStormDelaysNoOtherGPU(t *testing.T) {
	s := nvidiatest.NewSite(t, "l40s-x2", layout.Host, "")
	w := watchSite(s, nil)
	w.awaitListening()
	f, err := state.Open(layout.StatePath(s.Root))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	const burst, rounds = 400, 10
	storm := func() (err error) {
		for range burst / 2 {
			err = errors.Join(err, f.XID(0, 119), f.XID(0, 999))
		}
		return err
	}
	events := 0
	await := func(card device.Card, code uint64) {
		t.Helper()
		w.await(fmt.Sprintf("XID %d of %s", code, card), func(signal device.Signal) bool {
			e := signal.Event
			if e != nil && e.Card == s.Card(0) && e.XID != code {
				events += e.Count
			}
			return e != nil && e.Card == card && e.XID == code
		})
	}
	for round := range uint64(rounds) {
		if err := errors.Join(storm(), f.XID(1, 200+round), storm()); err != nil {
			t.Fatal(err)
		}
		at := time.Now()
		await(s.Card(1), 200+round)
		if took := time.Since(at); took > 5*time.Second { // a taint has a second, but the machine may be busy
			t.Errorf("an event of the other GPU came after %s", took)
		}
	}
	if err := f.XID(0, 31); err != nil {
		t.Fatal(err)
	}
	await(s.Card(0), 31)
	if want := 2 * burst * rounds; events != want {
		t.Errorf("of %d events, %d were counted", want, events)
	}
}

// A lost GPU may answer with UNKNOWN, or not before a timeout in the driver.
func TestLostGPUIsReportedHoweverItAnswers(t *testing.T) {
	for _, answer := range []state.LostAnswer{state.LostGone, state.LostUnknown, state.LostSilent} {
		t.Run(fmt.Sprint(answer), func(t *testing.T) {
			s := nvidiatest.NewSite(t, "l40s-x2", layout.Host, "")
			s.Change(func(_ *layout.Config, f *state.File) error { return f.SetGSPTimeout(500 * time.Millisecond) })
			w := watchSite(s, nil)
			w.awaitCondition(s.Card(0), answers) // with the UUID, which a lost GPU does not report
			w.awaitListening()
			s.Change(func(_ *layout.Config, f *state.File) error { return f.LoseAs(0, answer) })
			xid := uint64(79)
			if answer == state.LostSilent {
				xid = 119
			}
			if e := w.awaitEvent(s.Card(0)); e.XID != xid {
				t.Errorf("XID %d, want %d", e.XID, xid)
			}
			w.awaitCondition(s.Card(0), func(c device.Condition) bool { return !answers(c) })
			w.awaitCondition(s.Card(1), answers)
			s.Change(func(_ *layout.Config, f *state.File) error { return f.Restore(0) })
			w.awaitCondition(s.Card(0), func(c device.Condition) bool { return answers(c) })
		})
	}
}

func TestQueryFailureAffectsOneGPU(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	w := watchSite(s, nil)
	w.awaitCondition(s.Card(1), answers)
	for function, answer := range map[string]nvml.Return{
		"nvmlDeviceGetUUID": nvml.ERROR_UNKNOWN, "nvmlDeviceGetFieldValues": nvml.ERROR_TIMEOUT, "nvmlDeviceGetRemappedRows": nvml.ERROR_NO_DATA,
		"nvmlDeviceGetTotalEccErrors": nvml.ERROR_UNKNOWN, "nvmlDeviceGetGpuFabricInfoV": nvml.ERROR_IRQ_ISSUE,
	} {
		s.Fault(state.Fault{Kind: state.FaultFail, GPU: 1, Error: uint32(answer)}, function, 0)
		c := w.awaitCondition(s.Card(1), func(c device.Condition) bool { return c.Reach != device.ReachOK })
		if c.Reach != device.ReachFailed || !strings.Contains(c.Error, nvmlx.Error(answer).Error()) {
			t.Errorf("%s: %+v", function, c)
		}
		if c := w.awaitCondition(s.Card(2), func(device.Condition) bool { return true }); c.Reach != device.ReachOK {
			t.Errorf("%s: %+v", function, c)
		}
		s.Change(func(_ *layout.Config, f *state.File) error { return f.ClearFaults() })
		w.awaitCondition(s.Card(1), answers)
	}
	// The test expects that an unsupported query makes the card neither failed nor recovered: its
	// recovery action is unknown.
	s.Fault(state.Fault{Kind: state.FaultFail, GPU: 1, Error: uint32(nvml.ERROR_NOT_SUPPORTED)}, "nvmlDeviceGetFieldValues", 0)
	w.awaitCondition(s.Card(1), func(c device.Condition) bool {
		return c.Reach == device.ReachOK && c.Recovery == device.RecoveryUnknown
	})
}

func TestGPULeavesAndReturnsToBus(t *testing.T) {
	s := nvidiatest.NewSite(t, "l40s-x2", layout.Container, "")
	w := watchSite(s, nil)
	w.awaitCondition(s.Card(1), answers)
	link := filepath.Join(s.Root, "sys", "bus", "pci", "devices", string(s.Card(1).PCIAddress))
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	if c := w.awaitCondition(s.Card(1), func(c device.Condition) bool { return c.Reach != device.ReachOK }); c.Reach != device.ReachLost ||
		!strings.Contains(c.Error, "left the PCI bus") {
		t.Errorf("%+v", c)
	}
	w.awaitCondition(s.Card(0), answers)
	s.Change(func(*layout.Config, *state.File) error { return nil }) // restores the card's link in sysfs
	w.awaitState(func(state device.WatcherState) bool { return state.ChangedGPU == s.Card(1).PCIAddress })
	w.awaitCondition(s.Card(1), answers)
}
