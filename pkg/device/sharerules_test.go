package device

import (
	"strings"
	"testing"
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
		{" , ", h100, "", 0, none},
		{"off", h100, "", 0, none},
		{"fractions", h100, "", 0, fractions},
		{"fractions", h100, "1g.10gb", 0, none}, // the rule is about whole GPUs
		{"*=fractions", h100, "", 7, fractions},
		{"shares:4", h100, "", 0, plain(4)},
		{"shares:1000", h100, "", 0, plain(1000)},
		{"fractions, 0000:1b:00.0 = shares:2", h100, "", 0, plain(2)},
		{"fractions,00000000:1B:00.0=off", h100, "", 0, none},
		{"gpu-abc=fractions", h100, "", 0, fractions},
		{"NVIDIA H100*=fractions", h100, "", 0, fractions},
		{"*a100*=fractions", h100, "", 0, none},
		{"NVIDIA A*B=fractions", slash, "", 0, fractions},
		{"0000:1b:00.0=fractions,*=off", h100, "", 0, none},
		{"#0=fractions", h100, "", 0, fractions},
		{"#0=fractions", h100, "", 1, none},
		{"fractions,#3=shares:2", h100, "", 3, plain(2)},
		{"#3/1g.10gb=shares:2", h100, "1g.10gb", 3, plain(2)},
		{"#3/1g.10gb=shares:2", h100, "", 3, none},
		{"*/*=fractions", h100, "1g.10gb", 0, fractions},
		{"*/*=fractions", h100, "", 0, none},
		{"*/1g.10gb=shares:2", h100, "1g.10gb", 0, plain(2)},
		{"*/1G.10GB=shares:2", h100, "1g.10gb", 0, plain(2)},
		{"*/1g.10gb=shares:2", h100, "1g.10gb+me", 0, none},
		{"*/1g.10gb*=shares:2", h100, "1g.10gb+me", 0, plain(2)},
		{"*/1c.3g.40gb=fractions", h100, "1c.3g.40gb", 0, fractions},
		{"NVIDIA H100*/3g*=fractions, */3g.40gb=off", h100, "3g.40gb", 0, none},
		{"NVIDIA H100*/3g*=fractions, */3g.40gb=off", h100, "3g.20gb", 0, fractions},
		{"*/*=fractions,shares:2", h100, "3g.20gb", 0, fractions}, // the second rule is about whole GPUs
	} {
		r, err := ParseShares(c.rules)
		if err != nil {
			t.Errorf("%q: %v", c.rules, err)
			continue
		}
		if got := r.For(c.gpu, c.profile, c.index); got != c.want {
			t.Errorf("%q: %s %q at index %d is %+v, want %+v", c.rules, c.gpu.ProductName, c.profile, c.index, got, c.want)
		}
		if c.want.Offered() && !r.Any() {
			t.Errorf("Any is false for %q", c.rules)
		}
	}
	for _, r := range []string{"", "off", "*=off,#1/1g*=off"} {
		if rules, err := ParseShares(r); err != nil || rules.Any() {
			t.Errorf("%q offers shares or is invalid: %v", r, err)
		}
	}
}

func TestInvalidShareRulesAreRejected(t *testing.T) {
	for rule, says := range map[string]string{
		"always":                       "not a kind",
		"shares":                       "not a kind",
		"Fractions":                    "not a kind",
		"shares:":                      "2 to 1000",
		"shares:0":                     "2 to 1000",
		"shares:1":                     "2 to 1000",
		"shares:1001":                  "2 to 1000",
		"shares:-4":                    "2 to 1000",
		"shares:4.5":                   "2 to 1000",
		"shares:99999999999999999999":  "2 to 1000",
		"=fractions":                   "not a selector",
		"[=fractions":                  "not a selector",
		"/1g.10gb=fractions":           "not a selector",
		"fractions=":                   "not a kind",
		"*/=fractions":                 "not a profile",
		"*/g1=fractions":               "not a profile",
		"*/[=fractions":                "not a profile",
		"NVIDIA A/B=fractions":         "not a profile",
		"*/1[=fractions":               "not a profile",
		"#=fractions":                  "not an index",
		"#-1=fractions":                "not an index",
		"#x/1g.10gb=fractions":         "not an index",
		"#99999=fractions":             "not an index",
		"fractions,shares:x,*=unheard": "shares:x",
		"fractions;off":                "not a kind",
	} {
		r, err := ParseShares(rule)
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q is parsed as %v: %v; want %q", rule, r, err, says)
		}
	}
}

func FuzzParseShares(f *testing.F) {
	f.Add("NVIDIA L40S=fractions,*/1g.10gb=shares:4,#0=off")
	f.Fuzz(func(t *testing.T, s string) {
		r, err := ParseShares(s)
		if err != nil {
			return
		}
		for _, profile := range []string{"", "1g.10gb"} {
			if share := r.For(GPU{PCIAddress: "0000:1b:00.0", ProductName: "NVIDIA L40S"}, profile, 0); share.Offered() &&
				!r.Any() || share.Fractions && share.Count != 0 {
				t.Errorf("%q gives %+v", s, share)
			}
		}
	})
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
