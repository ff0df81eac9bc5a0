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
	// leaveLimit is how long the watcher may take to let go of a card: another process must listen to the others first.
	leaveLimit = 45 * time.Second
	// returnPause is how long a card waits for others that come back too: each time takes a process.
	returnPause = time.Second
)

// absences are the cards that nobody watches for now, because their MIG mode is to change: a process that has a card open may keep the driver from that.
// NVML closes a card only when its process ends, so whoever watches is followed by a process without the card.
type absences struct {
	mu      sync.Mutex
	away    map[device.PCIAddress]absence
	watches map[*holding]bool
	change  chan struct{} // closed with the next change
}

type absence struct {
	asked int // by how many
	minor int // N of its device node, nvidiaN
}

// holding is what a process that watches has open.
type holding struct {
	only   device.PCIAddress // empty for all cards
	except map[device.PCIAddress]absence
	pid    int // 0 until it has started
}

func (h *holding) has(a device.PCIAddress) bool {
	_, left := h.except[a]
	return !left && (h.only == "" || h.only == a)
}

func newAbsences() *absences {
	return &absences{away: map[device.PCIAddress]absence{}, watches: map[*holding]bool{}, change: make(chan struct{})}
}

// leave returns when no process that watches has the card open; from then on until back is called none will.
func (a *absences) leave(ctx context.Context, card device.PCIAddress, minor int) (back func(), err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, leaveLimit, fmt.Errorf("it has not ended for %s", leaveLimit))
	defer cancel()
	a.ask(card, minor, 1)
	back = sync.OnceFunc(func() { a.ask(card, minor, -1) })
	for {
		changed, pids := a.holders(card)
		if len(pids) == 0 {
			return back, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			back()
			return nil, fmt.Errorf("who watches it (process %s) still has it open: %w", strings.Join(pids, ", "), context.Cause(ctx))
		}
	}
}

func (a *absences) ask(card device.PCIAddress, minor, more int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := absence{asked: a.away[card].asked + more, minor: minor}
	if n.asked > 0 {
		a.away[card] = n
	} else {
		delete(a.away, card)
	}
	a.announce()
}

// announce needs the lock.
func (a *absences) announce() {
	close(a.change)
	a.change = make(chan struct{})
}

func (a *absences) holders(card device.PCIAddress) (changed <-chan struct{}, pids []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for h := range a.watches {
		if h.has(card) {
			pids = append(pids, fmt.Sprint(h.pid))
		}
	}
	slices.Sort(pids)
	return a.change, pids
}

// changed is closed with the next change.
func (a *absences) changed() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.change
}

// begin notes that a process is about to open all cards but those that are away now, or only one, which it is not to be started for while that is away.
func (a *absences) begin(only device.PCIAddress) (h *holding, may bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	h = &holding{only: only, except: maps.Clone(a.away)}
	if only != "" && !h.has(only) {
		return nil, false
	}
	a.watches[h] = true
	return h, true
}

// started notes which process it is.
func (a *absences) started(h *holding, pid int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	h.pid = pid
}

// end notes that the process has gone.
func (a *absences) end(h *holding) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.watches, h)
	a.announce()
}

// due says whether a process has to be followed by another: now, because it has a card that is to be left, or some time, because it has left one that is back.
func (a *absences) due(h *holding) (now, later bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for card := range a.away {
		now = now || h.has(card)
	}
	for card := range h.except {
		_, away := a.away[card]
		later = later || !away
	}
	return now, later
}
