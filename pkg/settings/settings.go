package settings

import (
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
)

// Document is the content of a settings file. What its values leave out has the default: policy
// static, no shares, and the built-in effects and meanings of XIDs.
type Document struct {
	Values `yaml:",inline"`
	// Configurations has other values for some nodes, by name.
	Configurations map[string]Configuration `yaml:"configurations,omitempty"`
	// DevicePluginLabel says that the label of NVIDIA's device plugin also chooses a configuration.
	DevicePluginLabel bool `yaml:"devicePluginLabel,omitempty"`
}

// Configuration has values for the nodes that choose it. What they leave out is as in the Document.
type Configuration struct {
	Values `yaml:",inline"`
	// NodeSelector are labels. A Node with all of them has this configuration, unless a label names
	// another one. Empty selects no Node.
	NodeSelector map[string]string `yaml:"nodeSelector,omitempty"`
}

// Values are the settings of a node as an admin writes them.
type Values struct {
	MIG device.MIGSettings `yaml:"mig,omitempty"`
	// Passthrough says which GPUs are offered to virtual machines.
	Passthrough device.PassthroughSettings `yaml:"passthrough,omitempty"`
	Shares      []device.ShareRule         `yaml:"shares,omitempty"`
	Health      Health                     `yaml:"health,omitempty"`
	// XIDRules has the weights of XIDs where the built-in table should not apply.
	XIDRules map[string]health.Weight `yaml:"xidRules,omitempty"`
}

// Health is the setting "health".
type Health struct {
	// Effects has how the state of a device affects scheduling.
	Effects map[string]health.Effect `yaml:"effects,omitempty"`
}

// Settings are the settings of one node, as the plugin uses them.
type Settings struct {
	Policies device.Policies
	Shares   device.ShareRules
	Effects  health.Effects
	XIDRules health.Rules
}

// Compile returns the settings of the configuration with this name in the form that the plugin
// uses. An error names each invalid field.
func (d Document) Compile(name string) (Settings, error) {
	s, errs := d.Of(name).compile(nil)
	return s, errs.ToAggregate()
}

// Passes reports whether GPUs of any node are offered to virtual machines. Only then the plugin
// looks for such GPUs, and may write to sysfs. A Node's annotation has no effect otherwise.
func (d Document) Passes() bool {
	return d.Passthrough.Any() || slices.ContainsFunc(slices.Collect(maps.Values(d.Configurations)),
		func(c Configuration) bool { return c.Passthrough.Any() })
}

// Of returns the values of the configuration with this name.
func (d Document) Of(name string) Values { return d.Configurations[name].over(d.Values) }

// validate returns an error for each invalid field of the document.
func (d Document) validate() field.ErrorList {
	_, all := d.compile(nil)
	at := field.NewPath("configurations")
	for _, name := range slices.Sorted(maps.Keys(d.Configurations)) {
		if name == "" || name == Default || len(validation.IsValidLabelValue(name)) > 0 {
			all = append(all, field.Invalid(at.Key(name), name, "want a name that is a valid value of a label, and not default"))
		}
		_, errs := d.Configurations[name].compile(at.Key(name))
		all = append(all, errs...)
	}
	return all
}

// over returns the values of v, and those of base where v has none. The effects and xidRules of
// both are merged. The others are of one of them as a whole, because rules of a list belong
// together.
func (v Values) over(base Values) Values {
	if reflect.ValueOf(v.MIG).IsZero() {
		v.MIG = base.MIG
	}
	if reflect.ValueOf(v.Passthrough).IsZero() {
		v.Passthrough = base.Passthrough
	}
	if v.Shares == nil {
		v.Shares = base.Shares
	}
	v.Health.Effects = merge(base.Health.Effects, v.Health.Effects)
	v.XIDRules = merge(base.XIDRules, v.XIDRules)
	return v
}

func merge[V any](base, over map[string]V) map[string]V {
	all := map[string]V{}
	maps.Copy(all, base)
	maps.Copy(all, over)
	return all
}

func (v Values) compile(at *field.Path) (s Settings, all field.ErrorList) {
	var errs field.ErrorList
	s.Policies, errs = v.MIG.Policies(at.Child("mig"))
	all = append(all, errs...)
	passthrough, errs := v.Passthrough.Policies(at.Child("passthrough"))
	s.Policies = s.Policies.And(passthrough)
	all = append(all, errs...)
	s.Shares, errs = device.NewShareRules(v.Shares, at.Child("shares"))
	all = append(all, errs...)
	s.Effects, errs = health.NewEffects(v.Health.Effects, at.Child("health", "effects"))
	all = append(all, errs...)
	s.XIDRules, errs = health.NewRules(v.XIDRules, at.Child("xidRules"))
	return s, append(all, errs...)
}

// ReadFile reads the document in the file at path.
func ReadFile(path string) (Document, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return Document{}, fmt.Errorf("read the settings: %w", err)
	}
	d, err := Parse(raw)
	if err != nil {
		return Document{}, fmt.Errorf("%s: %w", path, err)
	}
	return d, nil
}

// Parse reads a document in YAML or JSON.
func Parse(raw []byte) (Document, error) {
	var d Document
	err := decode(raw, &d, func() field.ErrorList { return d.validate() })
	return d, err
}

// ParsePassthrough reads in text which GPUs are offered to virtual machines: true or false, which
// then applies to all GPUs, or the setting "passthrough" in YAML or JSON.
func ParsePassthrough(text string) (p device.Policies, err error) {
	var s device.PassthroughSettings
	if on, err := strconv.ParseBool(strings.TrimSpace(text)); err == nil {
		s.Enabled = &on
		p, _ = s.Policies(nil)
		return p, nil
	}
	err = decode([]byte(text), &s, func() (errs field.ErrorList) { p, errs = s.Policies(nil); return errs })
	return p, err
}

// ParseMIG reads the MIG policies in text: the name of a policy, which then applies to all GPUs, or
// the setting "mig" in YAML or JSON.
func ParseMIG(text string) (p device.Policies, err error) {
	m := device.MIGSettings{Policy: device.PolicyMode(strings.TrimSpace(text))}
	if !strings.ContainsAny(text, ":{") {
		p, errs := m.Policies(nil)
		if m.Policy == "" {
			errs = nil
		}
		return p, errs.ToAggregate()
	}
	m.Policy = ""
	err = decode([]byte(text), &m, func() (errs field.ErrorList) { p, errs = m.Policies(nil); return errs })
	return p, err
}
