package health

import (
	"slices"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Clear ends the findings of the named cards for an admin, except those with EndsByLevel that the
// next query would add again. It accepts what a virtual machine has changed. names has PCI
// addresses, device names or UUIDs, separated by commas. Names that the last call had are skipped.
// The result has the names without a card.
func (m *Monitor) Clear(names, why string, now time.Time) (unknown []string) {
	m.now = now
	before := splitNames(m.lastClear)
	if names == m.lastClear {
		return nil
	}
	m.lastClear = names
	m.version++ // so that the request is saved, and not carried out again after a restart
	for _, name := range splitNames(names) {
		c := m.findCard(name)
		switch {
		case slices.Contains(before, name):
		case c == nil:
			unknown = append(unknown, name)
		default:
			m.endFindings(c, func(f *Finding) bool { return f.Ends != EndsByLevel }, why)
			m.acceptLent(c, why)
			c.ResetRequested = isReset(c.Recovery)
		}
	}
	return unknown
}

func splitNames(asked string) []string {
	return strings.FieldsFunc(asked, func(r rune) bool { return r == ',' || r == ' ' || r == '\n' })
}

// findCard returns the card with this PCI address, device name or UUID. It returns nil if there is
// none.
func (m *Monitor) findCard(name string) *card {
	address, err := device.ParsePCIAddress(name)
	for a, c := range m.cards {
		if err == nil && a == address || a.WholeName() == name || c.Card.UUID != "" && c.Card.UUID == name {
			return c
		}
	}
	return nil
}
