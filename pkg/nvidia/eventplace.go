package nvidia

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	// placeLimit bounds how long an event waits for its place. After that it counts for the whole card,
	// so it is longer than a mode change elsewhere or the start of NVML as a rule takes.
	placeLimit = 30 * time.Second
	// lastPlaceLimit is the same after the end of the watch, which waits for it.
	lastPlaceLimit = releaseLimit - 2*time.Second
)

// outlasting ends lastPlaceLimit after ctx: what was heard last has a place too.
func outlasting(ctx context.Context) (context.Context, context.CancelFunc) {
	longer, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		rest(longer, lastPlaceLimit)
		cancel()
	})
	return longer, func() {
		stop()
		cancel()
	}
}

// placeResolver finds where on a card the instance of an event is. The watcher process must not ask
// NVML: its handle of the instance would block the instance's removal. So the card's worker is
// asked, as soon as the event arrives, because instance IDs are reused.
type placeResolver struct {
	look func(context.Context, Card) (State, error) // nil where there are no workers
	emit func(device.Signal)

	mu      sync.Mutex
	waiting map[device.PCIAddress][]*device.HealthEvent // has a key for each card that is being asked
	asking  sync.WaitGroup
}

// add emits the event, after it has resolved the place if there is one. It does not block.
func (r *placeResolver) add(ctx context.Context, e device.HealthEvent) {
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
	if r.waiting == nil {
		r.waiting = map[device.PCIAddress][]*device.HealthEvent{}
	}
	r.waiting[card] = append(waiting, &e)
	if !asked {
		r.asking.Go(func() { r.resolve(ctx, card) })
	}
}

// resolve asks the card's worker until no event waits. Each answer serves all events before it.
func (r *placeResolver) resolve(ctx context.Context, card device.PCIAddress) {
	for events := r.take(card); len(events) > 0; events = r.take(card) {
		limit, cancel := context.WithTimeout(ctx, placeLimit)
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

// placeOf is nil for an instance that no longer exists.
func placeOf(s State, e device.HealthEvent) *device.EventPlace {
	for _, in := range s.MIG.Instances {
		if in.ID != *e.GPUInstance {
			continue
		}
		place := &device.EventPlace{ProfileID: in.ProfileID, Placement: in.Placement}
		for _, c := range in.Compute {
			if e.ComputeInstance != nil && c.ID == *e.ComputeInstance {
				place.Part = isPart(c)
			}
		}
		return place
	}
	return nil
}
