package device

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation/field"
)

func TestLastMatchingShareRuleApplies(t *testing.T) {
	h100 := GPU{PCIAddress: "0000:1b:00.0", UUID: "GPU-Abc", ProductName: "NVIDIA H100 80GB HBM3"}
	slash := GPU{PCIAddress: "0000:43:00.0", UUID: "GPU-Def", ProductName: "NVIDIA A/B"}
	none, fractions := Share{}, Share{Fractions: true}
	plain := func(n int) Share { return Share{Count: n} }
	for _, c := range []struct {
		rules   string
		gpu     GPU
		profile string
		index   int
		want    Share
	}{
		{"", h100, "", 0, none},
		{"[]", h100, "", 0, none},
		{"[{kind: 'off'}]", h100, "", 0, none},
		{"[{kind: fractions}]", h100, "", 0, fractions},
		{"[{kind: fractions}]", h100, "1g.10gb", 0, none}, // the rule is about whole GPUs
		{"[{kind: fractions}]", h100, "", 7, fractions},
		{"[{kind: shares, count: 4}]", h100, "", 0, plain(4)},
		{"[{kind: shares, count: 1000}]", h100, "", 0, plain(1000)},
		{"[{kind: fractions}, {gpus: '0000:1b:00.0', kind: shares, count: 2}]", h100, "", 0, plain(2)},
		{"[{kind: fractions}, {gpus: '00000000:1B:00.0', kind: 'off'}]", h100, "", 0, none},
		{"[{gpus: gpu-abc, kind: fractions}]", h100, "", 0, fractions},
		{"[{gpus: 'NVIDIA H100*', kind: fractions}]", h100, "", 0, fractions},
		{"[{gpus: '*a100*', kind: fractions}]", h100, "", 0, none},
		{"[{gpus: 'NVIDIA A*B', kind: fractions}]", slash, "", 0, fractions},
		{"[{gpus: '0000:1b:00.0', kind: fractions}, {kind: 'off'}]", h100, "", 0, none},
		{"[{index: 0, kind: fractions}]", h100, "", 0, fractions},
		{"[{index: 0, kind: fractions}]", h100, "", 1, none},
		{"[{kind: fractions}, {index: 3, kind: shares, count: 2}]", h100, "", 3, plain(2)},
		{"[{index: 3, profile: 1g.10gb, kind: shares, count: 2}]", h100, "1g.10gb", 3, plain(2)},
		{"[{index: 3, profile: 1g.10gb, kind: shares, count: 2}]", h100, "", 3, none},
		{"[{profile: '*', kind: fractions}]", h100, "1g.10gb", 0, fractions},
		{"[{profile: '*', kind: fractions}]", h100, "", 0, none},
		{"[{profile: 1g.10gb, kind: shares, count: 2}]", h100, "1g.10gb", 0, plain(2)},
		{"[{profile: 1G.10GB, kind: shares, count: 2}]", h100, "1g.10gb", 0, plain(2)},
		{"[{profile: 1g.10gb, kind: shares, count: 2}]", h100, "1g.10gb+me", 0, none},
		{"[{profile: '1g.10gb*', kind: shares, count: 2}]", h100, "1g.10gb+me", 0, plain(2)},
		{"[{profile: 1c.3g.40gb, kind: fractions}]", h100, "1c.3g.40gb", 0, fractions},
		{"[{gpus: 'NVIDIA H100*', profile: '3g*', kind: fractions}, {profile: 3g.40gb, kind: 'off'}]", h100, "3g.40gb", 0, none},
		{"[{gpus: 'NVIDIA H100*', profile: '3g*', kind: fractions}, {profile: 3g.40gb, kind: 'off'}]", h100, "3g.20gb", 0, fractions},
		{"[{profile: '*', kind: fractions}, {kind: shares, count: 2}]", h100, "3g.20gb", 0, fractions}, // the second rule is about whole GPUs
	} {
		r := shareRules(t, c.rules)
		if got := r.For(c.gpu, c.profile, c.index); got != c.want {
			t.Errorf("%q: %s %q at index %d is %+v, want %+v", c.rules, c.gpu.ProductName, c.profile, c.index, got, c.want)
		}
		if c.want.Offered() && !r.Any() {
			t.Errorf("Any is false for %q", c.rules)
		}
	}
	for _, r := range []string{"", "[{kind: off}]", "[{gpus: '*', kind: off}, {index: 1, profile: '1g*', kind: off}]"} {
		if shareRules(t, r).Any() {
			t.Errorf("%q offers shares", r)
		}
	}
}

func TestInvalidShareRulesAreRejected(t *testing.T) {
	for rule, says := range map[string]string{
		"{}":                                        "kind: ",
		"{kind: always}":                            `kind: Invalid value: "always"`,
		"{kind: Fractions}":                         "want fractions, shares or",
		"{kind: shares}":                            "count: Invalid value: 0: want a number of shares from 2 to 1000",
		"{kind: shares, count: 1}":                  "from 2 to 1000",
		"{kind: shares, count: 1001}":               "from 2 to 1000",
		"{kind: shares, count: -4}":                 "from 2 to 1000",
		"{kind: fractions, count: 4}":               "only kind shares has a count",
		"{gpus: '[', kind: fractions}":              "gpus: Invalid value: \"[\": is not a selector",
		"{profile: g1, kind: fractions}":            "profile: Invalid value: \"g1\": is not a profile",
		"{profile: '[', kind: fractions}":           "is not a profile",
		"{profile: '1[', kind: fractions}":          "is not a profile",
		"{index: -1, kind: fractions}":              "index: Invalid value: -1: want a number from 0",
		"{index: 0, gpus: GPU-1, kind: fractions}":  "and no gpus with it",
		"{index: 0, kind: x, profile: b, count: 3}": "profile: ",
	} {
		r, errs := NewShareRules(fromYAML[[]ShareRule](t, "[{kind: fractions}, "+rule+"]"), field.NewPath("shares"))
		if !strings.Contains(fmt.Sprint(errs), says) || !strings.Contains(fmt.Sprint(errs), "shares[1]") || r.Any() {
			t.Errorf("%q gives %v: %v; want %q", rule, r, errs, says)
		}
	}
}

func TestSharingUnsupportedReason(t *testing.T) {
	if why := SharingUnsupportedReason(true, true); why != "" {
		t.Error(why)
	}
	for _, c := range []struct {
		counters, capacities bool
		says                 []string
	}{
		{false, true, []string{"DRAPartitionableDevices"}},
		{true, false, []string{"DRAConsumableCapacity"}},
		{false, false, []string{"DRAPartitionableDevices", "DRAConsumableCapacity"}},
	} {
		for _, gate := range c.says {
			if why := SharingUnsupportedReason(c.counters, c.capacities); !strings.Contains(why, gate) {
				t.Errorf("%q does not name %s", why, gate)
			}
		}
	}
}
