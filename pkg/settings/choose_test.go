package settings

import (
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
)

const pools = `
mig: {policy: dynamic}
shares: [{kind: fractions}]
health: {effects: {unknown: NoSchedule}}
xidRules: {"79": app}
configurations:
  training:
    nodeSelector: {pool: training}
    mig: {policy: static}
    shares: []
  notebooks:
    nodeSelector: {pool: notebooks, zone: a}
    shares: [{kind: shares, count: 4}]
    health: {effects: {lost: NoExecute}}
    xidRules: {"13": unhealthy}
  both:
    nodeSelector: {zone: a}
`

func parse(t *testing.T, text string) Document {
	t.Helper()
	d, err := Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestLabelsChooseConfiguration(t *testing.T) {
	alone, too := parse(t, pools), parse(t, pools+"devicePluginLabel: true\n")
	for name, c := range map[string]struct {
		document  Document
		labels    map[string]string
		want, why string // why is the error if want is empty
	}{
		"no label":                     {alone, nil, Default, "no label or nodeSelector"},
		"a label":                      {alone, map[string]string{Label: "training"}, "training", Label},
		"an empty label":               {alone, map[string]string{Label: ""}, Default, "no label"},
		"the default by label":         {alone, map[string]string{Label: "default", "pool": "training"}, Default, Label},
		"a label before the selectors": {alone, map[string]string{Label: "notebooks", "pool": "training"}, "notebooks", Label},
		"a selector":                   {alone, map[string]string{"pool": "training"}, "training", "nodeSelector"},
		"half of a selector":           {alone, map[string]string{"pool": "notebooks"}, Default, "no label"},
		"two selectors":                {alone, map[string]string{"pool": "notebooks", "zone": "a"}, "", "both, notebooks"},
		"two selectors and a label":    {alone, map[string]string{"pool": "notebooks", "zone": "a", Label: "both"}, "both", Label},
		"an unknown name": {
			alone, map[string]string{Label: "unknown"}, "", `"unknown", which does not exist: want one of default, both, notebooks`,
		},
		"the device plugin's label": {alone, map[string]string{DevicePluginLabel: "training"}, Default, "no label"},
		"that label, if asked":      {too, map[string]string{DevicePluginLabel: "training"}, "training", DevicePluginLabel},
		"both labels":               {too, map[string]string{DevicePluginLabel: "training", Label: "both"}, "both", Label},
	} {
		got, why, err := c.document.Choose(c.labels)
		if err != nil {
			why = err.Error()
		}
		if got != c.want || !strings.Contains(why, c.why) || (err == nil) != (c.want != "") {
			t.Errorf("%s: %q, %q, %v; want %q, %q", name, got, why, err, c.want, c.why)
		}
	}
}

func TestConfigurationInheritsWhatItLeavesOut(t *testing.T) {
	d := parse(t, pools)
	for name, want := range map[string]struct {
		policy    device.PolicyMode
		shares    device.Share
		lost      health.Effect
		something health.Weight
	}{
		Default:     {device.PolicyDynamic, device.Share{Fractions: true}, health.NoSchedule, health.Reported},
		"training":  {device.PolicyStatic, device.Share{}, health.NoSchedule, health.Reported},
		"notebooks": {device.PolicyDynamic, device.Share{Count: 4}, health.NoExecute, health.Reported},
	} {
		s, err := d.Compile(name)
		if err != nil {
			t.Fatal(err)
		}
		if got := s.Policies.For(h100).Mode; got != want.policy || s.Shares.For(h100, "", 0) != want.shares ||
			s.Effects[health.Lost] != want.lost || s.Effects[health.Unknown] != health.NoSchedule || s.XIDRules[79] != want.something {
			t.Errorf("%s is %+v", name, s)
		}
	}
}

func TestConfigurationErrorsNameFieldAndLine(t *testing.T) {
	for text, want := range map[string]string{
		"configurations:\n  a:\n    mig:\n      policy: never":     "line 4: configurations[a].mig.policy: ",
		"configurations:\n  a:\n    shares:\n      - kind: x":      "line 4: configurations[a].shares[0].kind: ",
		"configurations:\n  a: {}\n  default: {}":                  "line 3: configurations[default]: ",
		"configurations:\n  a b: {}":                               "line 2: configurations[a b]: ",
		"configurations:\n  a:\n    nodeSelectors: {}":             `line 3: configurations.a.nodeSelectors: unknown field "nodeSelectors"`,
		"configurations:\n  a:\n    xidRules: {\"1\": x}\n  b: {}": "line 3: configurations[a].xidRules[1]: ",
		"configurations:\n  a.b:\n    mig:\n      policy: x":       "line 4: configurations[a.b].mig.policy",
	} {
		if _, err := Parse([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want %q", text, err, want)
		}
	}
}
