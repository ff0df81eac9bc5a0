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
// ran. It also drops answers of the replacement that are older than those of the old process.
type overlap struct {
	heard    map[string]int             // events that the old process received. Nil if there is no overlap
	answered map[device.PCIAddress]bool // cards of which the old process sent an answer
	until    time.Time                  // when the old process ended, zero before that
}

func newOverlap() overlap {
	return overlap{heard: map[string]int{}, answered: map[device.PCIAddress]bool{}}
}

// outdated reports whether the old process may have sent a newer answer of the card than c. Next to
// that one the counters in c would look as if a reset had set them back.
func (o *overlap) outdated(c device.Condition) bool {
	if o.heard == nil || c.Reach != device.ReachOK {
		return false
	}
	if o.until.IsZero() {
		o.answered[c.Card.PCIAddress] = true
		return false
	}
	// A clock that is set back must not hide a card for long.
	return o.answered[c.Card.PCIAddress] && c.At.Before(o.until) && time.Since(o.until) < replaceLimit
}

// repeated subtracts from the count of e the equal events that the old process already emitted. If
// none is left, it returns true, and the caller drops e.
func (o *overlap) repeated(e *device.HealthEvent) bool {
	if o.heard == nil {
		return false
	}
	key, count := keyOf(*e), max(e.Count, 1)
	if o.until.IsZero() {
		o.heard[key] += count
		return false
	}
	if e.At.After(o.until.Add(maxReceiveSkew)) {
		return false
	}
	before := min(o.heard[key], count)
	o.heard[key] -= before
	e.Count = count - before
	return e.Count == 0
}
