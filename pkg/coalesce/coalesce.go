// Package coalesce runs a piece of work once for all callers that ask for the same work at the same
// time. Eight claims that arrive together then share one scan of the hardware, and wait for the
// disk two or three times instead of eight.
//
// A caller shares only work that starts after its call. So the work sees everything that the caller
// did before. All callers that share a run get its error, and later callers do not. Runs for one
// key never overlap. Runs for different keys never wait for each other.
//
// This is not singleflight, which may answer a call with work that started before the call. The
// package takes no context: use it for work that ends by itself.
package coalesce

import "sync"

// Group runs the function given to Do once for all concurrent calls with the same key. The zero
// value is ready to use.
type Group[K comparable] struct {
	mu   sync.Mutex
	keys map[K]*runs
}

// runs has the current run and the next run for one key. The next run has not started, so more
// callers can join it.
type runs struct {
	current chan struct{} // closed when the current run ends; nil if there is none
	next    *run          // has not started; nil if no caller waits for one
}

// run is one execution of a function that was given to Do, with the error that it returned.
type run struct {
	done chan struct{}
	err  error
}

// Do waits for a run of the given key that starts after this call, and returns the error of that
// run. The run executes the function of only one of the callers that wait for it.
func (g *Group[K]) Do(key K, do func() error) error {
	g.mu.Lock()
	t := g.keys[key]
	if t == nil {
		t = &runs{}
		if g.keys == nil {
			g.keys = map[K]*runs{}
		}
		g.keys[key] = t
	}
	if mine := t.next; mine != nil {
		g.mu.Unlock()
		<-mine.done
		return mine.err
	}
	mine := &run{done: make(chan struct{})}
	t.next = mine
	if current := t.current; current != nil {
		g.mu.Unlock()
		<-current
		g.mu.Lock()
	}
	t.next, t.current = nil, mine.done
	g.mu.Unlock()

	mine.err = do()

	g.mu.Lock()
	defer g.mu.Unlock()
	t.current = nil
	if t.next == nil {
		delete(g.keys, key)
	}
	close(mine.done)
	return mine.err
}
