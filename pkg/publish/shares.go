package publish

import (
	"slices"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
)

// withShares returns the offerings (devices to offer per GPU) with the configured share rules
// added, if a cluster with the features f supports them. v is the node's GPU driver.
func (p *Publisher) withShares(offerings []device.Offering, v device.Driver, f Features) []device.Offering {
	rules, _ := p.shareRules(f)
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
func (p *Publisher) reportShares(offerings []device.Offering, shapes []device.Shape, f Features) (settled bool) {
	_, notShared := p.shareRules(f)
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
	p.opts.Metrics.Shares(byType)
	p.offersFractions.Store(fractions)
	p.opts.Events.EventOnChange(events.SharesNotOffered, notShared, "Not offering shares: "+notShared)
	p.opts.Events.EventOnChange(events.FractionsNotOffered, noFractions, "Not offering fractions: "+noFractions)
	p.opts.Events.EventOnChange(events.SharesEnding, ending, "Claims hold shares that are no longer configured. "+
		"No more shares are offered of "+ending+". The new configuration applies when the last of these claims ends")
	return ending == ""
}

// shareRules returns the configured share rules. If the cluster does not support them, it returns
// no rules, and notShared says what the cluster lacks.
func (p *Publisher) shareRules(f Features) (_ device.ShareRules, notShared string) {
	shares := *p.shares.Load()
	if !shares.Any() {
		return device.ShareRules{}, ""
	}
	if why := device.SharingUnsupportedReason(f.PartitionedDevices, f.ConsumableCapacity); why != "" {
		return device.ShareRules{}, why
	}
	return shares, ""
}
