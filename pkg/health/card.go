package health

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
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
// about the whole card that stands for all that have no room. It is false if f is not to be kept.
func (m *Monitor) makeRoom(c *card, f *Finding, now time.Time) bool {
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

// recommended takes the driver's recovery action of a time. From a reset to none it proves one; others may be over without.
func (m *Monitor) recommended(c *card, a device.RecoveryAction, at time.Time) {
	if a == device.RecoveryUnknown {
		return
	}
	if c.Recovery == device.RecoveryUnknown {
		m.reconsider(c)
	}
	c.Recovery = a
	c.ResetAsked = c.ResetAsked || isReset(a)
	m.drop(c, func(f *Finding) bool { return strings.HasPrefix(f.Code, recoveryPrefix) && f.Code != recoveryCode(a) }, "the driver's recovery action is now "+string(a))
	if meaning := recovery(a); meaning != nil {
		state, _ := meaning.verdict()
		m.level(c, true, Finding{Code: recoveryCode(a), State: state, Reason: meaning.Text, Action: meaning.Action}, "", at)
	} else if c.ResetAsked {
		m.wasReset(c, at, "the driver has asked for a reset, and asks for nothing now")
	}
}

// reconsider judges memory errors anew that came before it was known that the driver has a recovery action: it says whether they take a reset.
func (m *Monitor) reconsider(c *card) {
	meaning := event(device.EventDoubleBitECC, true)
	for _, f := range c.Findings {
		if f.Code == string(device.EventDoubleBitECC) && f.Ends == EndsByReset {
			f.State, f.Ends = meaning.verdict()
			f.Reason, f.Action, f.Since = meaning.Text, meaning.Action, f.First
			m.changed(Change{Card: c.Card, Finding: *f})
		}
	}
}

const recoveryPrefix = "recovery-"

func recoveryCode(a device.RecoveryAction) string { return recoveryPrefix + string(a) }

// wasReset ends what only a reset ends, as far as it was there before. What the card says each time that it is asked it will say again if it is still so: a
// driver that was loaded instead may have no word for it. Whether it answers at all is seen anyway.
func (m *Monitor) wasReset(c *card, at time.Time, why string) {
	m.drop(c, func(f *Finding) bool {
		level := f.Ends == EndsByLevel && f.Code != lostCode && f.Code != unknownCode
		return (f.Ends == EndsByReset || level) && !f.Last.After(at) || f.Code == fabricCode
	}, why)
	c.fabricless = time.Time{} // it may take its time again
	if recovery(c.Recovery) != nil && c.find(recoveryCode(c.Recovery)) == nil {
		c.Recovery = device.RecoveryUnknown
	}
	c.ResetAsked = isReset(c.Recovery)
}

// What is said of a card that does not answer as it should.
const (
	lostCode       = "lost"
	needsResetCode = "reset-required"
	lostAction     = "look at dmesg for NVRM messages about this address; drain the node and reset the GPU or switch the power off and on"
	unknownAction  = "look at the plugin's log and whether nvidia-smi answers on the node"
)

// condition judges what the card answered.
func (m *Monitor) condition(c *card, s device.Condition, now time.Time) {
	at := s.At
	if at.IsZero() || at.After(now) {
		at = now
	}
	if away := s.Reach == device.ReachNotOurs; away != c.Away {
		c.Away = away
		m.version++
	}
	switch s.Reach {
	case device.ReachNotOurs:
		c.failing, c.fabricless = time.Time{}, time.Time{}
		m.drop(c, func(f *Finding) bool { return f.Ends == EndsByLevel }, "another kernel driver has the card")
	case device.ReachOK:
		m.answered(c, s, at, now)
	case device.ReachNeedsReset:
		c.asked, c.heard, c.failing = at.Add(-max(s.Took, 0)), now, time.Time{}
		m.dropCode(c, unknownCode, "it answers")
		m.dropCode(c, lostCode, "it answers again")
		m.worse(c, s, at)
		m.level(c, true, Finding{Code: needsResetCode, State: Unhealthy, Reason: "the GPU does not work until it is reset (" + clean(s.Error) + ")", Action: reset}, "", at)
	case device.ReachLost:
		c.asked, c.heard, c.failing = at.Add(-max(s.Took, 0)), now, time.Time{}
		m.dropCode(c, unknownCode, "it is lost")
		m.level(c, true, Finding{Code: lostCode, State: Lost, Reason: "the GPU is lost (" + cmp.Or(clean(s.Error), "NVML does not reach it") + ")", Action: lostAction}, "", at)
	case device.ReachWedged:
		m.unknown(c, "the GPU does not answer ("+cmp.Or(clean(s.Error), "a call to NVML has not come back")+")", at)
	default:
		if c.failing.IsZero() {
			c.failing = now
		}
		m.worse(c, s, at)
		c.heard, c.failure = now, "the GPU answers with an error ("+cmp.Or(clean(s.Error), "unknown")+")"
		m.patience(c, now)
	}
}

// worse takes from an answer that is not a full one only what is bad: nothing in it proves that something is over.
func (m *Monitor) worse(c *card, s device.Condition, at time.Time) {
	if recovery(s.Recovery) != nil {
		m.recommended(c, s.Recovery, at.Add(-max(s.Took, 0)))
	}
	if r := s.Remap; r != nil {
		if r.Pending {
			m.level(c, true, remapPending, "", at)
		}
		if r.Failed {
			m.level(c, true, remapFailed, "", at)
		}
	}
}

var (
	remapPending = Finding{Code: "remap-pending", State: Degraded, Reason: "bad memory is to be remapped at the next reset", Action: "drain the node's Pods from this GPU at the next opportunity and reset it"}
	remapFailed  = Finding{Code: "remap-failed", State: Unhealthy, Reason: "bad memory could not be remapped", Action: vendor}
)

// answered judges a full answer.
func (m *Monitor) answered(c *card, s device.Condition, at, now time.Time) {
	began := at.Add(-max(s.Took, 0)) // what came while it was asked is not in the answer
	c.heard, c.failing, c.failure = now, time.Time{}, ""
	m.dropCode(c, unknownCode, "it answers")
	var resets []string
	// Energy is counted as long as the card is not reset, and nobody can clear that. Where it goes on growing a card was only out of sight, and errors
	// were only cleared.
	continuous := c.Energy != nil && s.EnergyMillijoules != nil && *s.EnergyMillijoules >= *c.Energy
	back := m.dropCode(c, lostCode, "it answers again")
	if m.dropCode(c, needsResetCode, "it needs no reset any more") && !continuous {
		resets = append(resets, "it needs no reset any more")
	}
	if back && !continuous {
		resets = append(resets, "it is back after it was lost")
	}
	if fewer(&c.Uncorrected, s.Uncorrected) && !continuous {
		resets = append(resets, "its error counters began anew")
	}
	if fewer(&c.Energy, s.EnergyMillijoules) {
		resets = append(resets, "its energy counter began anew")
	}
	if s.Remap != nil {
		if m.level(c, s.Remap.Pending, remapPending, "the row remap is done", at) {
			resets = append(resets, "its pending row remap has taken effect")
		}
		m.level(c, s.Remap.Failed, remapFailed, "no remap is failed any more", at)
	}
	m.fabric(c, s.Fabric, at, now)
	m.aged = m.aged || s.Uncorrected != nil || s.EnergyMillijoules != nil
	asked := c.asked
	c.asked = began
	// The driver knows by now what came before it was asked.
	m.recommended(c, s.Recovery, began)
	for _, why := range resets {
		m.wasReset(c, asked, why)
	}
}

// fewer keeps a number that only grows, and says whether it is smaller than it was.
func fewer(kept **uint64, now *uint64) bool {
	if now == nil {
		return false
	}
	before, value := *kept, *now
	*kept = &value
	return before != nil && value < *before
}
