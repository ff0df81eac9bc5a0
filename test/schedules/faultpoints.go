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

// faultPoint is a call of the plugin to the disk, the hardware, the MPS supervisor or the API
// server that waits until the schedule resumes it, with or without a fault.
type faultPoint struct {
	process   *process
	step      step
	goroutine uint64
	goOn      chan fault
}

// faultPoints has the plugin's calls that wait. The schedule resumes one at a time, so the whole
// run depends only on the order in which it resumes them.
type faultPoints struct {
	mu      sync.Mutex
	waiting []*faultPoint
	// event receives a value when a call starts to wait at a fault point, and when a call of the
	// kubelet ends.
	event chan struct{}
}

func newFaultPoints() *faultPoints { return &faultPoints{event: make(chan struct{}, 1)} }

func (p *faultPoints) notify() {
	select {
	case p.event <- struct{}{}:
	default:
	}
}

// reach makes the calling goroutine, a call of the process in parameter of, wait at step s until
// the schedule resumes it. It returns the fault to inject, or none.
func (p *faultPoints) reach(of *process, s step) fault {
	at := &faultPoint{process: of, step: s, goroutine: goroutine(), goOn: make(chan fault, 1)}
	p.mu.Lock()
	p.waiting = append(p.waiting, at)
	p.mu.Unlock()
	p.notify()
	return <-at.goOn
}

// blocked waits until every goroutine blocks, and returns the calls that wait at fault points.
// Their order is reproducible: by process, then in the order in which their goroutines started.
func (p *faultPoints) blocked() []*faultPoint {
	synctest.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	slices.SortFunc(p.waiting, func(a, b *faultPoint) int {
		return cmp.Or(cmp.Compare(a.process.id, b.process.id), cmp.Compare(a.goroutine, b.goroutine))
	})
	return slices.Clone(p.waiting)
}

func (p *faultPoints) resume(at *faultPoint, f fault) {
	p.mu.Lock()
	p.waiting = slices.DeleteFunc(p.waiting, func(w *faultPoint) bool { return w == at })
	p.mu.Unlock()
	at.goOn <- f
}

// dismiss resumes all waiting calls of a killed process. They then return errDead.
func (p *faultPoints) dismiss(of *process) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.waiting = slices.DeleteFunc(p.waiting, func(w *faultPoint) bool {
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
