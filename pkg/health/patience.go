package health

import (
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// How long is waited for what may come right by itself.
const (
	// errorsFor is how long a card may answer with errors before nobody knows how it is.
	errorsFor = 10 * time.Second
	// silenceFor is how long a card, or who listens to all of them, may say nothing.
	silenceFor = 30 * time.Second
	// fabricFor is how long a card may take to join its NVLink fabric: it does so after a boot, and after leaving MIG mode.
	fabricFor = time.Minute
	// renewAfter is how much older what was saved may be than what is known, as far as no verdict depends on it now.
	renewAfter = time.Minute
	// DefaultQuiet is how long nothing may have come before what ends by time is over.
	DefaultQuiet = 10 * time.Minute
)

const (
	unknownCode = "unknown"
	fabricCode  = "fabric"
)

// unknown says that nobody can say anything about the card.
func (m *Monitor) unknown(c *card, reason string, at time.Time) {
	if c.find(lostCode) != nil {
		return // that is known
	}
	m.level(c, true, Finding{Code: unknownCode, State: Unknown, Reason: reason, Action: unknownAction}, "", at)
}

// Calm says that no verdict changes for that long if nothing is said, and that there is nothing else to be told: nothing is known against any card, and all were
// heard of lately.
func (m *Monitor) Calm(now time.Time, long time.Duration) bool {
	if !m.silent.IsZero() || m.deaf != "" || len(m.counts) > 0 {
		return false
	}
	for _, c := range m.cards {
		if c.Away {
			continue
		}
		if len(c.Findings) > 0 || !c.failing.IsZero() || !c.fabricless.IsZero() || now.Sub(c.heard) >= silenceFor-long {
			return false
		}
	}
	return true
}

// patience ends what has not come again, and gives up on what does not answer.
func (m *Monitor) patience(c *card, now time.Time) {
	for _, f := range c.Findings {
		if f.Last.After(now) { // somebody has set the clock back
			f.Last = now
		}
	}
	m.drop(c, func(f *Finding) bool { return f.Ends == EndsByTime && now.Sub(f.Last) >= m.quiet }, "it has not come again for "+m.quiet.String())
	switch {
	case c.Away:
	case m.released:
		m.unknown(c, "the hardware has been let go of, for an upgrade of its driver", now)
	case !m.silent.IsZero() && now.Sub(m.silent) >= silenceFor:
		m.unknown(c, "nobody listens to the hardware ("+m.silence+")", now)
	case !c.failing.IsZero() && now.Sub(c.failing) >= errorsFor:
		m.unknown(c, c.failure, now)
	case now.Sub(c.heard) >= silenceFor:
		m.unknown(c, "the GPU has not been heard of for a while", now)
	}
	if !c.fabricless.IsZero() && now.Sub(c.fabricless) >= fabricFor {
		m.level(c, true, Finding{
			Code: fabricCode, Part: Part{Links: true}, State: Unhealthy, Reason: "the GPU has not joined its NVLink fabric, without which CUDA does not start",
			Action: "look at nvidia-fabricmanager on the node",
		}, "", now)
	}
}

// fabric judges the card's membership in its NVLink fabric.
func (m *Monitor) fabric(c *card, f *device.Fabric, at, now time.Time) {
	if f == nil {
		return
	}
	if f.State == device.FabricNotUsed {
		c.fabricless = time.Time{}
		m.dropCode(c, fabricCode, "the GPU is in MIG mode, which does without")
		m.dropCode(c, "fabric-error", "the GPU is in MIG mode, which does without")
		return
	}
	if f.State != device.FabricCompleted {
		m.dropCode(c, "fabric-error", "the GPU joins its fabric anew")
		if c.fabricless.IsZero() {
			c.fabricless = now
		}
		m.patience(c, now)
		return
	}
	c.fabricless = time.Time{}
	m.dropCode(c, fabricCode, "the GPU has joined its fabric")
	m.level(c, f.Error != "", Finding{
		Code: "fabric-error", Part: Part{Links: true}, State: Degraded, Reason: "the GPU's NVLink fabric has an error (" + clean(f.Error) + ")",
		Action: "look at nvidia-fabricmanager on the node",
	}, "the fabric has no error any more", at)
}

// clean makes one short line of what somebody else wrote.
func clean(s string) string {
	const most = 200
	s = strings.ToValidUTF8(strings.Join(strings.Fields(s), " "), "")
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}
