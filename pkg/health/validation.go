package health

import (
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Validate tells the monitor which GPUs passed an admin's check, and when the check began, by UUID.
// A check counts until the GPU is reset, the node boots, or another GPU takes its place.
func (m *Monitor) Validate(checks map[string]time.Time) {
	m.checks = checks
	for _, c := range m.cards {
		m.validate(c)
	}
}

// validate copies what the Node's annotations say about the card. Until they were read, a saved
// time remains, so that a restart of the plugin adds no taint for a moment.
func (m *Monitor) validate(c *card) {
	if m.checks == nil || c.Card.UUID == "" || c.Validated.Equal(m.checks[c.Card.UUID]) {
		return
	}
	c.Validated = m.checks[c.Card.UUID]
	m.version++
}

// Unvalidated reports whether no check of the GPU g began after g arrived or was last reset, and
// since when. A GPU that the view does not have yet is unvalidated.
func (v *View) Unvalidated(g device.GPU) (since time.Time, unvalidated bool) {
	c, known := v.cards[g.PCIAddress]
	if !known || c.Card.UUID != g.UUID {
		return time.Time{}, true
	}
	arrived := c.Arrived.Truncate(time.Second) // the precision of an annotation
	return arrived, c.Validated.Before(arrived)
}
