package nvidia

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	// restorePause lets cards that come back at about the same time share one replacement.
	restorePause = 500 * time.Millisecond
	// watchLimit bounds how long a mode change waits until its card is watched again. Without a watch
	// claims are prepared all the same.
	watchLimit = 5 * time.Second
)

// exclusions are the cards that no watcher process may have open, because their MIG mode changes.
// A process that has a card open may block the change, and NVML closes a card only when its process
// ends. So the watcher is replaced by a process without the card.
type exclusions struct {
	mu       sync.Mutex
	cards    map[device.PCIAddress]exclusion
	watchers map[*coverage]bool
	change   chan struct{} // closed with the next change
	trouble  error         // why the last replacement could not take over, nil if it did
	running  bool          // the watch runs, even while it has no process
}

type exclusion struct {
	requests int // mode changes that need it
	minor    int // N of the device node nvidiaN
}

// coverage is what one watcher process may have open.
type coverage struct {
	only   device.PCIAddress // empty for all cards
	except map[device.PCIAddress]exclusion
	pid    int  // 0 until the process has started
	killed bool // it goes when the driver lets it go
	hears  bool // the process listens to events
}

func (c *coverage) has(card device.PCIAddress) bool {
	_, excluded := c.except[card]
	return !excluded && (c.only == "" || c.only == card)
}

func newExclusions() *exclusions {
	return &exclusions{
		cards: map[device.PCIAddress]exclusion{}, watchers: map[*coverage]bool{}, change: make(chan struct{}),
	}
}

// exclude returns when no watcher process has the card open, and keeps it so until restore is called.
// A killed process that hangs in another card does not delay it for long: it may not block the
// change, and if it does, NVML says so.
func (x *exclusions) exclude(ctx context.Context, card device.PCIAddress, minor int) (restore func(), err error) {
	x.request(card, minor, 1)
	restore = sync.OnceFunc(func() { x.request(card, minor, -1) })
	var dying <-chan time.Time // nil while a living process has the card open
	for {
		changed, pids, killed := x.watchersOf(card)
		switch {
		case len(pids) == 0:
			return restore, nil
		case !killed:
			dying = nil
		case dying == nil:
			dying = time.After(killLimit)
		}
		select {
		case <-changed:
		case <-dying:
			return restore, nil
		case <-ctx.Done():
			restore()
			return nil, x.refusal(pids, killed, context.Cause(ctx))
		}
	}
}

// awaitWatch returns when a watcher process listens to the card, so that the first fault of a Pod on
// the card is heard.
func (x *exclusions) awaitWatch(ctx context.Context, card device.PCIAddress) {
	limit := time.NewTimer(watchLimit)
	defer limit.Stop()
	for {
		changed, watched := x.watched(card)
		if watched {
			return
		}
		select {
		case <-changed:
		case <-limit.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// watched is also true where no watch runs: then there is nothing to wait for.
func (x *exclusions) watched(card device.PCIAddress) (changed <-chan struct{}, watched bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	watched = !x.running
	for c := range x.watchers {
		watched = watched || c.has(card) && c.hears && !c.killed
	}
	return x.change, watched
}

// run records whether the watch runs.
func (x *exclusions) run(running bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.running = running
	x.announce()
}

// hear records that a watcher process listens to its cards.
func (x *exclusions) hear(c *coverage) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !c.hears {
		c.hears = true
		x.announce()
	}
}

// refusal names the processes, and what to do about those that were killed and hang in the driver.
func (x *exclusions) refusal(pids []string, killed bool, cause error) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	why, advice := "", ""
	if x.trouble != nil {
		why = fmt.Sprintf(", because its replacement does not listen to the other GPUs (%v)", x.trouble)
	}
	if killed {
		advice = ": look at dmesg, and reset the GPU or reboot the node"
	}
	return fmt.Errorf("the plugin's watcher (process %s) still has the GPU open%s: %w%s",
		strings.Join(pids, ", "), why, cause, advice)
}

// replaced records how the last replacement of a watcher process went.
func (x *exclusions) replaced(err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.trouble = err
}

func (x *exclusions) request(card device.PCIAddress, minor, more int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	e := exclusion{requests: x.cards[card].requests + more, minor: minor}
	if e.requests > 0 {
		x.cards[card] = e
	} else {
		delete(x.cards, card)
	}
	x.announce()
}

func (x *exclusions) has(card device.PCIAddress) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	_, excluded := x.cards[card]
	return excluded
}

// announce needs the lock.
func (x *exclusions) announce() {
	close(x.change)
	x.change = make(chan struct{})
}

// watchersOf lists the processes that have the card open, and says whether all of them were killed.
func (x *exclusions) watchersOf(card device.PCIAddress) (changed <-chan struct{}, pids []string, killed bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	killed = true
	for c := range x.watchers {
		if c.has(card) {
			pids = append(pids, fmt.Sprint(c.pid))
			killed = killed && c.killed
		}
	}
	slices.Sort(pids)
	return x.change, pids, killed
}

// changed is closed with the next change.
func (x *exclusions) changed() <-chan struct{} {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.change
}

// leaves says whether one of the cards is not excluded. No cards means that they are not known.
func (x *exclusions) leaves(cards []device.PCIAddress) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(cards) == 0 || slices.ContainsFunc(cards, func(a device.PCIAddress) bool {
		_, excluded := x.cards[a]
		return !excluded
	})
}

// begin registers a watcher process before it starts. It refuses one for a single excluded card.
func (x *exclusions) begin(only device.PCIAddress) (c *coverage, ok bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	c = &coverage{only: only, except: maps.Clone(x.cards)}
	if only != "" && !c.has(only) {
		return nil, false
	}
	x.watchers[c] = true
	return c, true
}

// started records the process ID for error messages.
func (x *exclusions) started(c *coverage, pid int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	c.pid = pid
}

// kill records that a watcher process was killed. It may hang in the driver before it ends.
func (x *exclusions) kill(c *coverage) {
	x.mu.Lock()
	defer x.mu.Unlock()
	c.killed = true
	x.announce()
}

// end removes a watcher process that has ended.
func (x *exclusions) end(c *coverage) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.watchers, c)
	x.announce()
}

// outdated says whether a watcher process needs a replacement: at once, because it has an excluded
// card open, or soon, because it lacks a card of its own that may be watched again.
func (x *exclusions) outdated(c *coverage) (now, soon bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for card := range x.cards {
		now = now || c.has(card)
	}
	for card := range c.except {
		_, excluded := x.cards[card]
		soon = soon || c.only == "" && !excluded
	}
	return now, soon
}
