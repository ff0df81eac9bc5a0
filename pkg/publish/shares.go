package publish

import (
	"slices"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
)

// withShares returns the offerings (devices to offer per GPU) with the configured share rules
// added, if a cluster with the features f supports them. v is the node's GPU driver.
func (b *builder) withShares(offerings []device.Offering, v device.Driver, f Features) []device.Offering {
	rules, _ := b.shareRules(f)
	possible := device.SharingUnsupportedReason(f.PartitionedDevices, f.ConsumableCapacity) == ""
	shared := slices.Clone(offerings)
	for i := range shared {
		o := &shared[i]
		o.Shares, o.FractionsUnsupported = rules, device.FractionsUnsupportedReason(o.GPU, v)
		if !possible {
			o.HeldShares = nil
		}
	}
	return shared
}

// reportShares writes Events and metrics about devices that several claims can share. settled is
// false while claims have shares that the configuration no longer has, so the slices must be built
// again soon.
func (b *builder) reportShares(offerings []device.Offering, shapes []device.Shape, f Features) (settled bool) {
	_, notShared := b.shareRules(f)
	noFractions := describeLimits(device.FractionRefusals(offerings))
	ending := strings.Join(endingShares(shapes), ", ")
	b.metrics.Shares(countShares(shapes))
	b.offersFractions.Store(slices.ContainsFunc(shapes, isFractional))
	b.events.EventOnChange(events.SharesNotOffered, notShared, "Not offering shares: "+notShared)
	b.events.EventOnChange(events.FractionsNotOffered, noFractions, "Not offering fractions: "+noFractions)
	b.events.EventOnChange(events.SharesEnding, ending, "Claims hold shares that are no longer configured. No more shares are offered of "+
		ending+". The new configuration applies when the last of these claims ends")
	return ending == ""
}

func isFractional(s device.Shape) bool {
	shared, is := s.(device.Shared)
	return is && shared.InFractions()
}

// endingShares returns the names of shared devices that the configuration no longer has, but that
// are published as long as claims have shares of them.
func endingShares(shapes []device.Shape) []string {
	var names []string
	for _, s := range shapes {
		if shared, is := s.(device.Shared); is && shared.Withdrawn() {
			names = append(names, s.Name())
		}
	}
	return names
}

// shareRules returns the configured share rules. If the cluster does not support them, it returns
// no rules, and notShared says what the cluster lacks.
func (b *builder) shareRules(f Features) (_ device.ShareRules, notShared string) {
	shares := *b.shares.Load()
	if !shares.Any() {
		return device.ShareRules{}, ""
	}
	if why := device.SharingUnsupportedReason(f.PartitionedDevices, f.ConsumableCapacity); why != "" {
		return device.ShareRules{}, why
	}
	return shares, ""
}

// countShares returns the number of shared devices by their attribute "type".
func countShares(shapes []device.Shape) map[string]int {
	byType := map[string]int{}
	for _, s := range shapes {
		if name, ok := device.ParseName(s.Name()); ok && name.Share {
			byType[name.Type()]++
		}
	}
	return byType
}
