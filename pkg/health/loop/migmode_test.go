package loop

import (
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// oneGPUInventory fakes an inventory with one GPU, whose MIG mode is in the field mode.
type oneGPUInventory struct {
	mode  device.MIGMode
	scans int // requested scans
}

func (n *oneGPUInventory) RequestScan() { n.scans++ }

func (n *oneGPUInventory) Snapshot() inventory.Snapshot {
	mig := &device.MIG{Enabled: n.mode.Enabled, Pending: n.mode.Pending}
	gpu := nvidia.GPU{GPU: device.GPU{PCIAddress: "0000:1b:00.0", MIG: mig}}
	return inventory.Snapshot{Ready: true, Known: true, Node: nvidia.Node{GPUs: []nvidia.GPU{gpu}}}
}

func TestUnknownMIGModeRequestsScan(t *testing.T) {
	off, on, toBe := device.MIGMode{}, device.MIGMode{Enabled: true, Pending: true}, device.MIGMode{Pending: true}
	node := &oneGPUInventory{mode: off}
	l := &Loop{opts: Options{Inventory: node}}
	says := func(address device.PCIAddress, mode *device.MIGMode) {
		l.scanIfModeChanged(&device.Condition{Card: device.Card{PCIAddress: address}, MIG: mode})
	}
	for _, step := range []struct {
		what string
		do   func()
		want int
	}{
		{"the known mode", func() { says("0000:1b:00.0", &off) }, 0},
		{"another signal", func() { l.scanIfModeChanged(nil) }, 0},
		{"no mode", func() { says("0000:1b:00.0", nil) }, 0},
		{"an unknown card", func() { says("0000:99:00.0", &on) }, 0},
		{"an admin has switched it on", func() { says("0000:1b:00.0", &on) }, 1},
		{"before the scan", func() { says("0000:1b:00.0", &on) }, 2},
		{"an admin wants it at the next reset", func() { says("0000:1b:00.0", &toBe) }, 3},
		{"after the scan", func() { node.mode = toBe; says("0000:1b:00.0", &toBe) }, 3},
		{"the admin switches it on after all", func() { says("0000:1b:00.0", &on) }, 4},
	} {
		if step.do(); node.scans != step.want {
			t.Errorf("%s: %d scans requested, want %d", step.what, node.scans, step.want)
		}
	}
}
