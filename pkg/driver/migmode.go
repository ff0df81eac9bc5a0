package driver

import (
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// modeWatch notices that an admin has changed the MIG mode of a card, which shows in no file: who listens to the hardware is told the mode with each answer.
// It is for one goroutine.
type modeWatch struct {
	inv inventorySource
	// doubt has the inventory take a full look.
	doubt func()
	// doubted is what was last said of a card that the inventory knows otherwise: it is told once.
	doubted map[device.PCIAddress]device.MIGMode
}

func (w *modeWatch) see(c *device.Condition) {
	if c == nil || c.MIG == nil {
		return
	}
	address := c.Card.PCIAddress
	for _, g := range w.inv.Snapshot().Node.GPUs {
		if g.PCIAddress != address || g.MIG == nil {
			continue
		}
		if *c.MIG == (device.MIGMode{Enabled: g.MIG.Enabled, Pending: g.MIG.Pending}) {
			delete(w.doubted, address)
		} else if doubted, was := w.doubted[address]; !was || doubted != *c.MIG {
			w.doubted[address] = *c.MIG
			w.doubt()
		}
	}
}
