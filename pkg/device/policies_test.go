package device

import (
	"slices"
	"strings"
	"testing"
)

func TestLastMatchingPolicyRuleApplies(t *testing.T) {
	h100 := GPU{PCIAddress: "0000:1b:00.0", UUID: "GPU-Abc", ProductName: "NVIDIA H100 80GB HBM3"}
	for rules, want := range map[string]string{
		"":                              "static",
		"dynamic":                       "dynamic",
		"static":                        "static",
		"*=off":                         "off",
		"static, 0000:1b:00.0 = adopt":  "adopt",
		"static,00000000:1B:00.0=off":   "off",
		"dynamic,0000:43:00.0=off":      "dynamic",
		"gpu-abc=dynamic":               "dynamic",
		"NVIDIA H100*=dynamic":          "dynamic",
		"*a100*=dynamic":                "static",
		"0000:1b:00.0=static,*=dynamic": "dynamic",

		"dynamic(1g.10gb)": "dynamic(1g.10gb)",
		"static,NVIDIA H100*=dynamic(1g.10gb,3g.40gb),*a100*=adopt(1g.5gb)": "dynamic(1g.10gb,3g.40gb)",
		" adopt ( 2g.48gb+me.all , 1g.24gb-me,1g.24gb+gfx ) ":               "adopt(2g.48gb+me.all,1g.24gb-me,1g.24gb+gfx)",
		"NVIDIA (old, slow)*=off,dynamic(1g.10gb)":                          "dynamic(1g.10gb)",
	} {
		p, err := ParsePolicies(rules)
		if got := p.For(h100); err != nil || got.String() != want {
			t.Errorf("%q sets %s, %v; want %s", rules, got, err, want)
		}
	}
}

func TestInvalidPolicyErrorsQuoteTheRule(t *testing.T) {
	const modes = "want static, dynamic, adopt or off"
	for rules, says := range map[string]string{
		"always":                   modes,
		"static=":                  modes,
		"=static":                  "not a selector",
		"[=static":                 "not a selector",
		"a=b=c":                    modes,
		"off,dynamic()":            "is empty: want dynamic for every profile, or dynamic(1g.10gb,3g.40gb)",
		"adopt( )":                 "is empty: want adopt for every profile",
		"static(1g.10gb)":          "static takes no profiles: want static alone",
		"*=off(1g.10gb)":           "off takes no profiles",
		"dynamic(1g.10gb,off":      "want a list of profiles that ends with a parenthesis",
		"dynamic(1g.10gb)x":        "want a list of profiles that ends with a parenthesis",
		"dynamic)":                 modes,
		"x(=dynamic":               "parentheses do not match",
		"x(=dynamic,y=off":         "parentheses do not match",
		"dynamic(foo)":             `"foo" is not a profile: want one like 1g.10gb`,
		"dynamic(1g.10gb,)":        `"" is not a profile`,
		"dynamic(MIG 1g.10gb)":     `"MIG 1g.10gb" is not a profile`,
		"dynamic(1c.3g.40gb)":      `"1c.3g.40gb" is not a profile`,
		"dynamic(1g.10gb*)":        `"1g.10gb*" is not a profile`,
		"dynamic(1g.10gb,1g.10gb)": "profile 1g.10gb is listed twice",
	} {
		_, err := ParsePolicies(rules)
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v; want %q", rules, err, says)
			continue
		}
		quoted := strings.TrimPrefix(strings.TrimPrefix(rules, "off,"), "static,")
		if !strings.Contains(err.Error(), `"`+quoted+`"`) {
			t.Errorf("%q: %v does not quote the rule", rules, err)
		}
	}
}

func TestAddedPoliciesTakePrecedence(t *testing.T) {
	configured, _ := ParsePolicies("static")
	annotated, _ := ParsePolicies("0000:1b:00.0=dynamic")
	both := configured.And(annotated)
	if got := both.For(GPU{PCIAddress: "0000:1b:00.0"}); got.Mode != PolicyDynamic {
		t.Error(got)
	}
	if got := both.For(GPU{PCIAddress: "0000:43:00.0"}); got.Mode != PolicyStatic {
		t.Error(got)
	}
}

func TestOnlyDynamicAndAdoptCreateInstances(t *testing.T) {
	for _, m := range []PolicyMode{PolicyStatic, PolicyDynamic, PolicyOff, PolicyAdopt, ""} {
		if got, want := (Policy{Mode: m}).CreatesInstances(), slices.Contains([]PolicyMode{PolicyDynamic, PolicyAdopt}, m); got != want {
			t.Errorf("%q creates instances: %v", m, got)
		}
	}
}

// If a policy names an unknown profile, it is most likely misspelt. The policy static must apply,
// and the error must list the GPU's profiles by ID, each name once.
func TestPolicyWithUnknownProfileIsStatic(t *testing.T) {
	g := small()
	g.MIG.Profiles = append(g.MIG.Profiles, Profile{ID: 20, Name: "1g.10gb+me"}, Profile{ID: 21, Name: "1g.10gb"})
	for _, c := range []struct {
		policy Policy
		want   PolicyMode
		says   string
	}{
		{Policy{Mode: PolicyDynamic, Profiles: []string{"1g.10gb", "1g.10gb+me"}}, PolicyDynamic, ""},
		{Policy{Mode: PolicyDynamic}, PolicyDynamic, ""},
		{
			Policy{Mode: PolicyAdopt, Profiles: []string{"1g.10gb", "1g.5gb"}}, PolicyStatic,
			"the GPU has no profile 1g.5gb, which policy adopt(1g.10gb,1g.5gb) names, " +
				"so policy static applies; its profiles are 2g.20gb, 1g.10gb, 1g.10gb+me",
		},
		{
			Policy{Mode: PolicyDynamic, Profiles: []string{"1G.10GB", "7g.80gb"}}, PolicyStatic,
			"the GPU has no profile 1G.10GB, 7g.80gb, which policy dynamic(1G.10GB,7g.80gb) names, " +
				"so policy static applies; its profiles are 2g.20gb, 1g.10gb, 1g.10gb+me",
		},
	} {
		got, problem := c.policy.On(g)
		if got.Mode != c.want || problem != c.says {
			t.Errorf("%s is %s: %q; want %s: %q", c.policy, got, problem, c.want, c.says)
		}
		if got, problem := c.policy.On(GPU{}); got.Mode != c.policy.Mode || problem != "" {
			t.Errorf("without MIG, %s is %s: %q", c.policy, got, problem)
		}
	}
}
