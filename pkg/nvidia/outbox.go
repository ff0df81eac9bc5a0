package nvidia

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	// outboxLimit is how many signals may wait. Whoever has more then waits too: what NVML has not been asked for yet it keeps itself.
	outboxLimit = 1024
	// betweenBatches is how long is waited after signals were sent, so that a burst of like events becomes one with a count, and before answers are: those of
	// all cards come at about the same time.
	betweenBatches = 50 * time.Millisecond
)

// outbox sends signals in the order in which they came; an event, and what came before it, at once. Events alike that wait at the same time become one. It
// never drops any.
type outbox struct {
	mu      sync.Mutex
	waiting []*device.Signal
	events  map[eventKey]*device.HealthEvent
	added   chan struct{} // something waits
	urgent  chan struct{} // an event does
	taken   chan struct{} // closed when there is room again, nil while there is
}

func newOutbox() *outbox {
	return &outbox{events: map[eventKey]*device.HealthEvent{}, added: make(chan struct{}, 1), urgent: make(chan struct{}, 1)}
}

// eventKey tells events apart that say different things.
type eventKey struct {
	card              device.Card
	kind              device.EventKind
	xid               uint64
	recovery          device.RecoveryAction
	instance, compute uint32
	place             device.EventPlace
	attributed, sited bool
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
		k.place, k.sited = *e.Place, true
	}
	return k
}

// add waits while there is no room, unless ctx ends.
func (o *outbox) add(ctx context.Context, s device.Signal) {
	for {
		full := o.put(s)
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

// put is nil if the signal was taken, else what to wait for.
func (o *outbox) put(s device.Signal) (full <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if s.Event != nil {
		if alike := o.events[keyOf(*s.Event)]; alike != nil {
			alike.Count += max(s.Event.Count, 1)
			alike.At = s.Event.At
			return nil
		}
	}
	if len(o.waiting) >= outboxLimit {
		if o.taken == nil {
			o.taken = make(chan struct{})
		}
		return o.taken
	}
	if s.Event != nil {
		e := *s.Event
		e.Count = max(e.Count, 1)
		s.Event = &e
		o.events[keyOf(e)] = &e
		signalTo(o.urgent)
	}
	o.waiting = append(o.waiting, &s)
	signalTo(o.added)
	return nil
}

func (o *outbox) take() []*device.Signal {
	o.mu.Lock()
	defer o.mu.Unlock()
	batch := o.waiting
	o.waiting = nil
	clear(o.events)
	if o.taken != nil {
		close(o.taken)
		o.taken = nil
	}
	return batch
}

// send writes what is added as lines of JSON until ctx ends, and then what waits.
func (o *outbox) send(ctx context.Context, out io.Writer) error {
	encoder := json.NewEncoder(out)
	var sent time.Time
	for {
		select {
		case <-o.urgent:
			rest(ctx, time.Until(sent.Add(betweenBatches)))
		case <-o.added:
			select {
			case <-o.urgent:
				rest(ctx, time.Until(sent.Add(betweenBatches)))
			case <-time.After(betweenBatches):
			case <-ctx.Done():
			}
		case <-ctx.Done():
		}
		ended := ctx.Err() != nil
		if err := o.write(encoder); err != nil || ended {
			return err
		}
		sent = time.Now()
	}
}

func (o *outbox) write(to *json.Encoder) error {
	for _, s := range o.take() {
		if err := to.Encode(s); err != nil {
			return fmt.Errorf("send a signal: %w", err)
		}
	}
	return nil
}
