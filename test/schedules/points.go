package schedules

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing/synctest"
	"time"
)

// errDead is what every call of a process gets that was killed.
var errDead = errors.New("the process is dead")

// point is a call to something outside the process, which waits for its turn.
type point struct {
	process   *process
	step      step
	goroutine uint64
	goOn      chan fault
}

// points are the calls that wait. One goroutine at a time gets on, so that who is next is all that decides what happens.
type points struct {
	mu      sync.Mutex
	waiting []*point
	// event is told of each point that is reached and of each call of the kubelet that ends.
	event chan struct{}
}

func newPoints() *points { return &points{event: make(chan struct{}, 1)} }

func (p *points) tell() {
	select {
	case p.event <- struct{}{}:
	default:
	}
}

// reach waits for the turn of a call, and says what is to go wrong with it.
func (p *points) reach(of *process, s step) fault {
	at := &point{process: of, step: s, goroutine: goroutine(), goOn: make(chan fault, 1)}
	p.mu.Lock()
	p.waiting = append(p.waiting, at)
	p.mu.Unlock()
	p.tell()
	return <-at.goOn
}

// settled are the waiting calls, when nothing moves by itself any more, in an order that is the same each time: that in which their goroutines were made.
func (p *points) settled() []*point {
	synctest.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	slices.SortFunc(p.waiting, func(a, b *point) int {
		return cmp.Or(cmp.Compare(a.process.id, b.process.id), cmp.Compare(a.goroutine, b.goroutine))
	})
	return slices.Clone(p.waiting)
}

func (p *points) grant(at *point, f fault) {
	p.mu.Lock()
	p.waiting = slices.DeleteFunc(p.waiting, func(w *point) bool { return w == at })
	p.mu.Unlock()
	at.goOn <- f
}

// dismiss lets all calls of a dead process go.
func (p *points) dismiss(of *process) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.waiting = slices.DeleteFunc(p.waiting, func(w *point) bool {
		if w.process == of {
			w.goOn <- none
			return true
		}
		return false
	})
}

// goroutine is the running goroutine's number. They are given in the order in which goroutines are made, on one processor: see [Main].
func goroutine() uint64 {
	var buffer [64]byte
	text := buffer[:runtime.Stack(buffer[:], false)]
	text = bytes.TrimPrefix(text, []byte("goroutine "))
	if end := bytes.IndexByte(text, ' '); end > 0 {
		n, err := strconv.ParseUint(string(text[:end]), 10, 64)
		if err == nil {
			return n
		}
	}
	return 0
}

// wait lets time pass, for as long as the context wants it.
func wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
