package watch

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/wake"
)

// watchedGPU is one card in the child process of Run. A hung card blocks only its own goroutines.
type watchedGPU struct {
	order    watchOrder
	began    time.Time // start of the watch of all cards
	poller   *healthPoller
	progress wake.Signal // a query was answered
	pollNow  wake.Signal // poll at once
	events   *eventLoop
	report   func(device.Condition)
	opens    *nvmlx.PendingOpens
	onOpen   func() // called when the card has answered or is given up

	reporting sync.Mutex // held during a report
	stopped   bool
	cancel    context.CancelFunc

	mu   sync.Mutex
	last device.Reach // empty until the first poll
}

func (w *watchServer) watch(ctx context.Context, a device.PCIAddress) {
	c := &watchedGPU{
		order: w.order, began: w.began, progress: wake.New(), pollNow: wake.New(),
		opens: w.opens, onOpen: w.opens.Add(),
	}
	ctx, c.cancel = context.WithCancel(ctx)
	c.poller = newHealthPoller(w.order.Paths, w.lib, c.progress.Wake, a)
	c.events = &eventLoop{
		poller: newHealthPoller(w.order.Paths, w.lib, func() {}, a), wait: eventWait, retry: wake.New(),
		trouble: "not yet registered",
		onEvent: func(e device.HealthEvent) {
			w.send(device.Signal{Event: &e})
			c.pollNow.Wake() // the condition shows the event's effect
		},
		onFailure: c.pollNow.Wake,
		onChange:  w.stateChanged.Wake,
	}
	c.report = func(condition device.Condition) {
		c.reporting.Lock()
		defer c.reporting.Unlock()
		if !c.stopped {
			w.send(device.Signal{Condition: &condition})
		}
	}
	w.cards[a] = c
	go c.run(ctx)
	go c.events.run(ctx)
}

// stop ends all reports about the card. A query that hangs goes on hanging.
func (c *watchedGPU) stop() {
	c.reporting.Lock()
	c.stopped = true
	c.reporting.Unlock()
	c.onOpen()
	c.cancel()
}

func (c *watchedGPU) reach() device.Reach {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last
}

// run polls the card until ctx ends. While a query hangs, run reports the card as wedged at each
// interval and starts no other query. So a card blocks at most two threads, that of the query and
// that of its event loop.
func (c *watchedGPU) run(ctx context.Context) {
	for ctx.Err() == nil {
		answer := make(chan device.Condition, 1)
		go func() { answer <- c.poller.condition() }()
		limit, opensChanged := c.opens.Limit(c.order.Wedged)
		timer := time.NewTimer(limit)
		for waiting := true; waiting; {
			select {
			case condition := <-answer:
				c.onOpen()
				c.recordCondition(condition)
				waiting = false
			case <-c.progress:
				c.onOpen()
				limit, opensChanged = c.opens.Limit(c.order.Wedged)
				timer.Reset(limit)
			case <-opensChanged:
				limit, opensChanged = c.opens.Limit(c.order.Wedged)
				timer.Reset(limit)
			case <-timer.C:
				c.onOpen()
				opensChanged = nil
				// The hung query's goroutine may still write the UUID, so the condition has only
				// the address.
				c.recordCondition(device.Condition{
					Card: device.Card{PCIAddress: c.poller.card.PCIAddress}, Reach: device.ReachWedged, At: time.Now(),
					Error: fmt.Sprintf("NVML has not answered for %s", limit),
				})
				timer.Reset(c.order.Interval)
			case <-ctx.Done():
				waiting = false
			}
		}
		timer.Stop()
		c.pause(ctx)
	}
}

// pause returns when the next poll is due, earlier if an event asks for a poll, or when ctx ends.
// All idle cards are polled at the same moments, so that the processor wakes only once for all of
// them.
func (c *watchedGPU) pause(ctx context.Context) {
	asked, shortest := time.Now(), min(minPollInterval, c.order.Interval)
	next := c.order.Interval - asked.Sub(c.began)%c.order.Interval
	select {
	case <-ctx.Done():
	case <-c.pollNow:
		nvmlx.Sleep(ctx, time.Until(asked.Add(shortest)))
	case <-time.After(max(next, shortest)):
	}
}

// recordCondition reports the card's condition. If the card did not answer before and now does, its
// event loop subscribes again at once.
func (c *watchedGPU) recordCondition(condition device.Condition) {
	c.mu.Lock()
	recovered := condition.Reach == device.ReachOK && c.last != device.ReachOK
	c.last = condition.Reach
	c.mu.Unlock()
	if recovered {
		c.events.retry.Wake()
	}
	c.report(condition)
}
