package health

import (
	"slices"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// View is what a monitor knew at one moment. It does not change, and any goroutine may read it. Nil knows of nothing: every device is healthy.
type View struct {
	cards map[device.PCIAddress]cardView
}

type cardView struct {
	card     device.Card
	gpu      *device.GPU
	findings []Finding
	// recovered is when the last thing was over that made it less than healthy.
	recovered time.Time
	away      bool
}

// View copies what is known.
func (m *Monitor) View() *View {
	v := &View{cards: make(map[device.PCIAddress]cardView, len(m.cards))}
	for address, c := range m.cards {
		findings := make([]Finding, len(c.Findings))
		for i, f := range c.Findings {
			findings[i] = *f
		}
		v.cards[address] = cardView{c.Card, c.GPU, findings, c.recovered, c.Away}
	}
	return v
}

// Of is the verdict on a device of the GPU. Another card at the place has none.
func (v *View) Of(g device.GPU, n device.Name) Verdict {
	if v == nil {
		return Verdict{}
	}
	c, known := v.cards[g.PCIAddress]
	if !known || c.card.UUID != "" && g.UUID != "" && c.card.UUID != g.UUID {
		return Verdict{}
	}
	var verdict Verdict
	for _, s := range slices.Backward(States()[1:]) {
		for _, f := range c.first(s, g, n) {
			verdict.Causes = append(verdict.Causes, Cause{State: s, Code: f.Code, XID: f.XID, Reason: f.Reason, Action: f.Action, Since: f.Since})
		}
	}
	if len(verdict.Causes) > 0 {
		verdict.State = verdict.Causes[0].State
	}
	return verdict
}

// recoveredFor is how long a card that has recovered may take until it is listed again.
const recoveredFor = time.Minute

// Missing are the cards, by PCI address, that are none of those listed and that something grave is known of, or was until a moment ago: settled is false then.
// One that another kernel driver has is not missing.
func (v *View) Missing(listed []device.PCIAddress, now time.Time) (missing []device.GPU, settled bool) {
	if v == nil {
		return nil, true
	}
	settled = true
	for address, c := range v.cards {
		if c.gpu == nil || c.away || slices.Contains(listed, address) {
			continue
		}
		switch {
		case v.Of(*c.gpu, device.Name{GPU: address.WholeName()}).State > Healthy:
			missing = append(missing, *c.gpu)
		case now.Sub(c.recovered) < recoveredFor:
			missing, settled = append(missing, *c.gpu), false
		}
	}
	slices.SortFunc(missing, func(a, b device.GPU) int { return strings.Compare(string(a.PCIAddress), string(b.PCIAddress)) })
	return missing, settled
}

// first has, of the findings of that state, the XID and the other one that have been there longest,
// each for as long as it is there. The older of the two comes first.
func (c cardView) first(s State, g device.GPU, n device.Name) []*Finding {
	var xid, other *Finding
	for i := range c.findings {
		f := &c.findings[i]
		if f.State != s || !f.Part.reaches(n, g) {
			continue
		}
		longest := &other
		if f.XID != 0 {
			longest = &xid
		}
		if *longest == nil || f.before(*longest) {
			*longest = f
		}
	}
	found := slices.DeleteFunc([]*Finding{xid, other}, func(f *Finding) bool { return f == nil })
	if len(found) == 2 && other.before(xid) {
		slices.Reverse(found)
	}
	return found
}

// before says whether a finding has been there longer than another.
func (f *Finding) before(o *Finding) bool {
	if !f.Since.Equal(o.Since) {
		return f.Since.Before(o.Since)
	}
	return f.First.Before(o.First) || f.First.Equal(o.First) && f.key() < o.key()
}

// Findings are all that is known of a card, those included that take nothing out.
func (v *View) Findings(address device.PCIAddress) []Finding {
	if v == nil {
		return nil
	}
	return slices.Clone(v.cards[address].findings)
}

// Affected says whether a change reaches a device of the GPU.
func (c Change) Affected(g device.GPU, n device.Name) bool {
	return c.Card.PCIAddress == g.PCIAddress && (c.Card.UUID == "" || g.UUID == "" || c.Card.UUID == g.UUID) && c.Finding.Part.reaches(n, g)
}
