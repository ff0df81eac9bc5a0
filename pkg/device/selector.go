package device

import (
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
