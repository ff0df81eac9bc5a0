package nvmlx

import (
	"sync"
	"time"
)

// PendingOpens counts the cards that have not answered NVML yet. The driver attaches GPUs one after
// another, and each takes seconds. So a card that waits for all others does not hang. Until all
// cards have answered, the limit is multiplied by the number of waiting cards and restarts with
// each answer.
type PendingOpens struct {
	mu      sync.Mutex
	waiting int
	changed chan struct{} // closed when a card stops waiting
}

// NewPendingOpens returns a count of no cards.
func NewPendingOpens() *PendingOpens { return &PendingOpens{changed: make(chan struct{})} }

// Add counts one more waiting card. The caller calls done when the card has answered, or when it
// stops waiting for the card. Only the first call of done counts.
func (o *PendingOpens) Add() (done func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.waiting++
	return sync.OnceFunc(func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.waiting--
		close(o.changed)
		o.changed = make(chan struct{})
	})
}

// Limit returns how long a card may take from now on. own is the limit of a card that waits for no
// other. When changed is closed, the caller must ask again.
func (o *PendingOpens) Limit(own time.Duration) (now time.Duration, changed <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return own * time.Duration(max(1, o.waiting)), o.changed
}
