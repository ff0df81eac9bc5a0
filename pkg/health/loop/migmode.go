package loop

import (
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// modeWatch requests a scan of the hardware when an admin has changed a GPU's MIG mode. The change
// shows in no file that the inventory watches, but the hardware watcher reports the mode. Only one
// goroutine may use modeWatch.
type modeWatch struct {
	inv Inventory
	// reported has each GPU's last MIG mode that the hardware watcher reported and that differed from
	// the inventory's. It prevents a second scan for the same mode.
	reported map[device.PCIAddress]device.MIGMode
}

func (w *modeWatch) observe(c *device.Condition) {
	if c == nil || c.MIG == nil {
		return
	}
	address := c.Card.PCIAddress
	for _, g := range w.inv.Snapshot().Node.GPUs {
		if g.PCIAddress != address || g.MIG == nil {
			continue
		}
		if *c.MIG == (device.MIGMode{Enabled: g.MIG.Enabled, Pending: g.MIG.Pending}) {
			delete(w.reported, address)
		} else if reported, known := w.reported[address]; !known || reported != *c.MIG {
			w.reported[address] = *c.MIG
			w.inv.RequestScan()
		}
	}
}
