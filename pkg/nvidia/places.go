package nvidia

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// placeLimit is how long an event may wait for where it happened. After that it counts as the whole card's.
const placeLimit = 5 * time.Second

// places finds where on a card the instance of an event is. The watcher's process must not ask: a handle of an instance keeps everybody from destroying
// it until that process ends. So the card's worker is asked, which is the one that destroys, as soon as the event comes: IDs are used again.
type places struct {
	look func(context.Context, Card) (State, error) // nil where nobody can be asked
	emit func(device.Signal)

	mu      sync.Mutex
	waiting map[device.PCIAddress][]*device.HealthEvent // by cards of which somebody is asked
	asking  sync.WaitGroup
}

// add emits the event when it is known where it was, at once where nobody need or can be asked. It does not wait, so that no card holds up another.
func (p *places) add(ctx context.Context, e device.HealthEvent) {
	if e.GPUInstance == nil || p.look == nil {
		p.emit(device.Signal{Event: &e})
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	at := e.Card.PCIAddress
	waiting, asked := p.waiting[at]
	alike := slices.IndexFunc(waiting, func(o *device.HealthEvent) bool { return keyOf(*o) == keyOf(e) })
	if alike >= 0 {
		waiting[alike].Count = max(waiting[alike].Count, 1) + max(e.Count, 1)
		waiting[alike].At = e.At
		return
	}
	if p.waiting == nil {
		p.waiting = map[device.PCIAddress][]*device.HealthEvent{}
	}
	p.waiting[at] = append(waiting, &e)
	if !asked {
		p.asking.Go(func() { p.serve(ctx, at) })
	}
}

// serve asks about one card until nothing waits.
func (p *places) serve(ctx context.Context, at device.PCIAddress) {
	for events := p.take(at); len(events) > 0; events = p.take(at) {
		limit, cancel := context.WithTimeout(ctx, placeLimit)
		state, err := p.look(limit, events[0].Card)
		cancel()
		for _, e := range events {
			if err == nil {
				e.Place = placeOf(state, *e)
			}
			p.emit(device.Signal{Event: e})
		}
	}
}

func (p *places) take(at device.PCIAddress) []*device.HealthEvent {
	p.mu.Lock()
	defer p.mu.Unlock()
	events := p.waiting[at]
	if len(events) == 0 {
		delete(p.waiting, at)
		return nil
	}
	p.waiting[at] = nil
	return events
}

// placeOf is nil for an instance that is not there any more.
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
