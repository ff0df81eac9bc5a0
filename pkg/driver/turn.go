package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/gofrs/flock"
	"k8s.io/klog/v2"
)

const (
	// turnPoll is how often a waiting instance tries the lock, heldPoll how often the holder looks for a newer one where inotify does not tell it of one. Only
	// plugin start and rolling updates wait for it.
	turnPoll = 200 * time.Millisecond
	heldPoll = time.Second
	// toldPoll is how often the holder looks although inotify would tell it.
	toldPoll = 10 * time.Second
	// turnYield is how long an instance that yielded stays back, so that the newer one surely gets the lock first.
	turnYield = 3 * time.Second
)

// turn decides which of the instances on one node publishes: the newest that has something to publish. It is a flock, so a killed holder loses it at
// once, beside a request file in which a newer instance asks the holder to yield. An instance that asked and died costs the holder one short pause.
type turn struct {
	lock    *flock.Flock
	request string
	// started orders the instances: the later one wins.
	started time.Time
	wanted  chan struct{}
	stop    context.CancelFunc
	stayOut time.Time
}

func newTurn(dir string, started time.Time) *turn {
	return &turn{
		lock:    flock.New(filepath.Join(dir, "publisher.lock")),
		request: filepath.Join(dir, "publisher.request"),
		started: started,
	}
}

// Take waits for the turn, asking an older holder to yield.
func (t *turn) Take(ctx context.Context) error {
	tick := time.NewTicker(turnPoll)
	defer tick.Stop()
	for {
		if time.Now().After(t.stayOut) {
			got, err := t.lock.TryLock()
			if err != nil {
				return fmt.Errorf("lock %s: %w", t.lock.Path(), err)
			}
			if got {
				break
			}
			// An instance that has yielded waits for the newer one to end, and has nothing to ask of it.
			if t.stayOut.IsZero() {
				if err := t.ask(); err != nil {
					// Not asked, the holder keeps the turn until its process ends; this instance serves the kubelet all the same.
					klog.FromContext(ctx).V(2).Info("Could not ask for the publisher's turn; trying again", "err", err)
				}
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
	if !t.requested().After(t.started) {
		if err := os.Remove(t.request); err != nil && !errors.Is(err, fs.ErrNotExist) {
			klog.FromContext(ctx).Error(err, "Could not remove the request for the publisher's turn", "path", t.request)
		}
	}
	watch, stop := context.WithCancel(context.WithoutCancel(ctx)) // until Release
	t.stop = stop
	t.wanted = make(chan struct{})
	go t.watch(watch, t.wanted)
	return nil
}

// Wanted is closed when a newer instance asks for the turn.
func (t *turn) Wanted() <-chan struct{} { return t.wanted }

// Release gives the turn up.
func (t *turn) Release(ctx context.Context) {
	t.stop()
	if err := t.lock.Unlock(); err != nil {
		klog.FromContext(ctx).Error(err, "Could not release the publisher's lock", "path", t.lock.Path())
	}
	t.stayOut = time.Now().Add(turnYield)
}

// watch closes wanted once a newer instance asks.
func (t *turn) watch(ctx context.Context, wanted chan struct{}) {
	asked, pause := make(chan struct{}, 1), heldPoll
	if told := t.listen(asked); told != nil {
		defer func() { _ = told.Close() }()
		pause = toldPoll
	}
	for !t.requested().After(t.started) {
		select {
		case <-ctx.Done():
			return
		case <-asked:
		case <-time.After(pause):
		}
	}
	// Taken up: a requester that has died meanwhile must not make us yield again.
	_ = os.Remove(t.request)
	close(wanted)
}

// listen has asked told when the request file may be another one. It is nil where inotify cannot be had: a user has few instances of it on a node.
func (t *turn) listen(asked chan<- struct{}) *fsnotify.Watcher {
	told, err := fsnotify.NewWatcher()
	if err != nil {
		return nil
	}
	if err := told.Add(filepath.Dir(t.request)); err != nil {
		_ = told.Close()
		return nil
	}
	go func() {
		events, errs := told.Events, told.Errors
		for events != nil || errs != nil {
			select {
			case event, ok := <-events:
				if !ok {
					events = nil
				} else if event.Name == t.request {
					wake(asked)
				}
			case _, ok := <-errs:
				if !ok {
					errs = nil
				} else {
					wake(asked) // events were lost
				}
			}
		}
	}()
	return told
}

// ask leaves a request, unless a still newer instance has left one.
func (t *turn) ask() error {
	if t.requested().After(t.started) {
		return nil
	}
	tmp := t.request + "." + strconv.FormatInt(t.started.UnixNano(), 10) // in containers every instance is process 1
	if err := os.WriteFile(tmp, []byte(strconv.FormatInt(t.started.UnixNano(), 10)), 0o600); err != nil {
		return fmt.Errorf("ask for the publisher's turn: %w", err)
	}
	if err := os.Rename(tmp, t.request); err != nil {
		return fmt.Errorf("ask for the publisher's turn: %w", err)
	}
	return nil
}

// requested is when the asking instance started, the zero time if none asks or the file is no number.
func (t *turn) requested() time.Time {
	raw, err := os.ReadFile(t.request)
	if err != nil {
		return time.Time{}
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64)
	if err != nil {
		return time.Time{}
	}
	return time.Unix(0, n)
}
