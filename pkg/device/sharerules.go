package device

import (
	"fmt"
	"path"
	"strconv"
	"strings"
)

// Share says whether and how a device is offered to several claims at once. The zero value is a device that one claim holds alone.
type Share struct {
	// Fractions are by memory and percent of the compute units, and MPS keeps processes to them.
	Fractions bool
	// Count is how many claims may hold the device in turn, by time slices and without limits. It is 0 with Fractions.
	Count int
	// ending shares are those that claims hold of a device which is not offered so any more: nobody gets another one, and what is held goes on being counted.
	ending bool
}

// Offered says whether there are shares at all.
func (s Share) Offered() bool { return s.Fractions || s.Count > 0 || s.ending }

// Plain shares are 2 at least: one that cannot be shared is the device itself. No card serves as many as the most, which keeps numbers in bounds.
const fewestShares, mostShares = 2, 1000

// ShareRules says for each GPU and each profile whether it is offered in shares. The zero value offers none.
type ShareRules struct{ rules []shareRule }

type shareRule struct {
	selector selector
	// index is -1 where the selector says which GPUs are meant.
	index int
	// profile is empty for whole GPUs, else a pattern for the names of profiles.
	profile string
	share   Share
}

// ParseShares reads rules of the form [SELECTOR[/PROFILE]=]KIND, separated by commas. A kind is off, fractions, or shares:N for N plain shares. A selector is a
// PCI address, a UUID, a product name in which * stands for anything, or #N for the GPU at the Nth place of the node's by PCI address, from 0; none stands for
// every GPU. With a profile the rule is about partitions of that profile, in which * stands for anything, too, else about whole GPUs. Of the rules that fit a
// device the last one holds.
func ParseShares(s string) (ShareRules, error) {
	rules, err := parseRules("shares", s, parseShareRule)
	return ShareRules{rules}, err
}

func parseShareRule(what, kind string) (shareRule, error) {
	rule := shareRule{index: -1}
	var err error
	if rule.share, err = parseShare(kind); err != nil {
		return rule, err
	}
	// A product name with a slash is written with *: what comes after a slash is a profile, and a misspelt one is better said than never met.
	if gpus, profile, is := strings.Cut(what, "/"); is {
		what, rule.profile = strings.TrimSpace(gpus), strings.ToLower(strings.TrimSpace(profile))
		if _, err := path.Match(rule.profile, ""); err != nil || !strings.ContainsAny(rule.profile[:min(1, len(rule.profile))], "0123456789*") {
			return rule, fmt.Errorf("%q is no profile: want one as in 1g.10gb, with * for anything", rule.profile)
		}
	}
	index, is, err := parseIndex(what)
	if is || err != nil {
		rule.index = index
		return rule, err
	}
	rule.selector, err = parseSelector(what)
	return rule, err
}

func parseShare(kind string) (Share, error) {
	count, plain := strings.CutPrefix(kind, "shares:")
	switch {
	case plain:
		n, err := strconv.Atoi(count)
		if err != nil || n < fewestShares || n > mostShares {
			return Share{}, fmt.Errorf("%q is no number of shares: want %d to %d, as in shares:4", count, fewestShares, mostShares)
		}
		return Share{Count: n}, nil
	case kind == "fractions":
		return Share{Fractions: true}, nil
	case kind == "off":
		return Share{}, nil
	default:
		return Share{}, fmt.Errorf("%q is no kind of shares: want off, fractions or shares:N, or [SELECTOR[/PROFILE]=] and one of these", kind)
	}
}

// Any says whether some rule offers shares.
func (r ShareRules) Any() bool {
	for _, rule := range r.rules {
		if rule.share.Offered() {
			return true
		}
	}
	return false
}

// For is how the GPU is shared that stands at a place among the node's by PCI address: as a whole, or in its partitions of a profile.
func (r ShareRules) For(g GPU, profile string, index int) Share {
	for i := len(r.rules) - 1; i >= 0; i-- {
		rule := r.rules[i]
		if (rule.profile == "") != (profile == "") {
			continue
		}
		if fits, _ := path.Match(rule.profile, strings.ToLower(profile)); !fits {
			continue
		}
		if rule.index == index || rule.index < 0 && rule.selector.fits(g) {
			return rule.share
		}
	}
	return Share{}
}

// NotInFractions says of the GPUs which rules want to be offered in fractions, whole or in partitions, why they are not, by the GPU's name.
func NotInFractions(offerings []Offering) map[string]string {
	why := map[string]string{}
	for index, o := range byPlace(offerings) {
		for _, rule := range o.Shares.rules {
			if o.NoFractions != "" && rule.share.Fractions && (rule.index == index || rule.index < 0 && rule.selector.fits(o.GPU)) {
				why[o.WholeName()] = o.NoFractions
			}
		}
	}
	return why
}

// WhyNotShared says what a cluster lacks to share devices, for people to read. It is empty if nothing is lacking: then alone may rules be given to [Offer]. A
// device with shares overlaps with them, and without capacities to count, the first share would be all of it.
func WhyNotShared(counters, capacities bool) string {
	var lacking []string
	if !counters {
		lacking = append(lacking, "shared counters (feature gate DRAPartitionableDevices, from Kubernetes 1.35)")
	}
	if !capacities {
		lacking = append(lacking, "consumable capacities (feature gate DRAConsumableCapacity)")
	}
	if len(lacking) == 0 {
		return ""
	}
	return "the cluster keeps no " + strings.Join(lacking, " and no ") + ", without which shares would be given away more than once"
}
