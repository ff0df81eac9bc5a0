package health

import "testing"

func TestEffectsOfStates(t *testing.T) {
	e, err := ParseEffects(" lost=NoExecute, Degraded=off,")
	if err != nil {
		t.Fatal(err)
	}
	for state, want := range (Effects{Lost: NoExecute, Unhealthy: NoSchedule, Unknown: Informing, Degraded: Untold}) {
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
		if e.TakesOut(Verdict{State: state, Causes: []Cause{{State: state}}}) != want {
			t.Errorf("%s takes out: %v", state, !want)
		}
	}
	if !e.TakesOut(Verdict{State: Unknown, Causes: []Cause{{State: Unknown}, {State: Unhealthy}}}) {
		t.Error("a state that does nothing hides one that does")
	}
}
