package device

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
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

// ShareKind says how the devices of a ShareRule are shared.
type ShareKind string

const (
	// KindOff offers no shares.
	KindOff ShareKind = "off"
	// KindFractions offers limited parts of the memory and of the compute units.
	KindFractions ShareKind = "fractions"
	// KindShares offers plain shares, without limits.
	KindShares ShareKind = "shares"
)

// ShareRule is a rule of the setting "shares". The last rule that selects a device applies.
type ShareRule struct {
	// GPUs is a PCI address, a UUID or a product name with * as a wildcard. Index selects a GPU by its
	// place on the node instead, by PCI address, from 0. Without both, the rule is for every GPU.
	GPUs  string `yaml:"gpus,omitempty"`
	Index *int   `yaml:"index,omitempty"`
	// Profile, which may contain *, is the profile of the partitions that the rule is for. If it is
	// empty, the rule is for whole GPUs.
	Profile string    `yaml:"profile,omitempty"`
	Kind    ShareKind `yaml:"kind"`
	// Count is the number of plain shares.
	Count int `yaml:"count,omitempty"`
}

// NewShareRules returns the rules of the setting "shares", or the invalid fields below at.
func NewShareRules(rules []ShareRule, at *field.Path) (ShareRules, field.ErrorList) {
	var all ShareRules
	var errs field.ErrorList
	for i, r := range rules {
		rule, err := r.parse(at.Index(i))
		all.rules, errs = append(all.rules, rule), append(errs, err...)
	}
	if len(errs) > 0 {
		return ShareRules{}, errs
	}
	return all, nil
}

func (r ShareRule) parse(at *field.Path) (shareRule, field.ErrorList) {
	selector, errs := parseSelector(at.Child("gpus"), r.GPUs)
	rule := shareRule{
		selector: selector, index: -1, profile: strings.ToLower(r.Profile), share: Share{Fractions: r.Kind == KindFractions, Count: r.Count},
	}
	if r.Index != nil {
		rule.index = *r.Index
		if *r.Index < 0 || r.GPUs != "" {
			errs = append(errs, field.Invalid(at.Child("index"), *r.Index, "want a number from 0, and no gpus with it"))
		}
	}
	// A profile of invalid form is an error, so that an admin notices a typing error.
	if _, err := path.Match(rule.profile, ""); err != nil || !strings.ContainsAny((rule.profile + "*")[:1], "0123456789*") {
		errs = append(errs, field.Invalid(at.Child("profile"), r.Profile, "is not a profile: want one like 1g.10gb, with * as a wildcard"))
	}
	switch {
	case !slices.Contains([]ShareKind{KindOff, KindFractions, KindShares}, r.Kind):
		errs = append(errs, field.Invalid(at.Child("kind"), r.Kind, `want fractions, shares or "off" (in quotes)`))
	case r.Kind == KindShares && (r.Count < minShares || r.Count > maxShares):
		errs = append(errs, field.Invalid(at.Child("count"), r.Count, fmt.Sprintf("want a number of shares from %d to %d", minShares, maxShares)))
	case r.Kind != KindShares && r.Count != 0:
		errs = append(errs, field.Invalid(at.Child("count"), r.Count, "only kind shares has a count"))
	}
	return rule, errs
}

// Any reports whether some rule offers a device in shares.
func (r ShareRules) Any() bool {
	return slices.ContainsFunc(r.rules, func(rule shareRule) bool { return rule.share.Offered() })
}

// For returns how the whole GPU g is shared, or, if profile is not empty, how g's partitions of
// that profile are shared. index is the index of g on the node, by PCI address.
func (r ShareRules) For(g GPU, profile string, index int) Share {
	for _, rule := range slices.Backward(r.rules) {
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
