package device

import "fmt"

// Policy says what may be done about the partitions of a GPU.
type Policy string

const (
	// PolicyDynamic offers every shape and cuts what claims ask for. A GPU with instances that an admin made is offered as it is cut.
	PolicyDynamic Policy = "dynamic"
	// PolicyStatic offers a GPU as it is cut now, and changes nothing about it.
	PolicyStatic Policy = "static"
	// PolicyOff offers a GPU as a whole only.
	PolicyOff Policy = "off"
	// PolicyAdopt is dynamic, and removes idle instances that an admin made.
	PolicyAdopt Policy = "adopt"
)

// Policies says for each GPU what may be done about its partitions. The zero value is [PolicyDynamic] for all.
type Policies struct{ rules []policyRule }

type policyRule struct {
	selector selector
	policy   Policy
}

// ParsePolicies reads rules of the form [SELECTOR=]POLICY, separated by commas. A selector is a PCI address, a UUID or a product name, in which * stands
// for anything; none stands for every GPU. Of the rules that fit a GPU the last one holds.
func ParsePolicies(s string) (Policies, error) {
	rules, err := parseRules("MIG policy", s, func(gpus, name string) (policyRule, error) {
		rule := policyRule{policy: Policy(name)}
		switch rule.policy {
		case PolicyDynamic, PolicyStatic, PolicyOff, PolicyAdopt:
		default:
			return rule, fmt.Errorf("want %s, %s, %s or %s, or SELECTOR=POLICY", PolicyDynamic, PolicyStatic, PolicyOff, PolicyAdopt)
		}
		var err error
		rule.selector, err = parseSelector(gpus)
		return rule, err
	})
	return Policies{rules}, err
}

// And adds rules that go before the ones of p.
func (p Policies) And(more Policies) Policies {
	return Policies{append(append([]policyRule(nil), p.rules...), more.rules...)}
}

// For is the policy of a GPU.
func (p Policies) For(g GPU) Policy {
	for i := len(p.rules) - 1; i >= 0; i-- {
		if p.rules[i].selector.fits(g) {
			return p.rules[i].policy
		}
	}
	return PolicyDynamic
}
