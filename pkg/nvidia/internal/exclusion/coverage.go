package exclusion

import (
	"maps"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Coverage says which cards one watcher process may have open.
type Coverage struct {
	only    device.PCIAddress // empty for all cards
	Except  map[device.PCIAddress]exclusion
	pid     int  // 0 until the process has started
	killed  bool // the process was killed, but it may hang in the driver
	listens bool // the process listens to events
}

func (c *Coverage) has(card device.PCIAddress) bool {
	_, excluded := c.Except[card]
	return !excluded && (c.only == "" || c.only == card)
}

// SetRunning records whether the watch runs.
func (x *Set) SetRunning(running bool) { x.update(func() { x.running = running }) }

// Listening records that the watcher process with the coverage c now receives events of the cards
// that it covers.
func (x *Set) Listening(c *Coverage) { x.update(func() { c.listens = true }) }

// Replaced records why the last attempt to replace a watcher process failed, or nil. The error of
// refusal contains it.
func (x *Set) Replaced(err error) { x.update(func() { x.trouble = err }) }

// Begin registers a watcher process before its start. If only is set, the process watches this one
// card, otherwise all cards. ok is false if this one card is excluded.
func (x *Set) Begin(only device.PCIAddress) (c *Coverage, ok bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	c = &Coverage{only: only, Except: maps.Clone(x.cards)}
	if only != "" && !c.has(only) {
		return nil, false
	}
	x.watchers[c] = true
	return c, true
}

// Started records the process ID of a watcher process, for error messages.
func (x *Set) Started(c *Coverage, pid int) { x.update(func() { c.pid = pid }) }

// Killed records that a watcher process was killed. The process may hang in the driver before it
// ends.
func (x *Set) Killed(c *Coverage) { x.update(func() { c.killed = true }) }

// Ended removes a watcher process that has ended.
func (x *Set) Ended(c *Coverage) { x.update(func() { delete(x.watchers, c) }) }

// Outdated reports whether a watcher process needs a replacement. now is true if the process has an
// excluded card open. soon is true if the process does not watch a card that is no longer excluded.
func (x *Set) Outdated(c *Coverage) (now, soon bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for card := range x.cards {
		now = now || c.has(card)
	}
	for card := range c.Except {
		_, excluded := x.cards[card]
		soon = soon || c.only == "" && !excluded
	}
	return now, soon
}
