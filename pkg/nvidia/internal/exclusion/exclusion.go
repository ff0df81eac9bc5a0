package exclusion

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
)

// watchLimit bounds how long a MIG mode change waits until its card is watched again. After that
// the claim is prepared without the watch.
const watchLimit = 5 * time.Second

// Set has the cards that no watcher process may have open, because their MIG mode or their driver
// changes. An open card may block the change, and NVML closes a card only when its process ends. So
// a new watcher process without this card replaces the current one.
type Set struct {
	mu       sync.Mutex
	cards    map[device.PCIAddress]exclusion
	watchers map[*Coverage]bool
	change   chan struct{} // closed with the next change
	trouble  error         // why the last replacement could not take over, nil if it did
	running  bool          // the watch runs, even while it has no process
}

// exclusion says how many changes exclude a card from the watch now.
type exclusion struct {
	requests int // changes that exclude the card
	Minor    int // N of the device node nvidiaN, or -1 for a card that has none
}

// NewSet returns a set without cards.
func NewSet() *Set {
	return &Set{
		cards: map[device.PCIAddress]exclusion{}, watchers: map[*Coverage]bool{}, change: make(chan struct{}),
	}
}

// Exclude returns when no watcher process has the card open, or KillLimit after the last ones that
// do were killed. No new one opens the card until restore is called. If ctx ends first, Exclude
// returns an error with the processes that have the card open.
func (x *Set) Exclude(ctx context.Context, card device.PCIAddress, minor int) (restore func(), err error) {
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
			dying = time.After(child.KillLimit)
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

// AwaitWatch returns when a watcher process receives the card's events, when watchLimit has passed,
// or when ctx ends. This wait keeps the watcher from missing the first fault of a Pod on this card.
func (x *Set) AwaitWatch(ctx context.Context, card device.PCIAddress) {
	limit := time.After(watchLimit)
	for {
		changed, watched := x.watched(card)
		if watched {
			return
		}
		select {
		case <-changed:
		case <-limit:
			return
		case <-ctx.Done():
			return
		}
	}
}

// watched reports whether a watcher process receives the card's events. It is also true if the
// watch does not run, because then there is nothing to wait for. The channel changed is closed when
// the result may be another one.
func (x *Set) watched(card device.PCIAddress) (changed <-chan struct{}, watched bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	watched = !x.running
	for c := range x.watchers {
		watched = watched || c.has(card) && c.listens && !c.killed
	}
	return x.change, watched
}

// refusal returns the error of an exclusion that failed. pids are the processes that still have the
// card open. killed says that all of them were killed, so they hang in the driver.
func (x *Set) refusal(pids []string, killed bool, cause error) error {
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

func (x *Set) request(card device.PCIAddress, minor, more int) {
	x.update(func() {
		e := exclusion{requests: x.cards[card].requests + more, Minor: minor}
		if e.requests > 0 {
			x.cards[card] = e
		} else {
			delete(x.cards, card)
		}
	})
}

// update changes the exclusions or watcher processes, and wakes all who wait for that.
func (x *Set) update(change func()) {
	x.mu.Lock()
	defer x.mu.Unlock()
	change()
	close(x.change)
	x.change = make(chan struct{})
}

// watchersOf returns the process IDs of the watcher processes that have the card open. killed is
// true if all of them were killed. changed is a channel that is closed at the next change of the
// exclusions or of the watcher processes.
func (x *Set) watchersOf(card device.PCIAddress) (changed <-chan struct{}, pids []string, killed bool) {
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

// Changes returns a channel that is closed with the next change of the exclusions or watcher
// processes.
func (x *Set) Changes() <-chan struct{} {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.change
}

// LeavesAny reports whether at least one of the cards is not excluded from the watch. It is also
// true if cards is empty, because then the cards are unknown.
func (x *Set) LeavesAny(cards []device.PCIAddress) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(cards) == 0 || slices.ContainsFunc(cards, func(a device.PCIAddress) bool {
		_, excluded := x.cards[a]
		return !excluded
	})
}
