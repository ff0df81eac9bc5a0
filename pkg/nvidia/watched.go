package nvidia

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// watched is one card. Whatever it does to those who ask it, each holds up at most itself.
type watched struct {
	order    watchOrder
	began    time.Time // of the watch of all cards
	patient  *patient
	progress chan struct{} // a question was answered
	kicked   chan struct{} // it is to be asked at once
	listener *listener
	tell     func(device.Condition)
	back     chan<- device.PCIAddress
	opening  *openings
	opened   func() // it has answered, or it is not waited for any more

	left    bool   // it is off the bus, or has not answered since it was; for whoever asks it
	unbound bool   // it had no kernel driver, and has not answered since; for whoever asks it
	seat    uint64 // where it was on the bus when it last answered; for whoever asks it

	telling   sync.Mutex // while something is told
	dismissed bool
	cancel    context.CancelFunc

	mu   sync.Mutex
	last device.Reach // empty until it was asked once
}

func (w *watching) watch(ctx context.Context, a device.PCIAddress) {
	c := &watched{order: w.order, began: w.began, progress: make(chan struct{}, 1), kicked: make(chan struct{}, 1), back: w.back, opening: w.opening, opened: w.opening.enter()}
	ours := ctx // the child's; the card's own ends sooner if it is dismissed
	ctx, c.cancel = context.WithCancel(ctx)
	restate := func() { signalTo(w.restated) }
	c.patient = newPatient(newMIGReader(w.order.Paths, w.lib, func() { signalTo(c.progress) }), a)
	c.listener = &listener{
		patient: newPatient(newMIGReader(w.order.Paths, w.lib, func() {}), a), wait: eventWait, again: make(chan struct{}, 1),
		trouble: "not yet registered",
		heard: func(e device.HealthEvent) {
			w.outbox.add(ctx, device.Signal{Event: &e})
			signalTo(c.kicked) // what it has done to the card shows in its condition
		},
		failed:  func() { signalTo(c.kicked) },
		changed: restate,
	}
	c.tell = func(condition device.Condition) {
		c.telling.Lock()
		defer c.telling.Unlock()
		if !c.dismissed {
			w.outbox.add(ours, device.Signal{Condition: &condition})
		}
	}
	w.cards[a] = c
	go c.run(ctx)
	go c.listener.run(ctx)
}

func signalTo(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// dismiss has nothing more told of the card. A question that hangs may go on hanging.
func (c *watched) dismiss() {
	c.telling.Lock()
	c.dismissed = true
	c.telling.Unlock()
	c.opened()
	c.cancel()
}

func (c *watched) reach() device.Reach {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last
}

// run asks the card until ctx ends. While a question hangs the card is told to be wedged at each interval, and is asked nothing else: so a card costs
// two threads at most, this one and its listener's.
func (c *watched) run(ctx context.Context) {
	for ctx.Err() == nil {
		answer := make(chan device.Condition, 1)
		go func() { answer <- c.condition() }()
		most, another := c.opening.limit(c.order.Wedged)
		limit := time.NewTimer(most)
		for waiting := true; waiting; {
			select {
			case condition := <-answer:
				c.opened()
				c.answered(condition)
				waiting = false
			case <-c.progress:
				c.opened()
				most, another = c.opening.limit(c.order.Wedged)
				limit.Reset(most)
			case <-another:
				most, another = c.opening.limit(c.order.Wedged)
				limit.Reset(most)
			case <-limit.C:
				c.opened()
				another = nil
				// Its UUID is the questioner's, who is not to be asked now: the place says which card it is.
				c.answered(device.Condition{
					Card: device.Card{PCIAddress: c.patient.card.PCIAddress}, Reach: device.ReachWedged, At: time.Now(),
					Error: fmt.Sprintf("NVML has not answered for %s", most),
				})
				limit.Reset(c.order.Interval)
			case <-ctx.Done():
				waiting = false
			}
		}
		limit.Stop()
		c.pause(ctx)
	}
}

// pause waits until the card is to be asked again. Where nothing happens all cards are asked at the same moments: the processor is woken once for all of them.
func (c *watched) pause(ctx context.Context) {
	asked, shortest := time.Now(), min(betweenKicks, c.order.Interval)
	next := c.order.Interval - asked.Sub(c.began)%c.order.Interval
	select {
	case <-ctx.Done():
	case <-c.kicked:
		rest(ctx, time.Until(asked.Add(shortest)))
	case <-time.After(max(next, shortest)):
	}
}

func (c *watched) condition() device.Condition {
	condition, gone := c.patient.condition()
	driver, seat := pciDriver(c.order.Paths.Sysfs, condition.Card.PCIAddress), pciSeat(c.order.Paths.Sysfs, condition.Card.PCIAddress)
	// A card may leave and come between two questions.
	c.left = c.left || gone || c.seat != 0 && seat != c.seat
	switch {
	case gone:
	case condition.Reach == device.ReachOK:
		c.left, c.unbound, c.seat = false, false, seat
	case c.left, c.unbound && driver == nvidiaDriver:
		select {
		case c.back <- condition.Card.PCIAddress:
		default:
		}
	case driver == "":
		c.unbound = true
	}
	return condition
}

// answered tells how the card is. One that is well again is listened to again at once.
func (c *watched) answered(condition device.Condition) {
	c.mu.Lock()
	again := condition.Reach == device.ReachOK && c.last != device.ReachOK
	c.last = condition.Reach
	c.mu.Unlock()
	if again {
		signalTo(c.listener.again)
	}
	c.tell(condition)
}
