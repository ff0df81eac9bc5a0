package health

import "testing"

func TestParseEffects(t *testing.T) {
	e, err := ParseEffects(" lost=NoExecute, Degraded=off,")
	if err != nil {
		t.Fatal(err)
	}
	for state, want := range (Effects{Lost: NoExecute, Unhealthy: NoSchedule, Unknown: Informational, Degraded: NoTaint}) {
		if e[state] != want {
			t.Errorf("%s: %q, want %q", state, e[state], want)
		}
	}
	for _, wrong := range []string{"lost", "healthy=NoSchedule", "dead=none", "lost=Evict", "=none"} {
		if _, err := ParseEffects(wrong); err == nil {
			t.Errorf("%q is accepted", wrong)
		}
	}
	for state, want := range map[State]bool{Lost: true, Unhealthy: true, Unknown: false, Degraded: false} {
		if e.BlocksScheduling(Verdict{State: state, Causes: []Finding{{State: state}}}) != want {
			t.Errorf("%s blocks scheduling: %v", state, !want)
		}
	}
	if !e.BlocksScheduling(Verdict{State: Unknown, Causes: []Finding{{State: Unknown}, {State: Unhealthy}}}) {
		t.Error("a state without effect hides a state with one")
	}
}
