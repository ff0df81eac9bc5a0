package scan

import (
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/migmodel"
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
	mig.Profiles = migmodel.Profiles(m)
	return mig
}

func expectedInstances(card model.Card) int {
	if card.MIG == nil {
		return 0
	}
	return len(card.MIG.Instances)
}
