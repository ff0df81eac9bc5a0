package health

import (
	"slices"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Clear ends on the word of an admin what only a reset or time would end. asked names cards by their addresses, names or UUIDs, with commas between them, and
// stands where the admin wrote it: each that was not named before is cleared once, and what it does after that counts. What the hardware says each time that
// it is asked stays. It returns what names no card.
func (m *Monitor) Clear(asked, why string, now time.Time) (unknown []string) {
	m.now = now
	before := names(m.cleared)
	if asked == m.cleared {
		return nil
	}
	m.cleared = asked
	m.aging++
	for _, name := range names(asked) {
		c := m.named(name)
		switch {
		case slices.Contains(before, name):
		case c == nil:
			unknown = append(unknown, name)
		default:
			m.drop(c, func(f *Finding) bool { return f.Ends != EndsByLevel }, why)
			c.ResetAsked = isReset(c.Recovery)
		}
	}
	return unknown
}

func names(asked string) []string {
	return strings.FieldsFunc(asked, func(r rune) bool { return r == ',' || r == ' ' || r == '\n' })
}

// named is nil if there is no such card.
func (m *Monitor) named(name string) *card {
	address, err := device.ParsePCIAddress(name)
	for a, c := range m.cards {
		if err == nil && a == address || a.WholeName() == name || c.Card.UUID != "" && c.Card.UUID == name {
			return c
		}
	}
	return nil
}
