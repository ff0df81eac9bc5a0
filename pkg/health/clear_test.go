package health

import (
	"slices"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func TestClearEndsAllFindingsButLevels(t *testing.T) {
	for _, name := range []string{gpuName, string(address), uuid, " x, " + gpuName} {
		w := newTestMonitor(t, nil)
		w.sendXID(79)
		w.sendXID(144)
		w.answer(device.Condition{Remap: &device.Remap{Pending: true}})
		w.Changes()
		unknown := w.Clear(name, "cleared by an admin", w.now)
		w.wantState(gpuName, Degraded) // the hardware still reports the pending remap
		if changes := w.Changes(); len(changes) != 2 || !changes[0].Over || changes[0].Why != "cleared by an admin" {
			t.Errorf("%s: %+v", name, changes)
		}
		if want := name == " x, "+gpuName; slices.Equal(unknown, []string{"x"}) != want {
			t.Errorf("%s: %q", name, unknown)
		}
	}
}

func TestFindingsAfterClearCount(t *testing.T) {
	s, _ := newStore()
	w := newTestMonitor(t, nil)
	w.sendXID(79)
	w.Clear(gpuName, "cleared by an admin", w.now)
	w.wantState(gpuName, Healthy)
	w.advance(time.Second)
	w.sendXID(79)
	w.Clear(gpuName, "cleared by an admin", w.now) // the annotation is unchanged
	w.wantState(gpuName, Unhealthy)
	w = w.restart(s, nil)
	w.Clear(gpuName, "cleared by an admin", w.now)
	w.wantState(gpuName, Unhealthy)
	w.Clear(gpuName+",gpu-0000-43-00-0", "cleared by an admin", w.now) // another name is added
	w.wantState(gpuName, Unhealthy)

	other := s
	other.BootID = "another"
	m := New(nil, w.now)
	if err := other.Load(m, w.now); err != nil {
		t.Fatal(err)
	}
	w.Monitor = m
	w.sendXID(79)
	w.Clear(gpuName, "cleared by an admin", w.now)
	w.wantState(gpuName, Unhealthy)

	w.Clear("", "", w.now)
	w.Clear(gpuName, "cleared by an admin", w.now)
	w.wantState(gpuName, Healthy)
}
