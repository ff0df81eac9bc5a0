package device

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

// PolicyMode says what the plugin may do with the partitions of a GPU.
type PolicyMode string

const (
	// PolicyStatic offers a GPU whole, or as an admin partitioned it. The plugin changes nothing.
	PolicyStatic PolicyMode = "static"
	// PolicyDynamic offers a GPU whole and in every partition, and the plugin creates the partitions
	// that claims ask for. A GPU with MIG instances of an admin is offered as the admin partitioned
	// it.
	PolicyDynamic PolicyMode = "dynamic"
	// PolicyOff offers whole GPUs only.
	PolicyOff PolicyMode = "off"
	// PolicyAdopt is like PolicyDynamic, but the plugin also removes idle MIG instances that an admin
	// created.
	PolicyAdopt PolicyMode = "adopt"
)

// Policy says how a GPU is offered. A change of the policy never takes allocated devices from
// claims.
type Policy struct {
	// Mode is the policy's mode. An empty Mode means [PolicyStatic].
	Mode PolicyMode
	// Profiles has the names of the profiles that are offered, if Mode creates MIG instances. If it is
	// empty, all profiles are offered.
	Profiles []string
	// Passthrough offers the GPU to virtual machines, too.
	Passthrough bool
}

// String returns the policy for messages: dynamic(1g.10gb,3g.40gb).
func (p Policy) String() string {
	if len(p.Profiles) == 0 {
		return string(p.Mode)
	}
	return fmt.Sprintf("%s(%s)", p.Mode, strings.Join(p.Profiles, ","))
}

// CreatesInstances reports whether the plugin creates partitions for claims.
func (p Policy) CreatesInstances() bool { return p.Mode == PolicyDynamic || p.Mode == PolicyAdopt }

// OffersUnlisted reports whether virtual machines can get a GPU that NVML does not list: an admin
// has bound it to VFIO, or no kernel driver has it on a node without NVIDIA's driver.
func (p Policy) OffersUnlisted(g GPU, driverMissing bool) bool {
	return p.Passthrough && g.Passthrough != nil && (g.Passthrough.BoundByAdmin || driverMissing && !g.Passthrough.HasDriver)
}

// On returns the policy that takes effect on the GPU g. If p names a profile that g lacks, the mode
// is static, and problem says so and lists g's profiles.
func (p Policy) On(g GPU) (_ Policy, problem string) {
	if g.MIG == nil || len(g.MIG.Profiles) == 0 {
		return p, ""
	}
	var names, unknown []string
	for _, profile := range g.MIG.Profiles { // sorted by ID
		if !slices.Contains(names, profile.Name) {
			names = append(names, profile.Name)
		}
	}
	for _, name := range p.Profiles {
		if !slices.Contains(names, name) {
			unknown = append(unknown, name)
		}
	}
	if len(unknown) == 0 {
		return p, ""
	}
	return Policy{Mode: PolicyStatic, Passthrough: p.Passthrough}, fmt.Sprintf(
		"the GPU has no profile %s, which policy %s names, so policy static applies; its profiles are %s",
		strings.Join(unknown, ", "), p, strings.Join(names, ", "))
}

// Policies maps each GPU to its policy. The zero value maps all GPUs to [PolicyStatic], without
// passthrough.
type Policies struct{ rules []policyRule }

// policyRule sets a part of the policy of the GPUs that it selects.
type policyRule struct {
	selector selector
	set      func(*Policy)
}

// MIGSettings is the setting "mig": how GPUs with MIG are offered.
type MIGSettings struct {
	// Policy and Profiles apply to GPUs that no rule selects.
	Policy   PolicyMode `yaml:"policy,omitempty"`
	Profiles []string   `yaml:"profiles,omitempty"`
	// Rules are for some GPUs. The last rule that selects a GPU applies.
	Rules []MIGRule `yaml:"rules,omitempty"`
}

// MIGRule is the policy of the GPUs that GPUs selects: a PCI address, a UUID or a product name,
// with * as a wildcard. If GPUs is empty, the rule applies to every GPU.
type MIGRule struct {
	GPUs     string     `yaml:"gpus,omitempty"`
	Policy   PolicyMode `yaml:"policy"`
	Profiles []string   `yaml:"profiles,omitempty"`
}

// Policies returns the policies that the settings set, or the invalid fields below at.
func (s MIGSettings) Policies(at *field.Path) (Policies, field.ErrorList) {
	var p Policies
	var errs field.ErrorList
	add := func(at *field.Path, r MIGRule) {
		selector, err := parseSelector(at.Child("gpus"), r.GPUs)
		errs = append(append(errs, err...), r.validate(at)...)
		p.rules = append(p.rules, policyRule{selector, func(p *Policy) { p.Mode, p.Profiles = r.Policy, r.Profiles }})
	}
	if s.Policy != "" || len(s.Profiles) > 0 {
		add(at, MIGRule{Policy: s.Policy, Profiles: s.Profiles})
	}
	for i, r := range s.Rules {
		add(at.Child("rules").Index(i), r)
	}
	if len(errs) > 0 {
		return Policies{}, errs
	}
	return p, nil
}

func (r MIGRule) validate(at *field.Path) field.ErrorList {
	modes := []PolicyMode{PolicyStatic, PolicyDynamic, PolicyAdopt, PolicyOff}
	if !slices.Contains(modes, r.Policy) {
		return field.ErrorList{field.Invalid(at.Child("policy"), r.Policy, `want static, dynamic, adopt or "off" (in quotes)`)}
	}
	if creates := (Policy{Mode: r.Policy}).CreatesInstances(); !creates && len(r.Profiles) > 0 {
		return field.ErrorList{field.Invalid(at.Child("profiles"), r.Profiles,
			fmt.Sprintf("policy %s takes no profiles: leave them out, or use policy %s or %s", r.Policy, PolicyDynamic, PolicyAdopt))}
	}
	var errs field.ErrorList
	for i, name := range r.Profiles {
		if !profileForm.MatchString(name) {
			errs = append(errs, field.Invalid(at.Child("profiles").Index(i), name, "is not a profile: want one like 1g.10gb or 1g.10gb+me"))
		}
		if slices.Contains(r.Profiles[:i], name) {
			errs = append(errs, field.Duplicate(at.Child("profiles").Index(i), name))
		}
	}
	return errs
}

// profileForm matches names of GPU instance profiles as NVML writes them: 1g.10gb, 1g.24gb-me,
// 2g.48gb+me.all.
var profileForm = regexp.MustCompile(`^[0-9]+g\.[0-9]+gb([+-][a-z0-9]+(\.[a-z0-9]+)*)*$`)

// And returns the rules of p and of more. The rules of more take precedence.
func (p Policies) And(more Policies) Policies {
	return Policies{slices.Concat(p.rules, more.rules)}
}

// For returns the policy that the rules set for a GPU. [Policy.On] returns the policy that then
// takes effect.
func (p Policies) For(g GPU) Policy {
	policy := Policy{Mode: PolicyStatic}
	for _, r := range p.rules {
		if r.selector.matches(g) {
			r.set(&policy)
		}
	}
	return policy
}

// selector selects GPUs by PCI address, UUID or product name, in which * is a wildcard.
type selector string

// parseSelector parses a selector, which is every GPU if it is empty.
func parseSelector(at *field.Path, s string) (selector, field.ErrorList) {
	if s == "" {
		return "*", nil
	}
	if address, err := ParsePCIAddress(s); err == nil {
		s = string(address)
	}
	s = strings.ToLower(s)
	if _, err := path.Match(s, ""); err != nil {
		return "", field.ErrorList{field.Invalid(at, s, "is not a selector: want a PCI address, a UUID or a product name, with * as a wildcard")}
	}
	return selector(s), nil
}

func (s selector) matches(g GPU) bool {
	for _, name := range []string{string(g.PCIAddress), g.UUID, g.ProductName} {
		// A product name may contain a slash, which path.Match would treat as a separator.
		flat := strings.NewReplacer("/", "-").Replace
		if fits, _ := path.Match(flat(string(s)), flat(strings.ToLower(name))); fits {
			return true
		}
	}
	return false
}

// PassthroughSettings is the setting "passthrough": which GPUs are offered to virtual machines.
type PassthroughSettings struct {
	// Enabled applies to GPUs that no rule selects. Nil means false.
	Enabled *bool `yaml:"enabled,omitempty"`
	// Rules are for some GPUs. The last rule that selects a GPU applies.
	Rules []PassthroughRule `yaml:"rules,omitempty"`
}

// PassthroughRule says whether the GPUs that GPUs selects are offered to virtual machines. A
// selector is as in a [MIGRule].
type PassthroughRule struct {
	GPUs    string `yaml:"gpus,omitempty"`
	Enabled *bool  `yaml:"enabled"`
}

// Any reports whether the settings offer any GPU to virtual machines.
func (s PassthroughSettings) Any() bool {
	return ptr.Deref(s.Enabled, false) ||
		slices.ContainsFunc(s.Rules, func(r PassthroughRule) bool { return ptr.Deref(r.Enabled, false) })
}

// Policies returns policies that say only which GPUs are offered to virtual machines, or the
// invalid fields below at.
func (s PassthroughSettings) Policies(at *field.Path) (Policies, field.ErrorList) {
	var p Policies
	var all field.ErrorList
	add := func(selector selector, enabled bool) {
		p.rules = append(p.rules, policyRule{selector, func(p *Policy) { p.Passthrough = enabled }})
	}
	if s.Enabled != nil {
		add("*", *s.Enabled)
	}
	for i, r := range s.Rules {
		at := at.Child("rules").Index(i)
		selector, errs := parseSelector(at.Child("gpus"), r.GPUs)
		all = append(all, errs...)
		if r.Enabled == nil {
			all = append(all, field.Required(at.Child("enabled"), "want true or false"))
		}
		add(selector, ptr.Deref(r.Enabled, false))
	}
	if len(all) > 0 {
		return Policies{}, all
	}
	return p, nil
}
