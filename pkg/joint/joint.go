// Package joint has work done once for all calls that ask for it at the same time: eight claims that come at once have one look at what is the same for all, and
// wait for the disk two or three times and not eight.
//
// What it promises: work counts only for those who asked before it began, so that whatever a caller did before is seen by the work, as if it were his own; nobody
// knows what work that is under way has looked at already. What it ends with is the answer of all who share it, and of nobody after them. Work for one key is
// never done twice at a time, and work for another is not waited for.
//
// It knows nothing of contexts: it is for work that ends by itself.
package joint

import "sync"

// Work is done jointly by those who ask for it with the same key. The zero value is ready.
type Work[K comparable] struct {
	mu    sync.Mutex
	turns map[K]*turns
}

// turns are those for one key.
type turns struct {
	now  chan struct{} // closed when the one that is under way has ended; nil while there is none
	next *turn         // has not begun; nil if nobody waits for that
}

// turn is the work done once, and what came of it.
type turn struct {
	done chan struct{}
	err  error
}

// Do returns what do returned, this caller's or that of another one with the key, which began after this call.
func (w *Work[K]) Do(key K, do func() error) error {
	w.mu.Lock()
	t := w.turns[key]
	if t == nil {
		t = &turns{}
		if w.turns == nil {
			w.turns = map[K]*turns{}
		}
		w.turns[key] = t
	}
	if mine := t.next; mine != nil {
		w.mu.Unlock()
		<-mine.done
		return mine.err
	}
	mine := &turn{done: make(chan struct{})}
	t.next = mine
	if now := t.now; now != nil {
		w.mu.Unlock()
		<-now
		w.mu.Lock()
	}
	t.next, t.now = nil, mine.done
	w.mu.Unlock()

	mine.err = do()

	w.mu.Lock()
	defer w.mu.Unlock()
	t.now = nil
	if t.next == nil {
		delete(w.turns, key)
	}
	close(mine.done)
	return mine.err
}
