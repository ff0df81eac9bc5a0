package health

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// View is a copy of a monitor's findings at one moment. It never changes, so any goroutine may read
// it. In the zero value all devices are healthy.
type View struct {
	cards map[device.PCIAddress]card
}

// View returns a copy of the monitor's current state.
func (m *Monitor) View() *View {
	v := &View{cards: make(map[device.PCIAddress]card, len(m.cards))}
	for address, c := range m.cards {
		seen := *c
		seen.Findings = make([]*Finding, len(c.Findings))
		for i, f := range c.Findings {
			finding := *f
			seen.Findings[i] = &finding
		}
		v.cards[address] = seen
	}
	return v
}

// Of returns the verdict on the device with this name, a part of the GPU g or all of it. The
// verdict is Healthy if the view has no card at g's PCI address, or a card with another UUID.
func (v *View) Of(g device.GPU, name device.Name) Verdict {
	c, known := v.cards[g.PCIAddress]
	if !known || c.Card.UUID != "" && g.UUID != "" && c.Card.UUID != g.UUID {
		return Verdict{}
	}
	var verdict Verdict
	for _, f := range c.Findings {
		if f.State > Healthy && f.Part.affects(name, g) {
			verdict.Causes = append(verdict.Causes, *f)
		}
	}
	slices.SortFunc(verdict.Causes, byGravity)
	if len(verdict.Causes) > 0 {
		verdict.State = verdict.Causes[0].State
	}
	return verdict
}

// relistGrace is how long after a card's recovery Missing still returns the card while the
// inventory's scans do not list it yet.
const relistGrace = time.Minute

// Missing returns the cards that are absent from listed and are not Healthy, or recovered less than
// relistGrace ago. It skips cards that are bound to another kernel driver.
func (v *View) Missing(listed []device.PCIAddress, now time.Time) (missing []device.GPU) {
	for address, c := range v.cards {
		if c.GPU == nil || c.OtherDriver || slices.Contains(listed, address) {
			continue
		}
		unhealthy := v.Of(*c.GPU, device.Name{GPU: address.WholeName()}).State > Healthy
		if unhealthy || now.Sub(c.recoveredAt) < relistGrace {
			missing = append(missing, *c.GPU)
		}
	}
	slices.SortFunc(missing, func(a, b device.GPU) int { return strings.Compare(string(a.PCIAddress), string(b.PCIAddress)) })
	return missing
}

// Known returns the GPU at the address as the inventory last reported it.
func (v *View) Known(address device.PCIAddress) (device.GPU, bool) {
	if v.cards[address].GPU == nil {
		return device.GPU{}, false
	}
	return *v.cards[address].GPU, true
}

// byGravity sorts findings by state, the gravest first, and those of the same state by age, the
// oldest first. Between findings of the same age their keys decide, so that the order is always the
// same.
func byGravity(a, b Finding) int {
	return cmp.Or(cmp.Compare(b.State, a.State), a.Since.Compare(b.Since), a.First.Compare(b.First), cmp.Compare(a.key(), b.key()))
}

// Findings returns all findings of the card at the address, including those that do not affect
// scheduling. The caller must not modify them.
func (v *View) Findings(address device.PCIAddress) []*Finding { return v.cards[address].Findings }

// Affects reports whether the finding of this Change affects the device n of the GPU g.
func (c Change) Affects(g device.GPU, n device.Name) bool {
	return c.Card.PCIAddress == g.PCIAddress && (c.Card.UUID == "" || g.UUID == "" || c.Card.UUID == g.UUID) &&
		c.Finding.Part.affects(n, g)
}
