package settings

import (
	"fmt"
	"os"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
)

// Document is the content of a settings file. What it leaves out has the default: policy static, no
// shares, and the built-in effects and meanings of XIDs.
type Document struct {
	MIG    device.MIGSettings `yaml:"mig,omitempty"`
	Shares []device.ShareRule `yaml:"shares,omitempty"`
	Health Health             `yaml:"health,omitempty"`
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

// Compile returns the settings in the form that the plugin uses. An error names each invalid field.
func (d Document) Compile() (Settings, error) {
	s, errs := d.compile()
	return s, errs.ToAggregate()
}

func (d Document) compile() (s Settings, all field.ErrorList) {
	var errs field.ErrorList
	s.Policies, errs = d.MIG.Policies(field.NewPath("mig"))
	all = append(all, errs...)
	s.Shares, errs = device.NewShareRules(d.Shares, field.NewPath("shares"))
	all = append(all, errs...)
	s.Effects, errs = health.NewEffects(d.Health.Effects, field.NewPath("health", "effects"))
	all = append(all, errs...)
	s.XIDRules, errs = health.NewRules(d.XIDRules, field.NewPath("xidRules"))
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
	err := decode(raw, &d, func() field.ErrorList { _, errs := d.compile(); return errs })
	return d, err
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
