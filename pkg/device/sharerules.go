package device

import (
	"fmt"
	"path"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Share says how a device is offered to several claims at once. The zero value means that only one
// claim at a time can have the device.
type Share struct {
	// Fractions is true if each claim gets a limited part of the memory and of the compute units. MPS
	// enforces these limits.
	Fractions bool
	// Count is the number of claims that may use the device at once by time slicing, without limits on
	// memory. It is 0 if Fractions is true.
	Count int
	// withdrawn is true if the device is no longer offered in these shares, but claims still have
	// some. No further share can be allocated.
	withdrawn bool
}

// Offered reports whether the device is published in shares, even if only for claims that still
// have withdrawn shares.
func (s Share) Offered() bool { return s.Fractions || s.Count > 0 || s.withdrawn }

// One share would be the same as the whole device, so two is the minimum. The maximum is higher
// than any card can serve, to reject nonsensical numbers.
const minShares, maxShares = 2, 1000

// ShareRules are the admin's rules for which devices several claims may use at once, and how. With
// the zero value, each device is for one claim.
type ShareRules struct{ rules []shareRule }

type shareRule struct {
	selector selector
	// index is the index of the GPU that the rule selects. It is -1 if the rule uses selector instead.
	index int
	// profile is a pattern for the names of profiles if the rule is about partitions. It is empty if
	// the rule is about whole GPUs.
	profile string
	share   Share
}

// ParseShares parses rules of the form [SELECTOR[/PROFILE]=]KIND, separated by commas. A kind is
// off, fractions, or shares:N for N plain shares. A selector is a PCI address, a UUID, a product
// name with * as a wildcard, or #N for the GPU with index N by PCI address, from 0. Without a
// selector the rule applies to every GPU. With a profile, which may contain *, the rule applies to
// partitions of that profile, otherwise to whole GPUs. The last rule that matches a device applies.
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
	// The text after a slash is a MIG profile. So a selector for a product name with a slash must have
	// * in its place. A profile name of invalid form is an error, so that an admin notices a typing
	// error.
	if gpus, profile, is := strings.Cut(what, "/"); is {
		what, rule.profile = strings.TrimSpace(gpus), strings.ToLower(strings.TrimSpace(profile))
		if _, err := path.Match(rule.profile, ""); err != nil || !strings.ContainsAny(rule.profile[:min(1, len(rule.profile))], "0123456789*") {
			return rule, fmt.Errorf("%q is not a profile: want one like 1g.10gb, with * as a wildcard", rule.profile)
		}
	}
	if digits, is := strings.CutPrefix(what, "#"); is {
		n, err := strconv.ParseUint(digits, 10, 16)
		if err != nil {
			return rule, fmt.Errorf("%q is not an index: want # and a number from 0, as in #0", what)
		}
		rule.index = int(n)
		return rule, nil
	}
	rule.selector, err = parseSelector(what)
	return rule, err
}

func parseShare(kind string) (Share, error) {
	count, plain := strings.CutPrefix(kind, "shares:")
	switch {
	case plain:
		n, err := strconv.Atoi(count)
		if err != nil || n < minShares || n > maxShares {
			return Share{}, fmt.Errorf("%q is not a valid number of shares: want %d to %d, as in shares:4", count, minShares, maxShares)
		}
		return Share{Count: n}, nil
	case kind == "fractions":
		return Share{Fractions: true}, nil
	case kind == "off":
		return Share{}, nil
	default:
		return Share{}, fmt.Errorf("%q is not a kind of shares: want off, fractions or shares:N, or [SELECTOR[/PROFILE]=] and one of these", kind)
	}
}

// Any reports whether some rule offers a device in shares.
func (r ShareRules) Any() bool {
	for _, rule := range r.rules {
		if rule.share.Offered() {
			return true
		}
	}
	return false
}

// For returns how the whole GPU g is shared, or, if profile is not empty, how g's partitions of
// that profile are shared. index is the index of g on the node, by PCI address.
func (r ShareRules) For(g GPU, profile string, index int) Share {
	for i := len(r.rules) - 1; i >= 0; i-- {
		rule := r.rules[i]
		if (rule.profile == "") != (profile == "") {
			continue
		}
		if fits, _ := path.Match(rule.profile, strings.ToLower(profile)); !fits {
			continue
		}
		if rule.index == index || rule.index < 0 && rule.selector.matches(g) {
			return rule.share
		}
	}
	return Share{}
}

// SharingUnsupportedReason says which feature the cluster lacks for shared devices, or returns "".
// Shares need counters, because they overlap with their device, and consumable capacities, because
// otherwise the first share takes all of the device. If a reason is returned, [Offer] must get no
// share rules.
func SharingUnsupportedReason(counters, capacities bool) string {
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
	return "the cluster does not support " + strings.Join(lacking, " and ") + ", which shares need"
}

// Totals returns the capacities that all claims on the shared device n divide among them. It has no
// memory if the driver does not report it, no plain shares if no rule offers them, and nothing if
// the GPU g cannot have n. index is g's index on the node, by PCI address.
func (r ShareRules) Totals(g GPU, index int, n Name) map[string]resource.Quantity {
	totals := map[string]resource.Quantity{}
	of, profile, known := g.shareable(n)
	if !known {
		return totals
	}
	for _, share := range []Share{{Fractions: true}, {Count: r.For(g, profile, index).Count}} {
		for name, c := range (Shared{of, share}).capacities() {
			if !c.Value.IsZero() {
				totals[string(name)] = c.Value
			}
		}
	}
	return totals
}

// shareable returns the device that n names, or the unshared device if n names a share device.
// profile is the name of the partition's MIG profile, or "" for the whole GPU. known is false for a
// partition that the GPU neither has nor can have.
func (g GPU) shareable(n Name) (_ shareable, profile string, known bool) {
	if n.Partition == nil {
		return Whole{gpu: g}, "", true
	}
	p, known := g.partition(*n.Partition, counterSetOf(g))
	return p, p.profile, known
}

// Has reports whether n names the whole GPU, or a partition that the GPU has or can have, or a
// share device of these. The zero GPU has no devices.
func (g GPU) Has(n Name) bool {
	_, _, known := g.shareable(n)
	return known && n.GPU == g.WholeName()
}
