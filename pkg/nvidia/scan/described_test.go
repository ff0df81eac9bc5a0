package scan

import (
	"cmp"
	"slices"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// describedMIG returns what a scan should report about MIG for a card of the simulated node.
func describedMIG(card model.Card, m *model.GPU) *device.MIG {
	if !m.MIG.Supported.Value {
		return nil
	}
	mig := &device.MIG{ModeFixed: m.MIG.NeedsReset.Value, ReadOnly: card.Virtualization == "vgpu"}
	if card.MIG != nil {
		mig.Enabled, mig.Pending = card.MIG.Enabled, card.MIG.Enabled
		if card.MIG.Pending != nil {
			mig.Pending = *card.MIG.Pending
		}
	}
	for _, p := range m.MIG.Profiles {
		mig.Profiles = append(mig.Profiles, device.Profile{
			ID: p.ID, Name: strings.TrimPrefix(p.Name, "MIG "), Slices: p.Slices, MaxInstances: p.InstancesMax, MemoryBytes: p.MemoryMiB << 20,
			Engines: device.Engines{
				Multiprocessors: p.SM, CopyEngines: p.CopyEngines, Decoders: p.Decoders, Encoders: p.Encoders, JPEGEngines: p.JPEGEngines,
				OFAEngines: p.OFAEngines,
			},
			Size: p.Placements.Size, Starts: slices.Sorted(slices.Values(p.Placements.Starts)),
		})
	}
	slices.SortFunc(mig.Profiles, func(a, b device.Profile) int { return cmp.Compare(a.ID, b.ID) })
	return mig
}

func expectedInstances(card model.Card) int {
	if card.MIG == nil {
		return 0
	}
	return len(card.MIG.Instances)
}
