package device

import (
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
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
}

// String returns the policy in the form that ParsePolicies reads.
func (p Policy) String() string {
	if len(p.Profiles) == 0 {
		return string(p.Mode)
	}
	return fmt.Sprintf("%s(%s)", p.Mode, strings.Join(p.Profiles, ","))
}

// CreatesInstances reports whether the plugin creates partitions for claims.
func (p Policy) CreatesInstances() bool { return p.Mode == PolicyDynamic || p.Mode == PolicyAdopt }

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
	return Policy{Mode: PolicyStatic}, fmt.Sprintf(
		"the GPU has no profile %s, which policy %s names, so policy static applies; its profiles are %s",
		strings.Join(unknown, ", "), p, strings.Join(names, ", "))
}

// Policies maps each GPU to its policy. The zero value maps all GPUs to [PolicyStatic].
type Policies struct{ rules []policyRule }

type policyRule struct {
	selector selector
	policy   Policy
}

// ParsePolicies parses rules of the form [SELECTOR=]MODE[(PROFILE,...)], separated by commas. A
// selector is a PCI address, a UUID or a product name, with * as a wildcard. Without a selector the
// rule applies to every GPU. The last rule that matches a GPU applies.
func ParsePolicies(s string) (Policies, error) {
	rules, err := parseRules("MIG policy", s, func(gpus, policy string) (policyRule, error) {
		var rule policyRule
		var err error
		if rule.policy, err = parsePolicy(policy); err != nil {
			return rule, err
		}
		rule.selector, err = parseSelector(gpus)
		return rule, err
	})
	return Policies{rules}, err
}

func parsePolicy(s string) (Policy, error) {
	mode, list, listed := strings.Cut(s, "(")
	p := Policy{Mode: PolicyMode(strings.TrimSpace(mode))}
	switch p.Mode {
	case PolicyDynamic, PolicyAdopt:
	case PolicyStatic, PolicyOff:
		if listed {
			return p, fmt.Errorf("%s takes no profiles: want %s alone, or %s(PROFILE,...)", p.Mode, p.Mode, PolicyDynamic)
		}
	default:
		return p, fmt.Errorf("want %s, %s, %s or %s, %s(PROFILE,...), or SELECTOR= and one of these",
			PolicyStatic, PolicyDynamic, PolicyAdopt, PolicyOff, PolicyDynamic)
	}
	if !listed {
		return p, nil
	}
	list, closed := strings.CutSuffix(list, ")")
	if !closed {
		return p, fmt.Errorf("want a list of profiles that ends with a parenthesis, as in %s(1g.10gb,3g.40gb)", p.Mode)
	}
	var err error
	p.Profiles, err = parseProfiles(p.Mode, list)
	return p, err
}

// profileForm matches names of GPU instance profiles as NVML writes them: 1g.10gb, 1g.24gb-me,
// 2g.48gb+me.all.
var profileForm = regexp.MustCompile(`^[0-9]+g\.[0-9]+gb([+-][a-z0-9]+(\.[a-z0-9]+)*)*$`)

func parseProfiles(mode PolicyMode, list string) ([]string, error) {
	if strings.TrimSpace(list) == "" {
		return nil, fmt.Errorf("the list of profiles is empty: want %s for every profile, or %s(1g.10gb,3g.40gb) for some", mode, mode)
	}
	var profiles []string
	for name := range strings.SplitSeq(list, ",") {
		name = strings.TrimSpace(name)
		if !profileForm.MatchString(name) {
			return nil, fmt.Errorf("%q is not a profile: want one like 1g.10gb or 1g.10gb+me", name)
		}
		if slices.Contains(profiles, name) {
			return nil, fmt.Errorf("profile %s is listed twice: want it once", name)
		}
		profiles = append(profiles, name)
	}
	return profiles, nil
}

// And returns the rules of p and of more. The rules of more take precedence.
func (p Policies) And(more Policies) Policies {
	return Policies{append(append([]policyRule(nil), p.rules...), more.rules...)}
}

// For returns the policy that the rules set for a GPU. [Policy.On] returns the policy that then
// takes effect.
func (p Policies) For(g GPU) Policy {
	for i := len(p.rules) - 1; i >= 0; i-- {
		if p.rules[i].selector.matches(g) {
			return p.rules[i].policy
		}
	}
	return Policy{Mode: PolicyStatic}
}

// selector selects GPUs by PCI address, UUID or product name, in which * is a wildcard.
type selector string

// parseSelector parses a selector. Its errors do not say which setting the selector belongs to, so
// the caller must add that.
func parseSelector(s string) (selector, error) {
	if address, err := ParsePCIAddress(s); err == nil {
		s = string(address)
	}
	s = strings.ToLower(s)
	if _, err := path.Match(s, ""); err != nil || s == "" {
		return "", fmt.Errorf("%q is not a selector: want a PCI address, a UUID or a product name, with * as a wildcard", s)
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

// parseRules splits text into rules of the form [SELECTOR=]KIND at the commas outside parentheses,
// and calls parse for each rule, with the selector "*" if it has none. The name of the setting,
// which errors begin with, is the parameter "of".
func parseRules[R any](of, text string, parse func(selector, kind string) (R, error)) ([]R, error) {
	var rules []R
	for _, rule := range splitRules(text) {
		rule = strings.TrimSpace(rule)
		if rule == "" {
			continue
		}
		what, kind := "*", rule
		if i := strings.LastIndex(rule, "="); i >= 0 {
			what, kind = strings.TrimSpace(rule[:i]), strings.TrimSpace(rule[i+1:])
		}
		r, err := parse(what, kind)
		if err == nil && strings.Count(rule, "(") != strings.Count(rule, ")") {
			err = errors.New("the parentheses do not match: close each one before the next rule")
		}
		if err != nil {
			return nil, fmt.Errorf("%s %q: %w", of, rule, err)
		}
		rules = append(rules, r)
	}
	return rules, nil
}

// splitRules splits text at commas outside parentheses. A parenthesis that is never closed extends
// to the end.
func splitRules(text string) []string {
	depth := 0
	var rules []string
	start := 0
	for i, c := range text {
		switch {
		case c == '(':
			depth++
		case c == ')':
			depth = max(0, depth-1)
		case c == ',' && depth == 0:
			rules = append(rules, text[start:i])
			start = i + 1
		}
	}
	return append(rules, text[start:])
}
