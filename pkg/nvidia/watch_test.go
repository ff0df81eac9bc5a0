package nvidia

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
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// watchInterval is how often the tests have GPUs asked.
const watchInterval = 100 * time.Millisecond

// watch is a watcher at work on a site.
type watch struct {
	*watcher
	t       *testing.T
	signals chan device.Signal
	stop    func() error
}

// watchSite watches until the test ends, or until it is stopped.
func watchSite(s site, change func(*watcher)) watch {
	s.t.Helper()
	s.t.Setenv(roleVariable, "watch")
	self, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(s.t.Context())
	w := watch{t: s.t, signals: make(chan device.Signal, 10000)}
	w.watcher = newWatcher(WatchOptions{Paths: s.paths(), Command: []string{self}, Interval: watchInterval}, func(signal device.Signal) {
		select { // the last ones come when the context has ended
		case w.signals <- signal:
			return
		default:
		}
		select {
		case w.signals <- signal:
		case <-ctx.Done():
		}
	})
	if change != nil {
		change(w.watcher)
	}
	done := make(chan error, 1)
	go func() { done <- w.run(ctx) }()
	w.stop = func() error {
		cancel()
		err := <-done
		done <- err
		return err
	}
	s.t.Cleanup(func() { _ = w.stop() })
	return w
}

// patience is how long the tests wait for what must come. It is no measure of anything.
const patience = 30 * time.Second

// await returns the first signal that is what it waits for.
func (w watch) await(what string, is func(device.Signal) bool) device.Signal {
	w.t.Helper()
	limit := time.NewTimer(patience)
	defer limit.Stop()
	var last device.Signal
	for {
		select {
		case s := <-w.signals:
			if is(s) {
				return s
			}
			last = s
		case <-limit.C:
			w.t.Fatalf("%s has not come; the last signal was %s", what, spell(last))
		}
	}
}

func spell(s device.Signal) string {
	switch {
	case s.Event != nil:
		return fmt.Sprintf("%+v", *s.Event)
	case s.Condition != nil:
		return fmt.Sprintf("%+v", *s.Condition)
	case s.Watcher != nil:
		return fmt.Sprintf("%+v", *s.Watcher)
	}
	return "none"
}

func (w watch) condition(of Card, is func(device.Condition) bool) device.Condition {
	w.t.Helper()
	return *w.await("a condition of "+of.String(), func(s device.Signal) bool {
		return s.Condition != nil && s.Condition.Card == of && is(*s.Condition)
	}).Condition
}

func (w watch) event(of Card) device.HealthEvent {
	w.t.Helper()
	return *w.await("an event of "+of.String(), func(s device.Signal) bool { return s.Event != nil && s.Event.Card == of }).Event
}

func (w watch) says(is func(device.WatcherState) bool) device.WatcherState {
	w.t.Helper()
	return *w.await("a state of the watcher", func(s device.Signal) bool { return s.Watcher != nil && is(*s.Watcher) }).Watcher
}

// listens returns when events are heard.
func (w watch) listens() device.WatcherState {
	w.t.Helper()
	return w.says(func(s device.WatcherState) bool { return s.Up && s.Events })
}

func answers(c device.Condition) bool { return c.Reach == device.ReachOK }

func (s site) card(index int) Card { return s.cutting(nil, index).card }

func TestEveryGPUIsWatched(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Container, "")
	w := watchSite(s, nil)
	for i := range 8 {
		c := w.condition(s.card(i), func(device.Condition) bool { return true })
		if c.Reach != device.ReachOK || c.Error != "" || c.Recovery != device.RecoveryNone || c.Remap == nil || c.Remap.Pending || c.Remap.Failed ||
			c.Uncorrected == nil || *c.Uncorrected != 0 || c.Fabric == nil || c.Fabric.State != device.FabricCompleted || c.At.IsZero() {
			t.Errorf("%+v", c)
		}
	}
	if state := w.listens(); state.Driver == "" || state.Error != "" {
		t.Errorf("%+v", state)
	}
	s.change(func(_ *layout.Config, f *state.File) error { return f.XID(3, 48) })
	if e := w.event(s.card(3)); e.Kind != device.EventXID || e.XID != 48 || e.GPUInstance != nil || e.ComputeInstance != nil || e.Place != nil || e.Count != 1 {
		t.Errorf("%+v", e)
	}
	s.change(func(_ *layout.Config, f *state.File) error { return f.ECC(4, true) })
	if e := w.event(s.card(4)); e.Kind != device.EventDoubleBitECC || e.XID != 0 {
		t.Errorf("%+v", e)
	}
	w.condition(s.card(4), func(c device.Condition) bool { return c.Uncorrected != nil && *c.Uncorrected == 1 })
	s.change(func(_ *layout.Config, f *state.File) error { return f.SetRecovery(5, 1) })
	w.condition(s.card(5), func(c device.Condition) bool { return c.Recovery == device.RecoveryReset })
}

func TestEveryModelIsWatchedWithWhatItHas(t *testing.T) {
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
			s := newSite(t, node, layout.Host, "")
			w := watchSite(s, nil)
			if c := w.condition(s.card(0), answers); !has(c) {
				t.Errorf("%+v", c)
			}
			w.listens()
			if err := w.stop(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestAnEventSaysWhichInstanceItIsAbout(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Container, "")
	w, p := cutWatched(s, nil)
	c := s.cutting(p, 1)
	c.mode(true)
	made := c.make(14, device.Placement{Start: 2, Size: 2})
	w.condition(c.card, func(c device.Condition) bool { return c.MIG != nil && c.MIG.Enabled })
	w.listens()
	s.change(func(_ *layout.Config, f *state.File) error { return f.XIDOn(1, made.ID, made.Compute[0].ID, 94) })
	e := w.event(c.card)
	if e.XID != 94 || e.GPUInstance == nil || *e.GPUInstance != made.ID || e.ComputeInstance == nil || *e.ComputeInstance != made.Compute[0].ID {
		t.Errorf("%+v", e)
	}
	if e.Place == nil || e.Place.ProfileID != 14 || e.Place.Placement != made.Placement || e.Place.Part {
		t.Errorf("place is %+v", e.Place)
	}
	// One that is gone when its event comes has no place.
	c.destroy(made)
	s.change(func(_ *layout.Config, f *state.File) error { return f.XIDOn(1, made.ID, made.Compute[0].ID, 94) })
	if e := w.event(c.card); e.GPUInstance == nil || e.Place != nil {
		t.Errorf("%+v", e)
	}
}

func TestALostGPUIsLostAloneAndHeardOfAgain(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Container, "")
	w := watchSite(s, nil)
	w.condition(s.card(2), answers)
	w.listens()
	s.change(func(_ *layout.Config, f *state.File) error { return f.Lose(2) })
	if e := w.event(s.card(2)); e.XID != 79 {
		t.Errorf("%+v", e)
	}
	lost := w.condition(s.card(2), func(c device.Condition) bool { return c.Reach != device.ReachOK })
	if lost.Reach != device.ReachLost || !strings.Contains(lost.Error, "fallen off the bus") || lost.Recovery != device.RecoveryUnknown {
		t.Errorf("%+v", lost)
	}
	w.listens() // to the others
	s.change(func(_ *layout.Config, f *state.File) error { return f.XID(6, 31) })
	if e := w.event(s.card(6)); e.XID != 31 {
		t.Errorf("%+v", e)
	}
	s.change(func(_ *layout.Config, f *state.File) error { return f.Restore(2) })
	w.condition(s.card(2), answers)
	w.listens()
	s.change(func(_ *layout.Config, f *state.File) error { return f.XID(2, 43) })
	if e := w.event(s.card(2)); e.XID != 43 {
		t.Errorf("%+v", e)
	}
}

func TestALostGPUIsNamedByWhatItOnceSaid(t *testing.T) {
	s := newSite(t, "l40s-x2", layout.Container, "")
	w := watchSite(s, nil)
	w.condition(s.card(1), answers)
	s.change(func(_ *layout.Config, f *state.File) error { return f.Lose(1) })
	w.condition(s.card(1), func(c device.Condition) bool { return c.Reach == device.ReachLost })
	// Another child has not seen it well.
	w.killChild(s)
	w.says(func(state device.WatcherState) bool { return !state.Up })
	w.condition(s.card(1), func(c device.Condition) bool { return c.Reach == device.ReachLost })
}

// killChild kills the process that has NVML, as the kernel does that is out of memory.
func (w watch) killChild(s site) {
	w.t.Helper()
	s.fault(state.Fault{Kind: state.FaultKill, GPU: state.AnyGPU}, "nvmlDeviceGetUUID", 1)
}

func TestAWedgedGPUHoldsUpNoOther(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Container, "")
	w := watchSite(s, func(w *watcher) { w.wedged = hangLimit })
	w.condition(s.card(3), answers)
	w.listens()
	s.fault(state.Fault{Kind: state.FaultSlow, GPU: 3, DelayMS: 3600_000}, "nvmlDeviceGetRemappedRows", 0)
	c := w.condition(s.card(3), func(c device.Condition) bool { return c.Reach != device.ReachOK })
	if c.Reach != device.ReachWedged || !strings.Contains(c.Error, "has not answered for") {
		t.Errorf("%+v", c)
	}
	w.condition(s.card(3), func(c device.Condition) bool { return c.Reach == device.ReachWedged }) // it is said again
	s.change(func(_ *layout.Config, f *state.File) error { return errors.Join(f.XID(4, 63), f.XID(3, 64)) })
	if e := w.event(s.card(4)); e.XID != 63 {
		t.Errorf("%+v", e)
	}
	w.condition(s.card(5), answers)
	s.change(func(_ *layout.Config, f *state.File) error { return f.ClearFaults() })
	w.condition(s.card(3), answers)
}

func TestASetOfEventsThatFailsIsMadeAnew(t *testing.T) {
	s := newSite(t, "l40s-x2", layout.Container, "")
	w := watchSite(s, nil)
	w.condition(s.card(0), answers)
	w.condition(s.card(1), answers)
	w.listens()
	for n, function := range []string{"nvmlEventSetWait_v2", "nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlDeviceGetSupportedEventTypes"} {
		fail := func(function string, times int) {
			s.fault(state.Fault{Kind: state.FaultFail, GPU: state.AnyGPU, Error: uint32(nvml.ERROR_IRQ_ISSUE)}, function, times)
		}
		fail(function, 3)
		if n > 0 { // the sets that are there have to fail first
			fail("nvmlEventSetWait_v2", 2)
		}
		code := uint64(100 + n)
		xid := func() {
			s.change(func(_ *layout.Config, f *state.File) error { return errors.Join(f.XID(0, code), f.XID(1, code)) })
		}
		xid() // ends the waits that are under way
		if deaf := w.says(func(s device.WatcherState) bool { return !s.Events }); !deaf.Up || !strings.Contains(deaf.Error, "gpu-0000-") || !strings.Contains(deaf.Error, "interrupt problem") {
			t.Errorf("%s: %+v", function, deaf)
		}
		code += 100
		for _, index := range []int{0, 1} {
			w.await("an event after the failure of "+function, func(signal device.Signal) bool {
				if signal.Condition != nil {
					xid() // what comes while nobody listens is lost
				}
				return signal.Event != nil && signal.Event.XID == code && signal.Event.Card == s.card(index)
			})
		}
		w.listens()
		s.change(func(_ *layout.Config, f *state.File) error { return f.ClearFaults() })
	}
}

func TestAnyFailureOfAnyQuestionIsOfThatGPUAlone(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Container, "")
	w := watchSite(s, nil)
	w.condition(s.card(1), answers)
	for function, answer := range map[string]nvml.Return{
		"nvmlDeviceGetUUID": nvml.ERROR_UNKNOWN, "nvmlDeviceGetFieldValues": nvml.ERROR_TIMEOUT, "nvmlDeviceGetRemappedRows": nvml.ERROR_NO_DATA,
		"nvmlDeviceGetTotalEccErrors": nvml.ERROR_UNKNOWN, "nvmlDeviceGetGpuFabricInfoV": nvml.ERROR_IRQ_ISSUE,
	} {
		s.fault(state.Fault{Kind: state.FaultFail, GPU: 1, Error: uint32(answer)}, function, 0)
		c := w.condition(s.card(1), func(c device.Condition) bool { return c.Reach != device.ReachOK })
		if c.Reach != device.ReachFailed || !strings.Contains(c.Error, nvmlError(answer).Error()) {
			t.Errorf("%s: %+v", function, c)
		}
		if c := w.condition(s.card(2), func(device.Condition) bool { return true }); c.Reach != device.ReachOK {
			t.Errorf("%s: %+v", function, c)
		}
		s.change(func(_ *layout.Config, f *state.File) error { return f.ClearFaults() })
		w.condition(s.card(1), answers)
	}
	// What a driver does not know is no failure, and not the same as good.
	s.fault(state.Fault{Kind: state.FaultFail, GPU: 1, Error: uint32(nvml.ERROR_NOT_SUPPORTED)}, "nvmlDeviceGetFieldValues", 0)
	w.condition(s.card(1), func(c device.Condition) bool {
		return c.Reach == device.ReachOK && c.Recovery == device.RecoveryUnknown
	})
}

func TestAGPUThatLeavesTheBusAndComesBack(t *testing.T) {
	s := newSite(t, "l40s-x2", layout.Container, "")
	w := watchSite(s, nil)
	w.condition(s.card(1), answers)
	link := filepath.Join(s.root, "sys", "bus", "pci", "devices", string(s.card(1).PCIAddress))
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	if c := w.condition(s.card(1), func(c device.Condition) bool { return c.Reach != device.ReachOK }); c.Reach != device.ReachLost || !strings.Contains(c.Error, "left the PCI bus") {
		t.Errorf("%+v", c)
	}
	w.condition(s.card(0), answers)
	// The library in the child knows nothing of a card that came back (what changes the node puts the link back): another child does.
	s.fault(state.Fault{Kind: state.FaultFail, GPU: state.AnyGPU, Error: uint32(nvml.ERROR_NOT_FOUND)}, "nvmlDeviceGetHandleByPciBusId_v2", 0)
	if state := w.says(func(s device.WatcherState) bool { return !s.Up }); !strings.Contains(state.Error, "taken anew") {
		t.Errorf("%+v", state)
	}
	s.change(func(_ *layout.Config, f *state.File) error { return f.ClearFaults() })
	w.condition(s.card(1), answers)
}
