package health

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// applyRecovery updates the card with the recovery action a, which the driver reported at the time
// "at". If the driver asked for a reset before and now recommends nothing, the GPU was reset. Other
// recovery actions may end without a reset.
func (m *Monitor) applyRecovery(c *card, a device.RecoveryAction, at time.Time) {
	if a == device.RecoveryUnknown {
		return
	}
	if c.Recovery == device.RecoveryUnknown {
		m.rejudgeMemoryErrors(c)
	}
	c.Recovery = a
	c.ResetRequested = c.ResetRequested || isReset(a)
	m.endFindings(c, func(f *Finding) bool {
		return strings.HasPrefix(f.Code, recoveryPrefix) && f.Code != recoveryCode(a)
	}, "the driver's recovery action is now "+string(a))
	if meaning, asks := recoveryMeaning(a); asks {
		state, _ := meaning.stateAndEnd()
		m.addLevel(c, Finding{Code: recoveryCode(a), State: state, Reason: meaning.Text, Action: meaning.Action}, at)
	} else if c.ResetRequested {
		m.endByReset(c, at, "the driver no longer asks for a reset")
	}
}

// rejudgeMemoryErrors updates the memory errors that occurred before the driver first reported a
// recovery action. From then on that action decides whether they need a reset.
func (m *Monitor) rejudgeMemoryErrors(c *card) {
	meaning := eventMeaning(device.EventDoubleBitECC, true)
	for _, f := range c.Findings {
		if f.Code == string(device.EventDoubleBitECC) && f.Ends == EndsByReset {
			f.State, f.Ends = meaning.stateAndEnd()
			f.Reason, f.Action, f.Since = meaning.Text, meaning.Action, f.First
			m.recordChange(Change{Card: c.Card, Finding: *f})
		}
	}
}

const recoveryPrefix = "recovery-"

func recoveryCode(a device.RecoveryAction) string { return recoveryPrefix + string(a) }

// endByReset ends the findings that a reset ends, if they were last seen before the reset at the
// time "at". Findings from queries (EndsByLevel) end too, because the next query adds again
// those that persist. Those that no query renews stay: lost, hung, unknown, and what a scan
// compared.
func (m *Monitor) endByReset(c *card, at time.Time, why string) {
	lasting := []string{lostCode, hungCode, unknownCode}
	m.endFindings(c, func(f *Finding) bool {
		level := f.Ends == EndsByLevel && !slices.Contains(lasting, f.Code) && !strings.HasPrefix(f.Code, changedPrefix)
		return (f.Ends == EndsByReset || level) && !f.Last.After(at) || f.Code == fabricCode
	}, why)
	c.Arrived = m.now
	m.version++
	c.fabricMissingSince = time.Time{} // the fabric may take its full time again
	if _, asks := recoveryMeaning(c.Recovery); asks && c.find(recoveryCode(c.Recovery)) == nil {
		c.Recovery = device.RecoveryUnknown
	}
	c.ResetRequested = isReset(c.Recovery)
}

// These are codes of findings, and their remedies, for a GPU that does not answer as it should.
const (
	lostCode       = "lost"
	needsResetCode = "reset-required"
	lostAction     = "check dmesg for NVRM messages about this address; drain the node, then reset the GPU or power-cycle the node"
	unknownAction  = "check the plugin's log and whether nvidia-smi answers on the node"
	releasedAction = "nothing to do until the driver is replaced; then remove the request to release it"
)

// applyCondition updates the card from its answer to a query, or from the lack of an answer.
func (m *Monitor) applyCondition(c *card, s device.Condition, now time.Time) {
	at := notAfter(s.At, now)
	if s.Reach != device.ReachNotOurs && c.OtherDriver {
		c.OtherDriver = false
		m.version++
	}
	switch s.Reach {
	case device.ReachNotOurs:
		m.leave(c)
	case device.ReachOK:
		m.applyFullAnswer(c, s, at, now)
	case device.ReachNeedsReset:
		c.lastQuery, c.lastHeard, c.failingSince = at.Add(-max(s.Took, 0)), now, time.Time{}
		m.endUnknown(c, "the GPU answers")
		m.endCode(c, lostCode, "the GPU answers again")
		m.applyPartialAnswer(c, s, at)
		m.addLevel(c, Finding{Code: needsResetCode, State: Unhealthy,
			Reason: "the GPU does not work until it is reset (" + oneLine(s.Error) + ")", Action: reset}, at)
	case device.ReachLost:
		c.lastQuery, c.lastHeard, c.failingSince = at.Add(-max(s.Took, 0)), now, time.Time{}
		m.endUnknown(c, "the GPU is lost")
		m.addLevel(c, Finding{Code: lostCode, State: Lost,
			Reason: "the GPU is lost (" + cmp.Or(oneLine(s.Error), "NVML cannot reach it") + ")", Action: lostAction}, at)
	case device.ReachWedged:
		m.setUnknown(c, hungCode, "the GPU does not answer ("+cmp.Or(oneLine(s.Error), "an NVML call has not returned")+")", at)
	default:
		if c.failingSince.IsZero() {
			c.failingSince = now
		}
		m.applyPartialAnswer(c, s, at)
		c.lastHeard, c.failure = now, "the GPU answers with an error ("+cmp.Or(oneLine(s.Error), "unknown")+")"
		m.checkTimeouts(c, now)
	}
}

// applyPartialAnswer adds findings for the faults that an incomplete answer to a query reports. It
// ends no finding, because an incomplete answer does not prove a recovery.
func (m *Monitor) applyPartialAnswer(c *card, s device.Condition, at time.Time) {
	if _, asks := recoveryMeaning(s.Recovery); asks {
		m.applyRecovery(c, s.Recovery, at.Add(-max(s.Took, 0)))
	}
	if r := s.Remap; r != nil {
		if r.Pending {
			m.addLevel(c, remapPending, at)
		}
		if r.Failed {
			m.addLevel(c, remapFailed, at)
		}
	}
}

var (
	remapPending = Finding{Code: "remap-pending", State: Degraded,
		Reason: "a row remap is pending until the next reset", Action: "drain the node's Pods from this GPU at the next opportunity and reset it"}
	remapFailed = Finding{Code: "remap-failed", State: Unhealthy, Reason: "a row remap failed: the bad memory is still in use", Action: vendor}
)

func (m *Monitor) applyFullAnswer(c *card, s device.Condition, at, now time.Time) {
	queried := at.Add(-max(s.Took, 0)) // the answer does not include what happened during the query
	c.lastHeard, c.failingSince, c.failure = now, time.Time{}, ""
	m.endUnknown(c, "the GPU answers")
	var resets []string
	// Only a reset restarts the energy counter, and an admin cannot clear it. If the counter kept
	// growing, the GPU was not reset: it was only out of reach, or an admin cleared its error counter.
	continuous := c.Energy != nil && s.EnergyMillijoules != nil && *s.EnergyMillijoules >= *c.Energy
	back := m.endCode(c, lostCode, "the GPU answers again")
	if m.endCode(c, needsResetCode, "the GPU no longer needs a reset") && !continuous {
		resets = append(resets, "the GPU no longer needs a reset")
	}
	if back && !continuous {
		resets = append(resets, "the GPU is back after it was lost")
	}
	if decreased(&c.Uncorrected, s.Uncorrected) && !continuous {
		resets = append(resets, "the GPU's error counters restarted")
	}
	if decreased(&c.Energy, s.EnergyMillijoules) {
		resets = append(resets, "the GPU's energy counter restarted")
	}
	if s.Remap != nil {
		if m.setLevel(c, s.Remap.Pending, remapPending, "the row remap is done", at) {
			resets = append(resets, "the GPU's pending row remap took effect")
		}
		m.setLevel(c, s.Remap.Failed, remapFailed, "no row remap has failed any more", at)
	}
	m.applyFabric(c, s.Fabric, at, now)
	lastQuery := c.lastQuery
	c.lastQuery = queried
	// The answer's recovery action tells only what happened before the query began, so it is dated to
	// that time.
	m.applyRecovery(c, s.Recovery, queried)
	for _, why := range resets {
		m.endByReset(c, lastQuery, why)
	}
}

// decreased reports whether the new value of a counter is smaller than the last one, and stores the
// new value as the last. This means that the counter was set back.
func decreased(last **uint64, now *uint64) bool {
	if now == nil {
		return false
	}
	before, value := *last, *now
	*last = &value
	return before != nil && value < *before
}
