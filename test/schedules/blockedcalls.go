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

// errDead is the error that every call of a killed process returns.
var errDead = errors.New("the process is dead")

// blockedCall is a call of the plugin to the disk, the hardware, the MPS supervisor or the API
// server that waits until the schedule resumes it, with or without a fault.
type blockedCall struct {
	process   *process
	point     faultPoint
	goroutine uint64
	goOn      chan fault
}

// blockedCalls has the calls of the plugin that wait at fault points. The schedule resumes one at a
// time, so the whole run depends only on the order in which it resumes them.
type blockedCalls struct {
	mu      sync.Mutex
	waiting []*blockedCall
	// event receives a value when a call starts to wait at a fault point, and when a call of the
	// kubelet ends.
	event chan struct{}
}

func newBlockedCalls() *blockedCalls { return &blockedCalls{event: make(chan struct{}, 1)} }

func (b *blockedCalls) notify() {
	select {
	case b.event <- struct{}{}:
	default:
	}
}

// block makes the calling goroutine, a call of process p, wait at the fault point until the
// schedule resumes it. It returns the fault to inject, or none.
func (b *blockedCalls) block(p *process, point faultPoint) fault {
	at := &blockedCall{process: p, point: point, goroutine: goroutine(), goOn: make(chan fault, 1)}
	b.mu.Lock()
	b.waiting = append(b.waiting, at)
	b.mu.Unlock()
	b.notify()
	return <-at.goOn
}

// wait waits until every goroutine blocks, and returns the calls that wait at fault points.
// Their order is reproducible: by process, then in the order in which their goroutines started.
func (b *blockedCalls) wait() []*blockedCall {
	synctest.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	slices.SortFunc(b.waiting, func(a, b *blockedCall) int {
		return cmp.Or(cmp.Compare(a.process.id, b.process.id), cmp.Compare(a.goroutine, b.goroutine))
	})
	return slices.Clone(b.waiting)
}

func (b *blockedCalls) resume(at *blockedCall, f fault) {
	b.mu.Lock()
	b.waiting = slices.DeleteFunc(b.waiting, func(w *blockedCall) bool { return w == at })
	b.mu.Unlock()
	at.goOn <- f
}

// dismiss resumes all waiting calls of a killed process. They then return errDead.
func (b *blockedCalls) dismiss(of *process) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.waiting = slices.DeleteFunc(b.waiting, func(w *blockedCall) bool {
		if w.process == of {
			w.goOn <- none
			return true
		}
		return false
	})
}

// goroutine returns the running goroutine's number. With GOMAXPROCS=1, which TestMain sets, the
// numbers follow the order in which goroutines start.
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

// wait waits for d, or until the context ends.
func wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
