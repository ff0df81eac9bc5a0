package health

import (
	"fmt"
	"strings"
	"time"

	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// A virtual machine may do anything to its GPU. So what the scans find afterwards is compared with
// what they found before.

// changedPrefix begins the codes of findings that a card came back different.
const changedPrefix = "changed-"

const accept = "check the GPU and restore it, or accept the change with the Node's annotation gpu.nvidia.com/clear-health"

// Leave notes what the lent cards at these addresses were, to which a VFIO driver is bound now.
func (m *Monitor) Leave(bound []device.PCIAddress) {
	for _, address := range bound {
		if c := m.cards[address]; c != nil && m.lent[address] && c.Lent == nil && c.GPU != nil {
			c.Lent = c.GPU
			m.version++
		}
	}
}

// compareLent adds findings about what differs between the GPU g of a scan and the card before a
// virtual machine had it. MIG mode was disabled then.
func (m *Monitor) compareLent(c *card, g device.GPU, now time.Time) {
	if c.Lent == nil {
		return
	}
	mode := "disabled"
	if g.MIG != nil && (g.MIG.Enabled || g.MIG.Pending) {
		mode = "enabled"
	}
	was, is := ptr.Deref(c.Lent.Firmware, device.Firmware{}), ptr.Deref(g.Firmware, device.Firmware{})
	same := true
	for _, what := range []struct{ code, name, was, is string }{
		{"uuid", "UUID", c.Lent.UUID, g.UUID},
		{"vbios", "VBIOS", was.VBIOS, is.VBIOS},
		{"ecc", "ECC mode", was.ECC, is.ECC},
		{"mig", "MIG mode", "disabled", mode},
	} {
		differs := what.was != "" && what.is != "" && what.was != what.is
		same = same && !differs
		m.setLevel(c, differs, Finding{
			Code: changedPrefix + what.code, State: Unhealthy, Action: accept,
			Reason: fmt.Sprintf("a virtual machine had the GPU and left it with %s %s instead of %s",
				what.name, oneLine(what.is), oneLine(what.was)),
		}, "the GPU is as it was before a virtual machine had it", now)
	}
	if same && !m.lent[g.PCIAddress] {
		c.Lent = nil
		m.version++
	}
}

// acceptLent makes the card as it is now the one to compare with.
func (m *Monitor) acceptLent(c *card, why string) {
	c.Lent = nil
	m.endFindings(c, func(f *Finding) bool { return strings.HasPrefix(f.Code, changedPrefix) }, why)
}
