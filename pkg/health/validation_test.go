package health

import (
	"testing"
	"time"

	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func (w *testMonitor) wantUnvalidated(want bool) {
	w.t.Helper()
	if since, is := w.View().Unvalidated(gpu); is != want {
		w.t.Errorf("unvalidated: %v since %s, want %v", is, since, want)
	}
}

// check reports a check of the GPU that began now.
func (w *testMonitor) check() {
	w.advance(time.Second)
	w.Validate(map[string]time.Time{uuid: w.now.Truncate(time.Second)})
	w.advance(time.Second)
}

func TestCheckValidatesGPUUntilItsReset(t *testing.T) {
	for name, ends := range map[string]func(w *testMonitor) *testMonitor{
		"reset": func(w *testMonitor) *testMonitor {
			w.answerCounters(0, 1000)
			w.answerCounters(0, 0)
			return w
		},
		"reset of a broken GPU": func(w *testMonitor) *testMonitor {
			w.answerRecovery(device.RecoveryReset)
			w.wantUnvalidated(false)
			w.advance(time.Second)
			w.answerRecovery(device.RecoveryNone)
			return w
		},
		"driver load": func(w *testMonitor) *testMonitor {
			w.watcherUp("load-2")
			return w
		},
		"unplugged and back": func(w *testMonitor) *testMonitor {
			w.Forget(address)
			w.advance(time.Second)
			w.Expect([]device.GPU{gpu}, w.now)
			return w
		},
		"reboot": func(w *testMonitor) *testMonitor {
			s, _ := newStore()
			if err := s.Save(w.Monitor); err != nil {
				t.Fatal(err)
			}
			s.BootID = "another"
			w.advance(time.Minute)
			m := New(nil, w.now)
			if err := s.Load(m, w.now); err != nil {
				t.Fatal(err)
			}
			m.Validate(w.checks) // the Node still has the annotation
			m.Expect([]device.GPU{gpu}, w.now)
			return &testMonitor{Monitor: m, t: t, now: w.now}
		},
		"admin's withdrawal": func(w *testMonitor) *testMonitor {
			w.Validate(map[string]time.Time{})
			return w
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestMonitor(t, nil)
			w.wantUnvalidated(true)
			w.check()
			w.wantUnvalidated(false)
			w.healthyFor(time.Hour)
			w.sendXID(79) // a fault is no reset
			w.wantUnvalidated(false)
			w = ends(w)
			w.wantUnvalidated(true)
			w.check()
			w.wantUnvalidated(false)
		})
	}
}

func TestCheckFromBeforeResetDoesNotCount(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.answerCounters(0, 1000)
	w.advance(time.Second)
	began := w.now
	w.advance(time.Minute)
	w.answerCounters(0, 0)
	w.Validate(map[string]time.Time{uuid: began})
	w.wantUnvalidated(true)
}

func TestAnotherCardIsUnvalidated(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.check()
	other := gpu
	other.UUID = "GPU-2"
	if _, is := w.View().Unvalidated(other); !is {
		t.Error("a card that the monitor does not know yet counts as validated")
	}
	w.Expect([]device.GPU{other}, w.now)
	if since, is := w.View().Unvalidated(other); !is || !since.Equal(w.now.Truncate(time.Second)) {
		t.Errorf("the new card is unvalidated: %v since %s", is, since)
	}
}

// A restarted plugin publishes its first slices before it has handled the Node's annotations.
func TestRestartKeepsValidation(t *testing.T) {
	s, _ := newStore()
	w := newTestMonitor(t, nil)
	w.answer(device.Condition{EnergyMillijoules: ptr.To(uint64(1000))})
	w.check()
	checks := w.checks
	w = w.restart(s, nil)
	w.wantUnvalidated(false)
	w.watcherUp("load-1")
	w.Expect([]device.GPU{gpu}, w.now)
	w.answerCounters(0, 2000)
	w.Validate(checks)
	w.wantUnvalidated(false)

	// A reset while the plugin was not running is noticed.
	w = w.restart(s, nil)
	w.answerCounters(0, 0)
	w.wantUnvalidated(true)
}

func TestVersionChangesWithValidation(t *testing.T) {
	w := newTestMonitor(t, nil)
	before := w.Version()
	w.check()
	if w.Version() == before {
		t.Error("a check changes no version, so its taint stays")
	}
	before = w.Version()
	w.watcherUp("load-2")
	if w.Version() == before {
		t.Error("a reset changes no version, so the taint does not appear")
	}
}
