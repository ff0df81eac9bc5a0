package health

import (
	"slices"
	"strconv"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	// maxFindings bounds what is kept of one card. Beyond it what weighs least is dropped, and what must not be forgotten is counted together.
	maxFindings = 64
	// maxLevels is more than there are kinds of levels: for those there is always room.
	maxLevels = 16
	// manyCode is what is counted together. Its place is kept free.
	manyCode = "many"
)

// card is the state machine of one GPU and all that is cut from it.
type card struct {
	Card device.Card `json:"card"`
	// GPU is what the inventory last said of it. It outlives a card that is lost, whose devices are still held and named.
	GPU      *device.GPU `json:"gpu,omitempty"`
	Findings []*Finding  `json:"findings,omitempty"`
	// Recovery is the last action that the driver named. It outlives answers that name none.
	Recovery device.RecoveryAction `json:"recovery,omitempty"`
	// ResetAsked says that the driver has asked for a reset, and not yet for nothing.
	ResetAsked bool `json:"resetAsked,omitempty"`
	// Uncorrected and Energy only grow as long as the card is not reset. The first may also be cleared by an admin.
	Uncorrected *uint64 `json:"uncorrected,omitempty"`
	Energy      *uint64 `json:"energyMillijoules,omitempty"`

	// Away says that another kernel driver has the card.
	Away bool `json:"away,omitempty"`

	// asked is when the last full answer was asked for: what came later may be from before or after a reset that the next answer shows.
	asked time.Time
	// heard is when the card last answered, or when listening began; failing since when it answers with errors, fabricless since when it lacks its fabric.
	heard, failing, fabricless time.Time
	recovered                  time.Time // when the last thing was over that made it less than healthy
	failure                    string
}

// found adds a finding or counts it once more.
func (m *Monitor) found(c *card, f Finding, count int, now time.Time) {
	if old := c.find(f.key()); old != nil {
		old.Count += uint64(max(count, 1))
		m.aged = true
		if f.Last.After(old.Last) {
			old.Last = f.Last
		}
		if old.Ends == EndsByReset && (f.Ends != EndsByReset || f.State < old.State) {
			return // what takes a reset is not made milder by what comes after it
		}
		turned, reworded := old.State != f.State || old.Ends != f.Ends, old.Reason != f.Reason || old.Action != f.Action
		if old.State != f.State {
			old.Since = f.First
		}
		old.State, old.Ends, old.Reason, old.Action = f.State, f.Ends, f.Reason, f.Action
		switch {
		case turned:
			m.changed(Change{Card: c.Card, Finding: *old})
		case reworded:
			m.version++
		}
		return
	}
	f.Count = uint64(max(count, 1))
	if f.Last.IsZero() {
		f.Last = f.First
	}
	f.Since = f.First
	for _, other := range c.Findings {
		if other.State == f.State && other.Part.covers(f.Part) && other.Since.Before(f.Since) {
			f.Since = other.Since
		}
	}
	if m.admit(c, &f, now) {
		c.Findings = append(c.Findings, &f)
		m.changed(Change{Card: c.Card, Finding: f})
	}
}

// admit says whether there is room for a finding, and makes some. Levels are few, and what is said of all of the card must not be hidden by events.
func (m *Monitor) admit(c *card, f *Finding, now time.Time) bool {
	if f.Ends == EndsByLevel {
		return true
	}
	events := 0
	for _, o := range c.Findings {
		if o.Ends != EndsByLevel {
			events++
		}
	}
	return events < maxFindings-maxLevels-1 || m.makeRoom(c, f, now)
}

// makeRoom drops the mildest of what passes by itself; of those the one that was seen longest ago. Where there is none and f is latched, f becomes a finding
// about the whole card that stands for all that have no room. It is false if f is not to be kept: then one of its state has been seen as late as f, so that the
// state lasts as long as it must. Errors of ever other kinds do not take turns in being over.
func (m *Monitor) makeRoom(c *card, f *Finding, now time.Time) bool {
	if f.Ends == EndsByTime {
		for _, o := range c.Findings {
			if o.Ends == EndsByTime && o.State == f.State && o.Part.covers(f.Part) {
				if f.Last.After(o.Last) {
					o.Last, m.aged = f.Last, true
				}
				return false
			}
		}
	}
	worst := -1
	for i, o := range c.Findings {
		if o.Ends != EndsByTime {
			continue
		}
		if worst < 0 || o.State < c.Findings[worst].State || o.State == c.Findings[worst].State && o.Last.Before(c.Findings[worst].Last) {
			worst = i
		}
	}
	if worst >= 0 && (f.Ends != EndsByTime || c.Findings[worst].State <= f.State) {
		m.drop(c, func(o *Finding) bool { return o == c.Findings[worst] }, "there is no room for more")
		return true
	}
	if f.Ends == EndsByTime {
		return false
	}
	// All that is there is latched or a level.
	f.Code, f.XID, f.Part = manyCode, 0, Part{}
	f.Reason = "more kinds of errors than can be told apart"
	if old := c.find(f.key()); old != nil {
		old.Count++
		old.Last, old.State = now, max(old.State, f.State)
		return false
	}
	return true
}

func (c *card) find(key string) *Finding {
	for _, f := range c.Findings {
		if f.key() == key {
			return f
		}
	}
	return nil
}

// drop ends findings.
func (m *Monitor) drop(c *card, over func(*Finding) bool, why string) {
	var gone []*Finding
	kept := slices.DeleteFunc(slices.Clone(c.Findings), func(f *Finding) bool {
		if over(f) {
			gone = append(gone, f)
			return true
		}
		return false
	})
	if len(gone) == 0 {
		return
	}
	c.Findings = kept
	for _, g := range gone {
		if g.State > Healthy {
			c.recovered = m.now
		}
		m.changed(Change{Card: c.Card, Finding: *g, Over: true, Why: why})
	}
}

func (m *Monitor) dropCode(c *card, code, why string) bool {
	is := func(f *Finding) bool { return f.Code == code }
	there := slices.ContainsFunc(c.Findings, is)
	m.drop(c, is, why)
	return there
}

// level sets or takes back what the hardware says each time that it is asked.
func (m *Monitor) level(c *card, is bool, f Finding, over string, at time.Time) (ended bool) {
	if !is {
		return m.dropCode(c, f.Code, over)
	}
	f.Ends, f.First, f.Last = EndsByLevel, at, at
	m.found(c, f, 1, at)
	return false
}

// event judges what the card announced.
func (m *Monitor) event(c *card, e device.HealthEvent, now time.Time) {
	at := e.At
	if at.IsZero() || at.After(now) {
		at = now
	}
	if e.Kind == device.EventRecoveryAction {
		m.recommended(c, e.Recovery, at)
		return
	}
	meaning, code := event(e.Kind, c.Recovery != device.RecoveryUnknown), string(e.Kind)
	reason := meaning.Text
	if e.Kind == device.EventXID {
		meaning, code = m.rules.XID(e.XID), "xid-"+strconv.FormatUint(e.XID, 10)
		reason = "XID " + strconv.FormatUint(e.XID, 10) + ": " + meaning.Text
	}
	m.count(c, code, e.Count)
	if meaning.Weight == Ignored {
		return
	}
	state, ends := meaning.verdict()
	m.found(c, Finding{
		Code: code, XID: e.XID, Part: m.part(e), State: state, Ends: ends, Reason: reason, Action: meaning.Action, First: at, Last: at,
	}, e.Count, now)
}

// part is what the event is about. An instance of which nobody could say where it is may be anywhere on the card.
func (m *Monitor) part(e device.HealthEvent) Part {
	if e.GPUInstance == nil || e.Place == nil {
		return Part{}
	}
	place := *e.Place
	p := Part{Instance: &place}
	if place.Part {
		p.Compute = e.ComputeInstance
	}
	return p
}
