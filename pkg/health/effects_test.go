package health

import "testing"

func TestEffectsHaveDefaults(t *testing.T) {
	e, errs := NewEffects(map[string]Effect{"lost": NoExecute, "degraded": NoTaint}, nil)
	if errs != nil {
		t.Fatal(errs)
	}
	for state, want := range (Effects{Lost: NoExecute, Unhealthy: NoSchedule, Unknown: Informational, Degraded: NoTaint}) {
		if e[state] != want {
			t.Errorf("%s: %q, want %q", state, e[state], want)
		}
	}
	for state, effect := range map[string]Effect{
		"lost": "", "healthy": NoSchedule, "dead": "none", "unknown": "Evict", "": "none", "Lost": "none",
	} {
		if _, errs := NewEffects(map[string]Effect{state: effect}, nil); errs == nil {
			t.Errorf("%q: %q is accepted", state, effect)
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
