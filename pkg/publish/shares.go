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
	byType, fractions := map[string]int{}, false
	var withdrawn []string
	for _, s := range shapes {
		shared, is := s.(device.Shared)
		if !is {
			continue
		}
		name, _ := device.ParseName(s.Name())
		byType[name.Type()]++
		fractions = fractions || shared.InFractions()
		if shared.Withdrawn() { // published only as long as claims have shares of it
			withdrawn = append(withdrawn, s.Name())
		}
	}
	ending := strings.Join(withdrawn, ", ")
	b.metrics.Shares(byType)
	b.offersFractions.Store(fractions)
	b.events.EventOnChange(events.SharesNotOffered, notShared, "Not offering shares: "+notShared)
	b.events.EventOnChange(events.FractionsNotOffered, noFractions, "Not offering fractions: "+noFractions)
	b.events.EventOnChange(events.SharesEnding, ending, "Claims hold shares that are no longer configured. No more shares are offered of "+
		ending+". The new configuration applies when the last of these claims ends")
	return ending == ""
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
