package device

import (
	"errors"
	"fmt"
	"path"
	"strconv"
	"strings"
)

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

// parseIndex parses the index of a GPU on its node, by PCI address, such as "#0". The result named
// "is" tells whether s begins with "#". If not, s is no index, and err is nil.
func parseIndex(s string) (index int, is bool, err error) {
	digits, is := strings.CutPrefix(s, "#")
	if !is {
		return 0, false, nil
	}
	n, err := strconv.ParseUint(digits, 10, 16)
	if err != nil {
		return 0, true, fmt.Errorf("%q is not an index: want # and a number from 0, as in #0", s)
	}
	return int(n), true, nil
}
