package lock

import (
	"context"
	"slices"
	"time"
)

// reservationTime is how long the queue reserves free names for a waiter that needs several. It is
// long compared to a claim that reads no hardware, and short compared to a hung GPU.
const reservationTime = 500 * time.Millisecond

// queue grants names to waiters: all the names that a waiter wants at once, or none.
//
// No waiter has a name while it waits for another, so a busy name blocks only the waiters that want
// it. But a waiter for several names could starve if other waiters always took one of these names
// first. So the queue reserves its free names for it. The reservation ends when one of its other
// names has been busy for longer than reservationTime.
type queue struct {
	// since maps each name that a caller has to the time at which the queue granted it.
	since map[string]time.Time
	// waiting lists the waiters by their tickets, so in the order of their arrival.
	waiting []*waiter
	// tickets is the number of tickets given out so far.
	tickets uint64
	// wake runs the queue again when the next reservation ends.
	wake *time.Timer
}

// waiter is a caller that waits for names. Its ticket decides its position in the queue. A caller
// that must wait again keeps its ticket.
type waiter struct {
	ticket  uint64
	names   []string
	granted chan struct{}
}

// serve grants names to waiters, first come first served. If it reserves names for a waiter, it
// sets a timer that calls wakeUp when the reservation ends.
func (q *queue) serve(now time.Time, wakeUp func()) {
	reserved := map[string]bool{}
	var shortest time.Duration // time until the first reservation ends
	q.waiting = slices.DeleteFunc(q.waiting, func(w *waiter) bool {
		free, left := q.availability(w, now)
		if free && !slices.ContainsFunc(w.names, func(name string) bool { return reserved[name] }) {
			for _, name := range w.names {
				q.since[name] = now
			}
			close(w.granted)
			return true
		}
		if left > 0 {
			for _, name := range w.names {
				reserved[name] = true
			}
			if len(w.names) > 1 && !free && (shortest == 0 || left < shortest) {
				shortest = left
			}
		}
		return false
	})
	if q.wake != nil {
		q.wake.Stop()
		q.wake = nil
	}
	if shortest > 0 {
		q.wake = time.AfterFunc(shortest, wakeUp)
	}
}

// availability reports whether all names that the waiter wants are free. If they are not, left is
// how long the free ones stay reserved for the waiter.
func (q *queue) availability(w *waiter, now time.Time) (free bool, left time.Duration) {
	free, left = true, reservationTime
	for _, name := range w.names {
		if since, busy := q.since[name]; busy {
			free, left = false, min(left, reservationTime-now.Sub(since))
		}
	}
	return free, left
}

// add inserts the waiter into the queue in the order of the tickets.
func (q *queue) add(w *waiter) {
	at, _ := slices.BinarySearchFunc(q.waiting, w, func(a, b *waiter) int {
		if a.ticket < b.ticket {
			return -1
		}
		return 1
	})
	q.waiting = slices.Insert(q.waiting, at, w)
}

func (s *Set) nextTicket() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queue.tickets++
	return s.queue.tickets
}

// acquire takes all names, or none if the context ends first. waited reports whether it had to
// wait.
func (s *Set) acquire(ctx context.Context, ticket uint64, names []string) (waited bool, err error) {
	w := &waiter{ticket: ticket, names: names, granted: make(chan struct{})}
	s.mu.Lock()
	s.queue.add(w)
	s.serveQueue()
	s.mu.Unlock()
	select {
	case <-w.granted:
		return false, nil
	default:
	}
	select {
	case <-w.granted:
		return true, nil
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if at := slices.Index(s.queue.waiting, w); at >= 0 {
		s.queue.waiting = slices.Delete(s.queue.waiting, at, at+1)
	} else { // the queue granted the names when the context ended
		for _, name := range names {
			delete(s.queue.since, name)
		}
	}
	s.serveQueue()
	return true, ctx.Err()
}

// tryAcquire takes all names if they are free now, even if other callers wait for them. Otherwise
// it takes none and returns false.
func (s *Set) tryAcquire(names []string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		if _, busy := s.queue.since[name]; busy {
			return false
		}
	}
	for _, name := range names {
		s.queue.since[name] = time.Now()
	}
	return true
}

func (s *Set) release(names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		delete(s.queue.since, name)
	}
	s.serveQueue()
}

// serveQueue grants free names to the waiters. The caller holds the mutex s.mu.
func (s *Set) serveQueue() {
	s.queue.serve(time.Now(), func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.serveQueue()
	})
}
