package watch

import (
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	// replaceLimit bounds how long the old watcher process waits until its replacement receives the
	// events of all cards. After that a replacement that has started NVML takes over anyway, and
	// reports from which cards it receives no events.
	replaceLimit = 20 * time.Second
	// maxReceiveSkew is how much later than the old watcher process its replacement may receive the
	// same event.
	maxReceiveSkew = 200 * time.Millisecond
)

// overlap drops events that both the old watcher process and its replacement received. It keeps an
// event that only one of them received, unless the other one received an equal event while both
// ran.
type overlap struct {
	heard map[string]int // events that the old process received
	until time.Time      // when the old process ended, zero before that
}

// lastAnswers has the last good answer of each card: when it was complete, and when it was emitted.
type lastAnswers map[device.PCIAddress]struct{ at, emitted time.Time }

// overtaken reports whether another process has asked the card later than c did, and its answer was
// emitted before. Next to that one, the counters in c would look as if a reset had set them back.
func (a lastAnswers) overtaken(c device.Condition) bool {
	last, known := a[c.Card.PCIAddress]
	// A clock that is set back must not hide a card for long.
	if known && c.At.Add(-max(c.Took, 0)).Before(last.at) && time.Since(last.emitted) < replaceLimit {
		return true
	}
	if c.Reach == device.ReachOK {
		a[c.Card.PCIAddress] = struct{ at, emitted time.Time }{c.At, time.Now()}
	}
	return false
}

// repeated reports whether the old process already emitted an event equal to e, so that the caller
// drops e. Each event of the old process counts once.
func (o *overlap) repeated(e device.HealthEvent) bool {
	if o.heard == nil {
		return false
	}
	key := keyOf(e)
	if o.until.IsZero() {
		o.heard[key]++
		return false
	}
	if o.heard[key] == 0 || e.At.After(o.until.Add(maxReceiveSkew)) {
		return false
	}
	o.heard[key]--
	return true
}
