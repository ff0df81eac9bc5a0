package watch

import (
	"context"
	"encoding/json"
	"slices"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	// placeLimit bounds how long an event of a MIG instance waits for the instance's placement. An
	// event without placement counts for the whole card. So the limit is longer than what may delay
	// the answer: a MIG mode change of another card, or a start of NVML.
	placeLimit = 30 * time.Second
	// lastPlaceLimit replaces placeLimit after the watch has ended. It is shorter, because Run
	// returns only after these last events.
	lastPlaceLimit = releaseLimit - 2*time.Second
)

// placeResolver adds to an event of a MIG instance its placement, which the card's worker process
// reads. The watcher process must not open MIG instances, because an open one cannot be removed.
// The worker is asked at once, because the driver reuses instance IDs.
type placeResolver struct {
	look   func(context.Context, device.Card) (device.CardState, error) // Partitions.Look, nil without Partitions
	emit   func(device.Signal)
	ctx    context.Context //nolint:containedctx // bounds all queries, see finish
	cancel context.CancelFunc

	mu sync.Mutex
	// waiting has a key for each card whose worker is being asked. The values are the events that
	// wait for the worker's next answer.
	waiting map[device.PCIAddress][]*device.HealthEvent
	asking  sync.WaitGroup
}

func newPlaceResolver(emit func(device.Signal)) *placeResolver {
	ctx, cancel := context.WithCancel(context.Background())
	return &placeResolver{emit: emit, ctx: ctx, cancel: cancel, waiting: map[device.PCIAddress][]*device.HealthEvent{}}
}

// finish waits until the last events are emitted. Queries end after lastPlaceLimit.
func (r *placeResolver) finish() {
	defer time.AfterFunc(lastPlaceLimit, r.cancel).Stop()
	r.asking.Wait()
}

// add emits e after adding the placement of its MIG instance. It does not wait for the worker: a
// goroutine emits e later. An event without MIG instance is emitted at once.
func (r *placeResolver) add(e device.HealthEvent) {
	if e.GPUInstance == nil || r.look == nil {
		r.emit(device.Signal{Event: &e})
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	card := e.Card.PCIAddress
	waiting, asked := r.waiting[card]
	same := slices.IndexFunc(waiting, func(o *device.HealthEvent) bool { return keyOf(*o) == keyOf(e) })
	if same >= 0 {
		waiting[same].Count = max(waiting[same].Count, 1) + max(e.Count, 1)
		waiting[same].At = e.At
		return
	}
	r.waiting[card] = append(waiting, &e)
	if !asked {
		r.asking.Go(func() { r.resolve(card) })
	}
}

// resolve asks the card's worker for placements and emits the card's waiting events, until none
// waits. One answer serves all events that arrived before the question. If the worker gives no
// answer, the events have no placement.
func (r *placeResolver) resolve(card device.PCIAddress) {
	for events := r.take(card); len(events) > 0; events = r.take(card) {
		limit, cancel := context.WithTimeout(r.ctx, placeLimit)
		state, err := r.look(limit, events[0].Card)
		cancel()
		for _, e := range events {
			if err == nil {
				e.Place = placeOf(state, *e)
			}
			r.emit(device.Signal{Event: e})
		}
	}
}

func (r *placeResolver) take(card device.PCIAddress) []*device.HealthEvent {
	r.mu.Lock()
	defer r.mu.Unlock()
	events := r.waiting[card]
	if len(events) == 0 {
		delete(r.waiting, card)
		return nil
	}
	r.waiting[card] = nil
	return events
}

// keyOf identifies what an event says. Events with equal keys can be merged.
func keyOf(e device.HealthEvent) string {
	e.Count, e.At = 0, time.Time{}
	key, _ := json.Marshal(e) // fails for no event
	return string(key)
}

// placeOf returns the profile and placement of the MIG instance that e names, or nil if this MIG
// instance no longer exists.
func placeOf(s device.CardState, e device.HealthEvent) *device.EventPlace {
	for _, in := range s.MIG.Instances {
		if in.ID != *e.GPUInstance {
			continue
		}
		place := &device.EventPlace{ProfileID: in.ProfileID, Placement: in.Placement}
		for _, c := range in.Compute {
			if e.ComputeInstance != nil && c.ID == *e.ComputeInstance {
				place.Part = c.IsPart()
			}
		}
		return place
	}
	return nil
}
