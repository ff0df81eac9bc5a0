package watch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
)

// restorePause is the wait before a watcher process is replaced for a card that comes or leaves, so
// that cards that do so at about the same time share one replacement.
const restorePause = 500 * time.Millisecond

// supervise emits the signals of child until it fails. It replaces child when the set of cards
// excluded from the watch changes, and when child reports a card that came or leaves.
func (w *watcher) supervise(ctx context.Context, child *watchChild) error {
	epoch := host.DriverLoad(w.options.Paths)
	silence := time.NewTimer(initLimit + w.options.Interval)
	defer silence.Stop()
	var next starting
	var retry <-chan time.Time    // when to start a replacement, nil while unset
	failed := false               // the last replacement could not take over
	var changed device.PCIAddress // a card that child must be replaced for, none if it is empty
	var notBefore time.Time       // child reports the card again and again, and a try wakes all GPUs
	outdated := func() (now, soon bool) {
		now, soon = w.excluded.Outdated(child.coverage)
		return now, soon || changed != ""
	}
	replace := func() {
		w.watchHangingApart(ctx)
		forCard := changed
		if now, soon := w.excluded.Outdated(child.coverage); now || soon {
			forCard = ""
		}
		next = w.startReplacement(ctx, forCard)
	}
	defer func() { next.abandon() }()
	for {
		excluded := w.excluded.Changes()
		if next.coverage != nil {
			if now, _ := w.excluded.Outdated(next.coverage); now {
				next.abandon()
				next = starting{}
			}
		}
		if now, soon := outdated(); next.ready == nil && (now || soon) {
			switch {
			case now && !w.excluded.LeavesAny(w.cards()):
				w.drainAndKill(child, epoch)
				return errExcluded
			case now && !failed:
				replace()
			case retry == nil:
				retry = time.After(restorePause)
			}
		}
		select {
		case <-excluded:
		case <-retry:
			retry, failed = nil, false
			if now, soon := outdated(); next.ready == nil && (now || soon) {
				replace()
			}
		case r := <-next.ready:
			next.cancel()
			forCard := next.forCard
			next, retry, failed = starting{}, nil, r.err != nil
			if w.only == "" && (!failed || forCard == "") {
				w.excluded.Replaced(r.err)
			}
			if failed {
				r.abandon()
				if forCard != "" {
					if ctx.Err() == nil {
						klog.FromContext(ctx).Error(r.err, "Failed to replace the watcher process after a GPU came or left", "gpu", forCard)
					}
					failed, changed, notBefore = false, "", time.Now().Add(lastRestart)
					continue
				}
				// If no replacement works, end the old process anyway so that it closes the card: a
				// gap in the watch is better than refusing every MIG mode change.
				if now, _ := w.excluded.Outdated(child.coverage); now && !errors.Is(r.err, errStuck) {
					w.drainAndKill(child, epoch)
					return fmt.Errorf("%w: %w", errNotReplaced, r.err)
				}
				continue
			}
			w.handOver(child, epoch, r)
			child, epoch, changed, notBefore = r.child, r.epoch, "", time.Time{}
			w.excluded.Listening(child.coverage)
			silence.Reset(2*w.options.Interval + w.wedged + silenceGrace)
		case s := <-child.Messages:
			if s.Watcher != nil && host.DriverLoad(w.options.Paths) != epoch {
				w.drainAndKill(child, epoch) // the child has the old driver's files open
				return errors.New("the NVIDIA driver was unloaded or reloaded")
			}
			if s.Watcher != nil && s.Watcher.Up && s.Watcher.Events {
				w.excluded.Listening(child.coverage)
			}
			if s.Watcher != nil && s.Watcher.ChangedGPU != "" && time.Now().After(notBefore) {
				changed = s.Watcher.ChangedGPU
			}
			w.forward(s, epoch) // forward may block, so reset the timer after it
			if len(w.hanging) > 1 && len(w.apart) < maxApart {
				w.drainAndKill(child, epoch)
				return errApart
			}
			silence.Reset(2*w.options.Interval + w.wedged + silenceGrace)
		case <-child.Ended:
			return child.failure()
		case <-silence.C:
			child.Kill()
			return errors.New("the watcher process has sent nothing for too long")
		case <-ctx.Done():
			w.drainAndKill(child, epoch)
			return ctx.Err()
		}
	}
}

// drainAndKill emits the events that the child process still sends, because no other process has
// them, and then kills it. It drops the child's conditions, because the next child polls them
// again.
func (w *watcher) drainAndKill(child *watchChild, epoch string) {
	child.Dismiss()
	limit := time.After(drainLimit)
	for {
		select {
		case s := <-child.Messages:
			if s.Event != nil {
				w.forward(s, epoch)
			}
			continue
		case <-child.Ended:
		case <-limit:
		}
		child.Kill()
		return
	}
}

// forgetEnded removes the child processes that have ended from w.children.
func (w *watcher) forgetEnded() {
	var left []*watchChild
	for _, c := range w.children {
		select {
		case <-c.Gone:
		case <-time.After(time.Second): // the process was killed, but has not ended
			left = append(left, c)
		}
	}
	w.children = left
}

// forward emits a signal of a child process, except for an event that an earlier child already
// reported, and a condition that its answer has overtaken. It adds what the child does not know,
// such as a lost card's UUID.
func (w *watcher) forward(s device.Signal, epoch string) {
	if s.Condition != nil && w.isApart(s.Condition.Card) || s.Event != nil && w.isApart(s.Event.Card) {
		return // until another process without this card takes over
	}
	if c := s.Condition; c != nil {
		if w.answered.overtaken(*c) {
			return
		}
		w.hanging = slices.DeleteFunc(w.hanging, func(a device.PCIAddress) bool {
			return a == c.Card.PCIAddress && c.Reach != device.ReachWedged
		})
		if a := c.Card.PCIAddress; c.Reach == device.ReachWedged && !slices.Contains(w.hanging, a) {
			w.hanging = append(w.hanging, a)
		}
	}
	switch {
	case s.Event != nil:
		if !w.overlap.repeated(*s.Event) {
			w.places.add(*s.Event)
		}
		return
	case s.Watcher != nil:
		s.Watcher.Driver = epoch
	case s.Condition != nil && s.Condition.Card.UUID == "":
		s.Condition.Card.UUID = w.uuids[s.Condition.Card.PCIAddress]
	case s.Condition != nil:
		w.uuids[s.Condition.Card.PCIAddress] = s.Condition.Card.UUID
	}
	w.emit(s)
}

// isApart reports whether another watcher reports the card.
func (w *watcher) isApart(c device.Card) bool { return slices.Contains(w.apart, c.PCIAddress) }
