package driver

import (
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// seenNode is an inventory that knows one card, in this mode.
type seenNode struct{ mode device.MIGMode }

func (n *seenNode) Snapshot() inventory.Snapshot {
	mig := &device.MIG{Enabled: n.mode.Enabled, Pending: n.mode.Pending}
	return inventory.Snapshot{Ready: true, Known: true, Node: nvidia.Node{GPUs: []nvidia.GPU{{GPU: device.GPU{PCIAddress: "0000:1b:00.0", MIG: mig}}}}}
}

func TestAModeThatTheInventoryDoesNotKnowIsDoubtedOnce(t *testing.T) {
	off, on, toBe := device.MIGMode{}, device.MIGMode{Enabled: true, Pending: true}, device.MIGMode{Pending: true}
	node, doubts := &seenNode{mode: off}, 0
	w := &modeWatch{inv: node, doubt: func() { doubts++ }, doubted: map[device.PCIAddress]device.MIGMode{}}
	says := func(address device.PCIAddress, mode *device.MIGMode) {
		w.see(&device.Condition{Card: device.Card{PCIAddress: address}, MIG: mode})
	}
	for _, step := range []struct {
		what string
		do   func()
		want int
	}{
		{"it is as known", func() { says("0000:1b:00.0", &off) }, 0},
		{"who listens says something else", func() { w.see(nil) }, 0},
		{"it does not say", func() { says("0000:1b:00.0", nil) }, 0},
		{"a card that is not known", func() { says("0000:99:00.0", &on) }, 0},
		{"an admin has switched it on", func() { says("0000:1b:00.0", &on) }, 1},
		{"nobody has looked yet", func() { says("0000:1b:00.0", &on) }, 1},
		{"an admin wants it at the next reset", func() { says("0000:1b:00.0", &toBe) }, 2},
		{"somebody has looked", func() { node.mode = toBe; says("0000:1b:00.0", &toBe) }, 2},
		{"it is switched on after all", func() { says("0000:1b:00.0", &on) }, 3},
	} {
		if step.do(); doubts != step.want {
			t.Errorf("%s: %d doubts, want %d", step.what, doubts, step.want)
		}
	}
}
