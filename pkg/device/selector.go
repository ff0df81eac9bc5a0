package device

import (
	"errors"
	"fmt"
	"path"
	"strconv"
	"strings"
)

// selector picks GPUs: by PCI address, UUID or product name, in which * stands for anything.
type selector string

// parseSelector is an error without a word of what the selector is for: the caller knows that.
func parseSelector(s string) (selector, error) {
	if address, err := ParsePCIAddress(s); err == nil {
		s = string(address)
	}
	s = strings.ToLower(s)
	if _, err := path.Match(s, ""); err != nil || s == "" {
		return "", fmt.Errorf("%q is no selector: want a PCI address, a UUID or a product name, with * for anything", s)
	}
	return selector(s), nil
}

func (s selector) fits(g GPU) bool {
	for _, name := range []string{string(g.PCIAddress), g.UUID, g.ProductName} {
		// A product name may have a slash, at which Match would stop.
		flat := strings.NewReplacer("/", "-").Replace
		if fits, _ := path.Match(flat(string(s)), flat(strings.ToLower(name))); fits {
			return true
		}
	}
	return false
}

// parseRules reads rules of the form [SELECTOR=]KIND, separated by commas outside parentheses.
// parse gets "*" for a selector that is left out; of says in errors what the rules are.
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
			err = errors.New("its parentheses do not match: want each that opens to close before the next rule")
		}
		if err != nil {
			return nil, fmt.Errorf("%s %q: %w", of, rule, err)
		}
		rules = append(rules, r)
	}
	return rules, nil
}

// splitRules leaves lists in parentheses together. A parenthesis that nothing closes takes all that
// follows.
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

// parseIndex reads "#0": the place of a GPU among those of its node, by PCI address.
func parseIndex(s string) (index int, is bool, err error) {
	digits, is := strings.CutPrefix(s, "#")
	if !is {
		return 0, false, nil
	}
	n, err := strconv.ParseUint(digits, 10, 16)
	if err != nil {
		return 0, true, fmt.Errorf("%q is no index: want # and a number from 0, as in #0", s)
	}
	return int(n), true, nil
}
