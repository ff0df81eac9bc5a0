package device

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// PolicyMode says what a policy lets happen to the partitions of a GPU.
type PolicyMode string

const (
	// PolicyStatic offers a GPU whole, or as an admin cut it, and changes nothing about it.
	PolicyStatic PolicyMode = "static"
	// PolicyDynamic offers every shape and cuts what claims ask for. A GPU with instances that an admin made is offered as it is cut.
	PolicyDynamic PolicyMode = "dynamic"
	// PolicyOff offers a GPU as a whole only.
	PolicyOff PolicyMode = "off"
	// PolicyAdopt is dynamic, and removes idle instances that an admin made.
	PolicyAdopt PolicyMode = "adopt"
)

// Policy says how a GPU is offered. What claims hold is kept whatever the policy says by then.
type Policy struct {
	// Mode is [PolicyStatic] where it is empty.
	Mode PolicyMode
	// Profiles are the names of those that a policy which cuts offers. None stands for all.
	Profiles []string
}

// String is the policy as an admin writes it.
func (p Policy) String() string {
	if len(p.Profiles) == 0 {
		return string(p.Mode)
	}
	return fmt.Sprintf("%s(%s)", p.Mode, strings.Join(p.Profiles, ","))
}

// Cuts says whether partitions are made for claims.
func (p Policy) Cuts() bool { return p.Mode == PolicyDynamic || p.Mode == PolicyAdopt }

// On is the policy that holds for a GPU. It is static where the policy names a profile that the
// GPU's model lacks, and problem then says which profiles there are.
func (p Policy) On(g GPU) (_ Policy, problem string) {
	if g.MIG == nil || len(g.MIG.Profiles) == 0 {
		return p, ""
	}
	var names, unknown []string
	for _, profile := range g.MIG.Profiles { // in the order of their IDs
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
	return Policy{Mode: PolicyStatic}, fmt.Sprintf("it has no profile %s, which the policy %s names, so the policy static holds; its profiles are %s",
		strings.Join(unknown, ", "), p, strings.Join(names, ", "))
}

// Policies says for each GPU how it is offered. The zero value is [PolicyStatic] for all.
type Policies struct{ rules []policyRule }

type policyRule struct {
	selector selector
	policy   Policy
}

// ParsePolicies reads rules of the form [SELECTOR=]MODE[(PROFILE,...)], separated by commas. A
// selector is a PCI address, a UUID or a product name, in which * stands for anything; none stands
// for every GPU. Of the rules that fit a GPU the last one holds.
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

// profileForm is how NVML names profiles of GPU instances: 1g.10gb, 1g.24gb-me, 2g.48gb+me.all.
var profileForm = regexp.MustCompile(`^[0-9]+g\.[0-9]+gb([+-][a-z0-9]+(\.[a-z0-9]+)*)*$`)

func parseProfiles(mode PolicyMode, list string) ([]string, error) {
	if strings.TrimSpace(list) == "" {
		return nil, fmt.Errorf("the list of profiles is empty: want %s for every profile, or %s(1g.10gb,3g.40gb) for some", mode, mode)
	}
	var profiles []string
	for name := range strings.SplitSeq(list, ",") {
		name = strings.TrimSpace(name)
		if !profileForm.MatchString(name) {
			return nil, fmt.Errorf("%q is no profile: want one as in 1g.10gb or 1g.10gb+me", name)
		}
		if slices.Contains(profiles, name) {
			return nil, fmt.Errorf("profile %s stands there twice: want it once", name)
		}
		profiles = append(profiles, name)
	}
	return profiles, nil
}

// And adds rules that go before the ones of p.
func (p Policies) And(more Policies) Policies {
	return Policies{append(append([]policyRule(nil), p.rules...), more.rules...)}
}

// For is the policy that the rules have for a GPU. [Policy.On] says what of it holds.
func (p Policies) For(g GPU) Policy {
	for i := len(p.rules) - 1; i >= 0; i-- {
		if p.rules[i].selector.fits(g) {
			return p.rules[i].policy
		}
	}
	return Policy{Mode: PolicyStatic}
}
