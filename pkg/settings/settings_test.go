package settings

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
)

var h100 = device.GPU{PCIAddress: "0000:1b:00.0", UUID: "GPU-1", ProductName: "NVIDIA H100"}

func TestDocumentBecomesSettings(t *testing.T) {
	d, err := Parse([]byte(`
mig:
  policy: static
  rules:
    - {gpus: NVIDIA H100*, policy: dynamic, profiles: [1g.10gb]}
    - {gpus: "0000:1c:00.0", policy: off}
passthrough:
  enabled: true
  rules:
    - {gpus: "0000:1c:00.0", enabled: false}
shares:
  - {kind: fractions}
  - {index: 1, profile: 1g*, kind: shares, count: 4}
health:
  effects: {lost: NoExecute}
xidRules: {"79": app, 31: degraded}
`))
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.Compile(Default)
	if err != nil {
		t.Fatal(err)
	}
	if got := s.Policies.For(h100).String(); got != "dynamic(1g.10gb)" {
		t.Errorf("policy %s", got)
	}
	if got := s.Policies.For(device.GPU{PCIAddress: "0000:1c:00.0"}); got.Mode != device.PolicyOff || got.Passthrough {
		t.Errorf("the other GPU has policy %+v", got)
	}
	if !s.Policies.For(h100).Passthrough {
		t.Error("the first GPU is not for virtual machines")
	}
	if got := []device.Share{s.Shares.For(h100, "", 1), s.Shares.For(h100, "1g.10gb", 1)}; !got[0].Fractions || got[1].Count != 4 {
		t.Errorf("shares %+v", got)
	}
	if s.Effects[health.Lost] != health.NoExecute || s.Effects[health.Unhealthy] != health.NoSchedule {
		t.Errorf("effects %v", s.Effects)
	}
	if s.XIDRules[79] != health.Reported || s.XIDRules[31] != health.Degrading {
		t.Errorf("weights of XIDs %v", s.XIDRules)
	}
}

func TestEmptyDocumentHasDefaults(t *testing.T) {
	for _, text := range []string{"", "{}", "# nothing", "mig:\nshares:\nhealth:\nxidRules:\n"} {
		d, err := Parse([]byte(text))
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		s, err := d.Compile(Default)
		if err != nil || s.Policies.For(h100).Mode != device.PolicyStatic || s.Shares.Any() || s.Effects[health.Lost] != health.NoSchedule {
			t.Errorf("%q: %+v, %v", text, s, err)
		}
	}
}

func TestErrorsNameFieldAndLine(t *testing.T) {
	for text, want := range map[string][]string{
		"mig:\n  policy: never":                              {"line 2: mig.policy: ", `"never"`},
		"mig:\n  polcy: static":                              {`line 2: mig.polcy: unknown field "polcy"`},
		"mig: dynamic":                                       {"line 1: mig: `dynamic` is a text does not fit here"},
		"mig:\n  profiles: 1g.10gb":                          {"line 2: mig.profiles: `1g.10gb` is a text"},
		"mig:\n  rules:\n    - gpus: x\n      policy: maybe": {"line 4: mig.rules[0].policy: "},
		"mig:\n  policy: dynamic\n  profiles:\n    - 1g.10gb\n    - small": {"line 5: mig.profiles[1]: ", `"small": is not a profile`},
		"shares:\n  - kind: fractions\n  - kind: shares\n    count: four":  {"line 4: shares[1].count: `four` is a text"},
		"shares:\n  - kind: fractions\n  - kind: shares\n":                 {"line 3: shares[1].count: "},
		"shares:\n  - {kind: shares, count: 1, profil: 1g}":                {"line 2: shares[0].kind: unknown field \"profil\""},
		"shares: {kind: fractions}":                                        {"line 1: shares: a map does not fit here"},
		"\n\nhealth:\n  effects:\n    lost: Evict":                         {"line 5: health.effects[lost]: ", `"Evict"`},
		"health:\n  effects:\n    gone: none":                              {"line 3: health.effects[gone]: "},
		"xidRules:\n  \"79\": app\n  \"31\": dead":                         {"line 3: xidRules[31]: "},
		"mig:\n  policy: off\n  policy: static":                            {"line 3", "policy", "line 2"},
		"passthrough:\n  enabled: yes please":                              {"line 2: passthrough.enabled: `yes please` is a text"},
		"passthrough: true":                                                {"line 1: passthrough: `true` is a Boolean"},
		"passthrough:\n  enabled: true\n  rules:\n    - {gpus: x}":         {"line 4: passthrough.rules[0].enabled: Required value"},
		"passthrough:\n  rules:\n    - {gpu: x, enabled: true}":            {`line 3: passthrough.rules[0].gpu: unknown field "gpu"`},
		"mig: {\nshares: []":                                               {"line 2"},
		"mig: {}\n---\nmig: {}":                                            {"second YAML document"},
		"mig:\n  policy: never\nshares:\n  - kind: x":                      {"line 2: mig.policy", "line 4: shares[0].kind"},
		"mig: &m {policy: dynamic}\nshares: *m":                            {"line"},
		"[]":                                                               {"line 1: a list does not fit here"},
	} {
		_, err := Parse([]byte(text))
		for _, w := range want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%q: %v; want %q", text, err, w)
			}
		}
	}
}

func TestFileErrorsNameTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "settings.yaml")
	if err := os.WriteFile(path, []byte("share: []"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{path, path + "x"} {
		if _, err := ReadFile(path); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%v does not name %s", err, path)
		}
	}
}

func TestAnnotationIsPolicyOrYAML(t *testing.T) {
	for text, want := range map[string]string{
		"": "static", " \n": "static", "dynamic": "dynamic", " off\n": "off", "adopt": "adopt",
		"{policy: dynamic, profiles: [1g.10gb]}":                               "dynamic(1g.10gb)",
		"policy: off":                                                          "off",
		`{"rules":[{"gpus":"GPU-1","policy":"adopt"}]}`:                        "adopt",
		"policy: adopt\nrules:\n- {gpus: '0000:1b:00.0', policy: static}":      "static",
		"policy: dynamic\nrules:\n- {gpus: '0000:43:00.0', policy: static}":    "dynamic",
		"policy: dynamic\nrules:\n- {gpus: NVIDIA A100, policy: static}\n# no": "dynamic",
	} {
		p, err := ParseMIG(text)
		if got := p.For(h100).String(); err != nil || got != want {
			t.Errorf("%q is %s, %v; want %s", text, got, err, want)
		}
	}
	for text, want := range map[string]string{
		"dynamc": `"dynamc"`, "dynamic(1g.10gb)": `"dynamic(1g.10gb)"`, "{policy: x}": `line 1: policy: Invalid value: "x"`,
		"policies: static": `unknown field "policies"`, "[static]": "policy", "a: b: c": "mapping values",
	} {
		if p, err := ParseMIG(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is %s, %v; want %q", text, p.For(h100), err, want)
		}
	}
}

func TestPassthroughAnnotationIsBooleanOrYAML(t *testing.T) {
	for text, want := range map[string]bool{
		"": false, "true": true, " false\n": false, "enabled: true": true, "rules: [{gpus: GPU-1, enabled: true}]": true,
		`{"enabled": true, "rules": [{"gpus": "NVIDIA H100", "enabled": false}]}`: false,
	} {
		p, err := ParsePassthrough(text)
		if got := p.For(h100).Passthrough; err != nil || got != want {
			t.Errorf("%q is %t, %v; want %t", text, got, err, want)
		}
	}
	for text, want := range map[string]string{
		"on": "`on` is a text", "enabled: maybe": "line 1: enabled: ", "rules: [{gpus: x}]": "line 1: rules[0].enabled: Required value",
	} {
		if _, err := ParsePassthrough(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want %q", text, err, want)
		}
	}
}

// A configuration can switch off for its nodes what the document switches on.
func TestConfigurationOverridesPassthrough(t *testing.T) {
	d, err := Parse([]byte("passthrough: {enabled: true}\n" +
		"configurations: {no-vm: {passthrough: {enabled: false}}, same: {mig: {policy: dynamic}}}"))
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]bool{
		"": false, "passthrough: {enabled: false}": false, "passthrough: {rules: [{gpus: x, enabled: true}]}": true,
		"configurations: {a: {passthrough: {enabled: true}}}": true, "configurations: {a: {passthrough: {rules: [{enabled: false}]}}}": false,
	} {
		if d, err := Parse([]byte(text)); err != nil || d.Passes() != want {
			t.Errorf("%q: %t, %v", text, d.Passes(), err)
		}
	}
	for name, want := range map[string]bool{Default: true, "no-vm": false, "same": true} {
		s, err := d.Compile(name)
		if got := s.Policies.For(h100).Passthrough; err != nil || got != want {
			t.Errorf("configuration %s: %t, %v; want %t", name, got, err, want)
		}
	}
}

// A document is accepted or refused, and what is accepted is complete.
func FuzzParse(f *testing.F) {
	for _, text := range []string{
		"", "mig: {policy: dynamic, rules: [{gpus: '*', policy: off}]}", "shares: [{index: 1, kind: shares, count: 2}]", "a: &a [*a]",
		"xidRules: {1: app}", "health: {effects: {lost: none}}", "---\n---", "mig: !!binary x", "? [a]\n: b", "shares: [null]", "\t",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		d, err := Parse(raw)
		if err != nil {
			return
		}
		s, err := d.Compile(Default)
		if err != nil || len(s.Effects) != 4 || s.Policies.For(h100).Mode == "" {
			t.Errorf("%q is accepted as %+v, %v", raw, s, err)
		}
		_, _ = ParseMIG(string(raw))
	})
}
