package watch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/exclusion"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
)

// errExcluded says that a watcher has no card to watch, because all its cards are excluded from the
// watch.
var errExcluded = errors.New("the GPU is excluded from the watch while its MIG mode or driver changes")

// errNotReplaced says that the watch restarts with a gap, because the replacement process failed.
var errNotReplaced = errors.New("no process took over the watch of the other GPUs while the MIG mode or driver of one changes")

// replacement is a watcher process that takes over from the current watcher process.
type replacement struct {
	child   *watchChild // nil if the process could not be started
	epoch   string
	signals []device.Signal // signals that child has sent so far
	err     error           // why child cannot take over
}

func (r replacement) abandon() {
	if r.child != nil {
		r.child.replaced = true
		r.child.Kill()
	}
}

// starting is a replacement that does not receive events yet.
type starting struct {
	ready    <-chan replacement // nil while no replacement starts
	cancel   context.CancelFunc
	coverage *exclusion.Coverage // nil if the process could not be started
	// forCard is the changed card that it starts for. It is empty if exclusions need it.
	forCard device.PCIAddress
}

func (s starting) abandon() {
	if s.ready != nil {
		s.cancel()
		(<-s.ready).abandon()
	}
}

// watchHangingApart gives each hung card its own watcher process, up to maxApart. Otherwise each
// replacement for all cards would leave one more process that hangs in the driver.
func (w *watcher) watchHangingApart(ctx context.Context) {
	if w.only != "" {
		return // it is apart already
	}
	for _, a := range slices.Clone(w.hanging) {
		if len(w.apart) < maxApart && !slices.Contains(w.apart, a) && w.excluded.LeavesAny([]device.PCIAddress{a}) {
			w.watchApart(ctx, a)
		}
	}
	w.hanging = slices.DeleteFunc(w.hanging, func(a device.PCIAddress) bool { return slices.Contains(w.apart, a) })
}

// startReplacement starts a replacement process. The channel ready of the result gets the
// replacement when it receives events or has failed. A replacement for a changed card (forCard) is
// less urgent than one for an exclusion. It fails while two processes hang, maybe on this card, and
// if it does not hear cards that the current process hears.
func (w *watcher) startReplacement(ctx context.Context, forCard device.PCIAddress) starting {
	ctx, cancel := context.WithCancel(ctx)
	ready := make(chan replacement, 1)
	next := starting{ready: ready, cancel: cancel, forCard: forCard}
	w.children = slices.DeleteFunc(w.children, func(c *watchChild) bool { return c.IsGone() })
	if n := len(w.children) - 1; n >= child.MaxStuck || forCard != "" && n > 1 {
		ready <- replacement{err: stuckError(n)}
		return next
	}
	w.overlap = overlap{heard: map[string]int{}}
	r := replacement{epoch: host.DriverLoad(w.options.Paths)}
	if r.child, r.err = w.start(); r.err != nil {
		ready <- r
		return next
	}
	next.coverage = r.child.coverage
	var needed []device.PCIAddress
	if forCard != "" {
		needed = w.answering(forCard)
	}
	go func() { ready <- r.await(ctx, needed) }()
	return next
}

// answering lists the cards, except this one, that answered lately and that NVIDIA's driver lists.
func (w *watcher) answering(except device.PCIAddress) (cards []device.PCIAddress) {
	for a, last := range w.answered {
		if a != except && time.Since(last.emitted) < 2*w.options.Interval+w.wedged && host.Incarnation(w.options.Paths, a) != 0 {
			cards = append(cards, a)
		}
	}
	return cards
}

// await returns when the replacement receives the events of all its cards, when it has failed, when
// replaceLimit has passed, or when ctx ends. The err of the result says why the replacement cannot
// take over: after replaceLimit, because a card in needed has not answered.
func (r replacement) await(ctx context.Context, needed []device.PCIAddress) replacement {
	limit := time.After(replaceLimit)
	for {
		select {
		case s := <-r.child.Messages:
			r.signals = append(r.signals, s)
			if s.Watcher != nil && s.Watcher.Up && s.Watcher.Events {
				return r
			}
		case <-r.child.Ended:
			r.err = r.child.failure()
			return r
		case <-limit:
			if len(r.signals) == 0 {
				r.err = fmt.Errorf("NVML has not started after %s", replaceLimit)
			} else if silent := silentIn(r.signals, needed); len(silent) > 0 {
				r.err = fmt.Errorf("%v have not answered after %s", silent, replaceLimit)
			}
			return r
		case <-ctx.Done():
			r.err = ctx.Err()
			return r
		}
	}
}

// silentIn returns the cards that have not answered in these signals.
func silentIn(signals []device.Signal, cards []device.PCIAddress) []device.PCIAddress {
	return slices.DeleteFunc(slices.Clone(cards), func(a device.PCIAddress) bool {
		return slices.ContainsFunc(signals, func(s device.Signal) bool {
			return s.Condition != nil && s.Condition.Card.PCIAddress == a && s.Condition.Reach == device.ReachOK
		})
	})
}

// handOver ends the old watcher process, which is the parameter from, after it has sent its last
// events. It then emits the signals that the replacement has sent so far.
func (w *watcher) handOver(from *watchChild, epoch string, to replacement) {
	from.replaced = true
	w.drainAndKill(from, epoch)
	w.overlap.until = time.Now()
	w.hanging = nil
	for _, s := range to.signals {
		w.forward(s, to.epoch)
	}
}
