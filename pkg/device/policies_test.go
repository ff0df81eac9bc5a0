package device

import "testing"

func TestTheLastRuleThatFitsAGPUIsItsPolicy(t *testing.T) {
	h100 := GPU{PCIAddress: "0000:1b:00.0", UUID: "GPU-Abc", ProductName: "NVIDIA H100 80GB HBM3"}
	for rules, want := range map[string]Policy{
		"":                              PolicyDynamic,
		"static":                        PolicyStatic,
		"*=off":                         PolicyOff,
		"static, 0000:1b:00.0 = adopt":  PolicyAdopt,
		"static,00000000:1B:00.0=off":   PolicyOff,
		"static,0000:43:00.0=off":       PolicyStatic,
		"gpu-abc=static":                PolicyStatic,
		"NVIDIA H100*=static":           PolicyStatic,
		"*a100*=static":                 PolicyDynamic,
		"0000:1b:00.0=static,*=dynamic": PolicyDynamic,
	} {
		p, err := ParsePolicies(rules)
		if got := p.For(h100); err != nil || got != want {
			t.Errorf("%q makes %s, %v; want %s", rules, got, err, want)
		}
	}
	for _, wrong := range []string{"always", "static=", "=static", "[=static", "a=b=c"} {
		if p, err := ParsePolicies(wrong); err == nil {
			t.Errorf("%q is read as %v", wrong, p)
		}
	}
}

func TestLaterPoliciesGoBeforeEarlierOnes(t *testing.T) {
	configured, _ := ParsePolicies("static")
	annotated, _ := ParsePolicies("0000:1b:00.0=dynamic")
	both := configured.And(annotated)
	if got := both.For(GPU{PCIAddress: "0000:1b:00.0"}); got != PolicyDynamic {
		t.Error(got)
	}
	if got := both.For(GPU{PCIAddress: "0000:43:00.0"}); got != PolicyStatic {
		t.Error(got)
	}
}
