package health

import (
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// These times say how long the monitor waits for a recovery before it changes a verdict.
const (
	// maxErrorTime is how long a card may answer with errors before its state becomes Unknown.
	maxErrorTime = 10 * time.Second
	// maxSilence is how long a card may send no answer before its state becomes Unknown. If the
	// watcher process is down for that long, all cards become Unknown.
	maxSilence = 30 * time.Second
	// fabricTimeout is how long a card may take to join its NVLink fabric after a boot or after it
	// leaves MIG mode.
	fabricTimeout = time.Minute
	// quietPeriod is how long a passing error must not recur before the monitor ends the
	// finding about it.
	quietPeriod = 10 * time.Minute
)

const (
	hungCode    = "hung" // an NVML call about the GPU has not returned
	unknownCode = "unknown"
	fabricCode  = "fabric"
)

// setUnknown adds a finding that the card's state cannot be determined, unless the card is already
// known to be lost. code is hungCode or unknownCode.
func (m *Monitor) setUnknown(c *card, code, reason string, at time.Time) {
	if c.find(lostCode) != nil {
		return // that the card is lost says more than unknown
	}
	action := unknownAction
	if m.released {
		action = releasedAction
	}
	m.addLevel(c, Finding{Code: code, State: Unknown, Reason: reason, Action: action}, at)
}

// endUnknown ends the findings of setUnknown.
func (m *Monitor) endUnknown(c *card, why string) {
	m.endCode(c, hungCode, why)
	m.endCode(c, unknownCode, why)
}

// checkTimeouts ends the card's findings that have not recurred for the quiet period. It adds
// findings for a card that has not answered or joined its fabric in time.
func (m *Monitor) checkTimeouts(c *card, now time.Time) {
	setBack := clamp(now, &c.Arrived)
	for _, f := range c.Findings {
		setBack = clamp(now, &f.First, &f.Last, &f.Since) || setBack
	}
	if setBack {
		m.version++ // taints have these times
	}
	m.endFindings(c, func(f *Finding) bool {
		return f.Ends == EndsByTime && now.Sub(f.Last) >= quietPeriod
	}, "it has not recurred for "+quietPeriod.String())
	switch {
	case c.OtherDriver:
	case m.released:
		m.setUnknown(c, unknownCode, "the GPU is released for a driver upgrade", now)
	case !m.silentSince.IsZero() && now.Sub(m.silentSince) >= maxSilence:
		m.setUnknown(c, unknownCode, "no watcher runs ("+m.silenceReason+")", now)
	case !c.failingSince.IsZero() && now.Sub(c.failingSince) >= maxErrorTime:
		m.setUnknown(c, unknownCode, c.failure, now)
	case now.Sub(c.lastHeard) >= maxSilence:
		m.setUnknown(c, unknownCode, "the GPU has not answered for a while", now)
	}
	if !c.fabricMissingSince.IsZero() && now.Sub(c.fabricMissingSince) >= fabricTimeout {
		m.addLevel(c, Finding{
			Code: fabricCode, Part: Part{Links: true}, State: Unhealthy,
			Reason: "the GPU has not joined its NVLink fabric, and CUDA does not start without it",
			Action: "check nvidia-fabricmanager on the node",
		}, now)
	}
}

// applyFabric updates the findings about the card's NVLink fabric with the state f. It changes
// nothing if f is nil, because the fabric is then unknown or there is none.
func (m *Monitor) applyFabric(c *card, f *device.Fabric, when, now time.Time) {
	if f == nil {
		return
	}
	if f.State == device.FabricNotUsed {
		c.fabricMissingSince = time.Time{}
		m.endCode(c, fabricCode, "the GPU is in MIG mode, which does not use the fabric")
		m.endCode(c, "fabric-error", "the GPU is in MIG mode, which does not use the fabric")
		return
	}
	if f.State != device.FabricCompleted {
		m.endCode(c, "fabric-error", "the GPU is joining its fabric again")
		if c.fabricMissingSince.IsZero() {
			c.fabricMissingSince = now
		}
		m.checkTimeouts(c, now)
		return
	}
	c.fabricMissingSince = time.Time{}
	m.endCode(c, fabricCode, "the GPU has joined its fabric")
	m.setLevel(c, f.Error != "", Finding{
		Code: "fabric-error", Part: Part{Links: true}, State: Degraded,
		Reason: "the GPU's NVLink fabric has an error (" + oneLine(f.Error) + ")",
		Action: "check nvidia-fabricmanager on the node",
	}, "the fabric no longer has an error", when)
}

// oneLine returns an error text from NVML or the watcher process as one line of valid UTF-8,
// shortened to about 200 bytes.
func oneLine(s string) string {
	const maxLength = 200
	s = strings.ToValidUTF8(strings.Join(strings.Fields(s), " "), "")
	if len(s) > maxLength {
		s = strings.ToValidUTF8(s[:maxLength], "") + "…"
	}
	return s
}

// notAfter returns the time of a signal, or now if the signal has none or one of a clock that was
// set back since.
func notAfter(at, now time.Time) time.Time {
	if at.IsZero() {
		return now
	}
	clamp(now, &at)
	return at
}

// clamp sets the times to now that are of a clock that was set back since. It compares what clocks
// showed, because the monotonic readings of times in one process ignore that.
func clamp(now time.Time, times ...*time.Time) (setBack bool) {
	for _, at := range times {
		if at.Round(0).After(now) {
			*at, setBack = now, true
		}
	}
	return setBack
}
