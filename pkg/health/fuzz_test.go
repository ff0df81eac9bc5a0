package health

import "testing"

// Rules are taken or refused, whatever they say.
func FuzzRules(f *testing.F) {
	for _, s := range []string{"", "109=app", "=", "4294967296=app", "79=unhealthy,79=ignore", "a=b", " 1 = degraded ,", DefaultEffects} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		rules, err := ParseRules(s)
		for code, weight := range rules {
			if err == nil && weight == "" {
				t.Errorf("%q says nothing of %d", s, code)
			}
		}
		if effects, err := ParseEffects(s); err == nil && len(effects) == 0 {
			t.Errorf("%q leaves no effect", s)
		}
	})
}
