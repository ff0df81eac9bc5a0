package health

import (
	"cmp"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

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
