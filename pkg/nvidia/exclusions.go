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
	// restorePause is the wait before a watcher process is replaced to watch a card again, so that
	// cards whose mode changes end at about the same time share one replacement.
	restorePause = 500 * time.Millisecond
	// watchLimit bounds how long a MIG mode change waits until its card is watched again. After that
	// the claim is prepared without the watch.
	watchLimit = 5 * time.Second
)

// exclusions are the cards that no watcher process may have open, because their MIG mode changes.
// An open card may block the change, and NVML closes a card only when its process ends. So a new
// watcher process without this card replaces the current one.
type exclusions struct {
	mu       sync.Mutex
	cards    map[device.PCIAddress]exclusion
	watchers map[*coverage]bool
	change   chan struct{} // closed with the next change
	trouble  error         // why the last replacement could not take over, nil if it did
	running  bool          // the watch runs, even while it has no process
}

// exclusion says how many MIG mode changes exclude a card from the watch now.
type exclusion struct {
	requests int // MIG mode changes that exclude the card
	minor    int // N of the device node nvidiaN
}

// coverage says which cards one watcher process may have open.
type coverage struct {
	only    device.PCIAddress // empty for all cards
	except  map[device.PCIAddress]exclusion
	pid     int  // 0 until the process has started
	killed  bool // the process was killed, but it may hang in the driver
	listens bool // the process listens to events
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

// exclude returns when no watcher process has the card open, or killLimit after the last ones that
// do were killed. No new one opens the card until restore is called. If ctx ends first, exclude
// returns an error with the processes that have the card open.
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

// awaitWatch returns when a watcher process receives the card's events, when watchLimit has passed,
// or when ctx ends. This wait keeps the watcher from missing the first fault of a Pod on this card.
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

// watched reports whether a watcher process receives the card's events. It is also true if the
// watch does not run, because then there is nothing to wait for. The channel changed is closed when
// the result may be another one.
func (x *exclusions) watched(card device.PCIAddress) (changed <-chan struct{}, watched bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	watched = !x.running
	for c := range x.watchers {
		watched = watched || c.has(card) && c.listens && !c.killed
	}
	return x.change, watched
}

// run records whether [Watch] runs.
func (x *exclusions) run(running bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.running = running
	x.announce()
}

// listening records that the watcher process with the coverage c now receives events of the cards
// that it covers.
func (x *exclusions) listening(c *coverage) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !c.listens {
		c.listens = true
		x.announce()
	}
}

// refusal returns the error of an exclusion that failed. pids are the processes that still have the
// card open. killed says that all of them were killed, so they hang in the driver.
func (x *exclusions) refusal(pids []string, killed bool, cause error) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	why, advice := "", ""
	if x.trouble != nil {
		why = fmt.Sprintf(", because its replacement does not listen to the other GPUs (%v)", x.trouble)
	}
	if killed {
		advice = ": check dmesg, and reset the GPU or reboot the node"
	}
	return fmt.Errorf("the plugin's watcher (process %s) still has the GPU open%s: %w%s",
		strings.Join(pids, ", "), why, cause, advice)
}

// replaced records why the last attempt to replace a watcher process failed, or nil. The error of
// refusal contains it.
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

// announce wakes all who wait for a change of the exclusions or watcher processes. The caller must
// hold x.mu.
func (x *exclusions) announce() {
	close(x.change)
	x.change = make(chan struct{})
}

// watchersOf returns the process IDs of the watcher processes that have the card open. killed is
// true if all of them were killed. changed is a channel that is closed at the next change of the
// exclusions or of the watcher processes.
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

// changes returns a channel that is closed with the next change of the exclusions or watcher
// processes.
func (x *exclusions) changes() <-chan struct{} {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.change
}

// leavesAny reports whether at least one of the cards is not excluded from the watch. It is also
// true if cards is empty, because then the cards are unknown.
func (x *exclusions) leavesAny(cards []device.PCIAddress) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(cards) == 0 || slices.ContainsFunc(cards, func(a device.PCIAddress) bool {
		_, excluded := x.cards[a]
		return !excluded
	})
}

// begin registers a watcher process before its start. If only is set, the process watches this one
// card, otherwise all cards. ok is false if this one card is excluded.
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

// started records the process ID of a watcher process, for error messages.
func (x *exclusions) started(c *coverage, pid int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	c.pid = pid
}

// kill records that a watcher process was killed. The process may hang in the driver before it
// ends.
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

// outdated reports whether a watcher process needs a replacement. now is true if the process has an
// excluded card open. soon is true if the process does not watch a card that is no longer excluded.
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
