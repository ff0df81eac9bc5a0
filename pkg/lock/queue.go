package lock

import (
	"context"
	"slices"
	"time"
)

// patience is for how long those who wait for a lock, and want others besides, keep the others free for themselves. It is long beside what a claim takes that
// asks the hardware for nothing, and short beside what a hanging GPU takes.
const patience = 500 * time.Millisecond

// queue hands names to those who want them: all that somebody wants at once, or none.
//
// Nobody holds a name while waiting for another, so that what hangs with one name keeps nobody from the rest. But who wants several would starve if others
// could always take one of them first. So they are kept for him, as long as all that he lacks are in hands that let go of names as one does: who has had one
// for longer than patience is not waited for at others' cost.
type queue struct {
	// taken has when each name that is not free was given.
	taken map[string]time.Time
	// waiting are in the order in which they came.
	waiting []*waiter
	// came counts them.
	came uint64
	// wake is when somebody's patience is over.
	wake *time.Timer
}

// waiter keeps its place where it has to ask again.
type waiter struct {
	place uint64
	names []string
	turn  chan struct{}
}

// serve gives those who wait what they want, first come first served.
func (q *queue) serve(now time.Time, again func()) {
	kept := map[string]bool{}
	var patient time.Duration // the least that is left of anybody's
	q.waiting = slices.DeleteFunc(q.waiting, func(w *waiter) bool {
		free, left := q.lacks(w, now)
		if free && !slices.ContainsFunc(w.names, func(name string) bool { return kept[name] }) {
			for _, name := range w.names {
				q.taken[name] = now
			}
			close(w.turn)
			return true
		}
		if left > 0 {
			for _, name := range w.names {
				kept[name] = true
			}
			if len(w.names) > 1 && !free && (patient == 0 || left < patient) {
				patient = left
			}
		}
		return false
	})
	if q.wake != nil {
		q.wake.Stop()
		q.wake = nil
	}
	if patient > 0 {
		q.wake = time.AfterFunc(patient, again)
	}
}

// lacks says whether all that one wants is free, and else how much patience is left with those who have it.
func (q *queue) lacks(w *waiter, now time.Time) (free bool, left time.Duration) {
	free, left = true, patience
	for _, name := range w.names {
		if since, busy := q.taken[name]; busy {
			free, left = false, min(left, patience-now.Sub(since))
		}
	}
	return free, left
}

// add keeps the order of places.
func (q *queue) add(w *waiter) {
	at, _ := slices.BinarySearchFunc(q.waiting, w, func(a, b *waiter) int {
		if a.place < b.place {
			return -1
		}
		return 1
	})
	q.waiting = slices.Insert(q.waiting, at, w)
}

func (s *Set) place() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queue.came++
	return s.queue.came
}

// enter takes all names, or none if the context ends.
func (s *Set) enter(ctx context.Context, place uint64, names []string) (waited bool, err error) {
	w := &waiter{place: place, names: names, turn: make(chan struct{})}
	s.mu.Lock()
	s.queue.add(w)
	s.serve()
	s.mu.Unlock()
	select {
	case <-w.turn:
		return false, nil
	default:
	}
	select {
	case <-w.turn:
		return true, nil
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if at := slices.Index(s.queue.waiting, w); at >= 0 {
		s.queue.waiting = slices.Delete(s.queue.waiting, at, at+1)
	} else { // its turn came in the meantime
		for _, name := range names {
			delete(s.queue.taken, name)
		}
	}
	s.serve()
	return true, ctx.Err()
}

// try takes all names if they are free now, whoever waits for them.
func (s *Set) try(names []string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		if _, busy := s.queue.taken[name]; busy {
			return false
		}
	}
	for _, name := range names {
		s.queue.taken[name] = time.Now()
	}
	return true
}

func (s *Set) leave(names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		delete(s.queue.taken, name)
	}
	s.serve()
}

// serve is for whoever has the mutex.
func (s *Set) serve() {
	s.queue.serve(time.Now(), func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.serve()
	})
}
