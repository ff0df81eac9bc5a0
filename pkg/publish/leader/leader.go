// Package leader elects the plugin instance that publishes the node's slices: the newest one with
// something to publish.
//
// A [Lock] is a flock, so a killed leader loses it at once. A newer instance writes a request file
// to ask for a hand-over. If the newer instance ends after the hand-over, the former leader leads
// again.
//
// The package publishes nothing. The leader also saves the health findings. After a hand-over only
// the newer instance keeps the files that exist once on a node, such as the base CDI spec: their
// owners ask [Lock.NewerLeads].
package leader

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/gofrs/flock"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/wake"
)

const (
	// lockPoll is the pause between two attempts of a waiting plugin instance to take the leader lock.
	// It delays only the start of a plugin and rolling updates.
	lockPoll = 200 * time.Millisecond
	// requestPoll is how often the leader looks for the request of a newer instance.
	requestPoll = time.Second
	// standbyPause is how long a former leader does not try to take the leader lock after it gave the
	// lock up, so that the newer plugin instance gets it first.
	standbyPause = 3 * time.Second
)

// Lock is this plugin instance's side of the election. One goroutine calls Acquire and Release. The
// other methods may be called at any time.
type Lock struct {
	lock        *flock.Flock
	requestPath string
	// started is when this plugin instance started. The instance that started last becomes the leader.
	started time.Time
	// leading lasts while this instance leads. resign ends it.
	leading      context.Context //nolint:containedctx // Release asks for its cause
	resign       context.CancelCauseFunc
	standbyUntil time.Time
	// newerLeads is true from a hand-over to a newer instance until this instance leads again.
	newerLeads atomic.Bool
	leadsAgain wake.Signal
}

// New returns the Lock of the plugin instance that began at the given time. The lock file is in
// dir, which all instances of the node share.
func New(dir string, started time.Time) *Lock {
	return &Lock{
		lock:        flock.New(filepath.Join(dir, "publisher.lock")),
		requestPath: filepath.Join(dir, "publisher.request"),
		started:     started,
		leadsAgain:  wake.New(),
	}
}

// NewerLeads reports whether this instance has handed over to a newer one, which still runs.
func (l *Lock) NewerLeads() bool { return l.newerLeads.Load() }

// LeadsAgain returns a channel that gets a value when this instance leads again after a newer one
// has ended. That instance may have left files of the node broken.
func (l *Lock) LeadsAgain() <-chan struct{} { return l.leadsAgain }

// errHandover is the cause of the end of a leader's context if a newer instance asked to lead.
var errHandover = errors.New("a newer instance of the plugin asked to lead")

// Acquire waits until this plugin instance has the leader lock, and asks an older leader to give it
// up. The returned context ends with ctx, at Release, and when a newer instance asks to lead.
// Acquire returns an error if ctx ends or the lock file cannot be locked.
func (l *Lock) Acquire(ctx context.Context) (leading context.Context, _ error) {
	tick := time.NewTicker(lockPoll)
	defer tick.Stop()
	for {
		if time.Now().After(l.standbyUntil) {
			locked, err := l.lock.TryLock()
			if err != nil {
				return nil, fmt.Errorf("lock %s: %w", l.lock.Path(), err)
			}
			if locked {
				break
			}
			// A former leader that gave up the lock waits until the newer instance has ended. It must not
			// ask that instance for the lock.
			if l.standbyUntil.IsZero() {
				if err := l.requestHandover(); err != nil {
					// Without a request the older leader keeps the lock until its process ends. Meanwhile this
					// plugin instance serves the kubelet.
					klog.FromContext(ctx).V(2).Info("Failed to request the hand-over of the leader lock; retrying", "err", err)
				}
			}
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-tick.C:
		}
	}
	if !l.requestTime().After(l.started) {
		if err := os.Remove(l.requestPath); err != nil && !errors.Is(err, fs.ErrNotExist) {
			klog.FromContext(ctx).Error(err, "Failed to remove the hand-over request", "path", l.requestPath)
		}
	}
	l.leading, l.resign = context.WithCancelCause(ctx)
	go l.watchRequests(l.leading, l.resign)
	if l.newerLeads.Swap(false) {
		l.leadsAgain.Wake()
	}
	return l.leading, nil
}

// Release gives up the leader lock. Acquire does not try to take it again for standbyPause, so that
// the newer instance gets it.
func (l *Lock) Release(ctx context.Context) {
	l.resign(nil)
	if errors.Is(context.Cause(l.leading), errHandover) {
		l.newerLeads.Store(true) // before the lock is free, so that no two instances keep the node's files
	}
	if err := l.lock.Unlock(); err != nil {
		klog.FromContext(ctx).Error(err, "Failed to release the leader lock", "path", l.lock.Path())
	}
	l.standbyUntil = time.Now().Add(standbyPause)
}

// watchRequests resigns when a newer plugin instance asks to lead. It ends with the context.
func (l *Lock) watchRequests(ctx context.Context, resign context.CancelCauseFunc) {
	for !l.requestTime().After(l.started) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(requestPoll):
		}
	}
	// The request file is removed now, because if the newer instance dies, its old request must not
	// make a leader give up the lock again.
	_ = os.Remove(l.requestPath)
	klog.FromContext(ctx).Info("Handing over to a newer instance of the plugin")
	resign(errHandover)
}

// requestHandover writes this plugin instance's request file, unless a newer instance has written
// one.
func (l *Lock) requestHandover() error {
	if l.requestTime().After(l.started) {
		return nil
	}
	// The temporary file's name contains the start time instead of the process ID, which is 1 in every
	// container.
	tmp := l.requestPath + "." + strconv.FormatInt(l.started.UnixNano(), 10)
	if err := os.WriteFile(tmp, []byte(strconv.FormatInt(l.started.UnixNano(), 10)), 0o600); err != nil {
		return fmt.Errorf("request the hand-over of the leader lock: %w", err)
	}
	if err := os.Rename(tmp, l.requestPath); err != nil {
		return fmt.Errorf("request the hand-over of the leader lock: %w", err)
	}
	return nil
}

// requestTime returns the start time of the plugin instance that wrote the request file. It returns
// the zero time if the file is missing or invalid.
func (l *Lock) requestTime() time.Time {
	raw, err := os.ReadFile(l.requestPath)
	if err != nil {
		return time.Time{}
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64)
	if err != nil {
		return time.Time{}
	}
	return time.Unix(0, n)
}
