package watch

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
)

const (
	// queueLimit is how many signals may wait in the queue. While the queue is full, add blocks,
	// and further events wait in NVML.
	queueLimit = 1024
	// batchInterval is the pause after sending the waiting signals. So a burst of equal events
	// becomes one event with a count.
	batchInterval = 50 * time.Millisecond
)

// eventQueue sends signals in order of arrival, with a pause after each batch. Equal events that
// wait at the same time are merged into one with a count. The queue never drops an event.
type eventQueue struct {
	mu      sync.Mutex
	waiting []*device.Signal
	events  map[eventKey]*device.HealthEvent
	added   chan struct{} // a signal waits
	room    chan struct{} // closed when there is room again, nil while there is room
}

func newEventQueue() *eventQueue {
	return &eventQueue{events: map[eventKey]*device.HealthEvent{}, added: make(chan struct{}, 1)}
}

// eventKey identifies what an event says. Events with equal keys can be merged.
type eventKey struct {
	card                device.Card
	kind                device.EventKind
	xid                 uint64
	recovery            device.RecoveryAction
	instance, compute   uint32
	place               device.EventPlace
	attributed, located bool
}

func keyOf(e device.HealthEvent) eventKey {
	k := eventKey{card: e.Card, kind: e.Kind, xid: e.XID, recovery: e.Recovery}
	if e.GPUInstance != nil {
		k.instance, k.attributed = *e.GPUInstance, true
	}
	if e.ComputeInstance != nil {
		k.compute = *e.ComputeInstance + 1
	}
	if e.Place != nil {
		k.place, k.located = *e.Place, true
	}
	return k
}

// add puts s into the queue. While the queue is full, add blocks. If ctx ends first, s is dropped.
func (q *eventQueue) add(ctx context.Context, s device.Signal) {
	for {
		full := q.put(s)
		if full == nil {
			return
		}
		select {
		case <-full:
		case <-ctx.Done():
			return
		}
	}
}

// put adds s if there is room, and returns nil. Otherwise it returns a channel that is closed when
// there is room.
func (q *eventQueue) put(s device.Signal) (full <-chan struct{}) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if s.Event != nil {
		if same := q.events[keyOf(*s.Event)]; same != nil {
			same.Count += max(s.Event.Count, 1)
			same.At = s.Event.At
			return nil
		}
	}
	if len(q.waiting) >= queueLimit {
		if q.room == nil {
			q.room = make(chan struct{})
		}
		return q.room
	}
	if s.Event != nil {
		e := *s.Event
		e.Count = max(e.Count, 1)
		s.Event = &e
		q.events[keyOf(e)] = &e
	}
	q.waiting = append(q.waiting, &s)
	signalTo(q.added)
	return nil
}

func (q *eventQueue) take() []*device.Signal {
	q.mu.Lock()
	defer q.mu.Unlock()
	batch := q.waiting
	q.waiting = nil
	clear(q.events)
	if q.room != nil {
		close(q.room)
		q.room = nil
	}
	return batch
}

// send writes the signals to out, as lines of JSON, until ctx ends. Then it writes those still in
// the queue and returns.
func (q *eventQueue) send(ctx context.Context, out io.Writer) error {
	encoder := json.NewEncoder(out)
	var sent time.Time
	for {
		select {
		case <-q.added:
			nvmlx.Sleep(ctx, time.Until(sent.Add(batchInterval)))
		case <-ctx.Done():
		}
		ended := ctx.Err() != nil
		if err := q.write(encoder); err != nil || ended {
			return err
		}
		sent = time.Now()
	}
}

func (q *eventQueue) write(to *json.Encoder) error {
	for _, s := range q.take() {
		if err := to.Encode(s); err != nil {
			return fmt.Errorf("send a signal: %w", err)
		}
	}
	return nil
}
