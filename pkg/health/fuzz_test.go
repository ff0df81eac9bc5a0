package health

import "testing"

// FuzzRules expects that ParseRules and ParseEffects accept or reject any input without a crash,
// and that accepted rules are complete.
func FuzzRules(f *testing.F) {
	for _, s := range []string{"", "109=app", "=", "4294967296=app", "79=unhealthy,79=ignore", "a=b", " 1 = degraded ,", DefaultEffects} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		rules, err := ParseRules(s)
		for code, weight := range rules {
			if err == nil && weight == "" {
				t.Errorf("%q has no weight for %d", s, code)
			}
		}
		if effects, err := ParseEffects(s); err == nil && len(effects) == 0 {
			t.Errorf("%q has no effects", s)
		}
	})
}
