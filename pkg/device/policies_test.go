package device

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation/field"
)

func TestLastMatchingPolicyRuleApplies(t *testing.T) {
	h100 := GPU{PCIAddress: "0000:1b:00.0", UUID: "GPU-Abc", ProductName: "NVIDIA H100 80GB HBM3"}
	for settings, want := range map[string]string{
		"":                                  "static",
		"policy: dynamic":                   "dynamic",
		"policy: static":                    "static",
		"policy: off":                       "off",
		"rules: [{gpus: '*', policy: off}]": "off",
		"rules: [{policy: off}]":            "off",
		"{policy: static, rules: [{gpus: '0000:1b:00.0', policy: adopt}]}":   "adopt",
		"{policy: static, rules: [{gpus: '00000000:1B:00.0', policy: off}]}": "off",
		"{policy: dynamic, rules: [{gpus: '0000:43:00.0', policy: off}]}":    "dynamic",
		"rules: [{gpus: gpu-abc, policy: dynamic}]":                          "dynamic",
		"rules: [{gpus: NVIDIA H100*, policy: dynamic}]":                     "dynamic",
		"rules: [{gpus: '*a100*', policy: dynamic}]":                         "static",
		"rules: [{gpus: '0000:1b:00.0', policy: static}, {policy: dynamic}]": "dynamic",

		"{policy: dynamic, profiles: [1g.10gb]}": "dynamic(1g.10gb)",
		"rules: [{gpus: NVIDIA H100*, policy: dynamic, profiles: [1g.10gb, 3g.40gb]}, " +
			"{gpus: '*a100*', policy: adopt, profiles: [1g.5gb]}]": "dynamic(1g.10gb,3g.40gb)",
		"{policy: adopt, profiles: [2g.48gb+me.all, 1g.24gb-me]}":                                     "adopt(2g.48gb+me.all,1g.24gb-me)",
		"rules: [{gpus: 'NVIDIA (old, slow)*', policy: off}, {policy: dynamic, profiles: [1g.10gb]}]": "dynamic(1g.10gb)",
	} {
		p, errs := fromYAML[MIGSettings](t, settings).Policies(nil)
		if got := p.For(h100); errs != nil || got.String() != want {
			t.Errorf("%q sets %s, %v; want %s", settings, got, errs, want)
		}
	}
}

func TestInvalidPoliciesNameTheField(t *testing.T) {
	for settings, says := range map[string]string{
		"policy: always":                                  `mig.policy: Invalid value: "always": want static, dynamic, adopt or "off"`,
		"profiles: [1g.10gb]":                             `mig.policy: Invalid value: ""`,
		"rules: [{gpus: '*'}]":                            `mig.rules[0].policy: Invalid value: ""`,
		"rules: [{gpus: '[', policy: static}]":            `mig.rules[0].gpus: Invalid value: "[": is not a selector`,
		"{policy: static, profiles: [1g.10gb]}":           "mig.profiles: Invalid value: [\"1g.10gb\"]: policy static takes no profiles",
		"rules: [{policy: off, profiles: [1g.10gb]}]":     "mig.rules[0].profiles: Invalid value: [\"1g.10gb\"]: policy off takes no profiles",
		"{policy: dynamic, profiles: [foo]}":              `mig.profiles[0]: Invalid value: "foo": is not a profile: want one like 1g.10gb`,
		"{policy: dynamic, profiles: [1g.10gb, '']}":      `mig.profiles[1]: Invalid value: ""`,
		"{policy: dynamic, profiles: [MIG 1g.10gb]}":      "is not a profile",
		"{policy: dynamic, profiles: [1c.3g.40gb]}":       "is not a profile",
		"{policy: dynamic, profiles: [1g.10gb*]}":         "is not a profile",
		"{policy: dynamic, profiles: [1g.10gb, 1g.10gb]}": `mig.profiles[1]: Duplicate value: "1g.10gb"`,
	} {
		p, errs := fromYAML[MIGSettings](t, settings).Policies(field.NewPath("mig"))
		if !strings.Contains(fmt.Sprint(errs), says) || len(p.rules) > 0 {
			t.Errorf("%q: %v; want %q", settings, errs, says)
		}
	}
}

func TestAddedPoliciesTakePrecedence(t *testing.T) {
	configured, _ := MIGSettings{Policy: PolicyStatic}.Policies(nil)
	annotated, _ := MIGSettings{Rules: []MIGRule{{GPUs: "0000:1b:00.0", Policy: PolicyDynamic}}}.Policies(nil)
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
