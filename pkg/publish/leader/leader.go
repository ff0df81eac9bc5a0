// Package leader elects the plugin instance that publishes the node's slices: of those with
// something to publish, the one that started last. In a rolling update this is the new one.
//
// A [Lock] is a flock, so a killed leader loses it at once. Its file names the leader's start time.
// An instance asks an older leader for a hand-over: it locks the request file. If the newer
// instance ends after the hand-over, the former leader leads again.
//
// The package publishes nothing. The leader also saves the health findings, and only it replaces
// the base CDI spec ([Lock.WhileLeading]). After a hand-over only the newer instance keeps the
// other files that exist once on a node, such as the hooks: their owners ask [Lock.NewerLeads].
package leader

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gofrs/flock"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/wake"
)

const (
	// lockPoll is the pause between two attempts of a waiting plugin instance to take a lock. It
	// delays only the start of a plugin and rolling updates.
	lockPoll = 200 * time.Millisecond
	// requestPoll is how often the leader looks for the request of a newer instance.
	requestPoll = time.Second
)

// Lock is this plugin instance's side of the election. One goroutine calls Acquire and Release. The
// other methods may be called at any time.
type Lock struct {
	lock    *flock.Flock
	started time.Time
	// requestPath is the file that an instance locks while it asks for a hand-over.
	requestPath string
	// leading lasts while this instance leads. resign ends it.
	leading context.Context //nolint:containedctx // Release asks for its cause
	resign  context.CancelCauseFunc
	// watching lasts as long as a goroutine looks for requests.
	watching sync.WaitGroup
	// newerLeads is true from a hand-over to a newer instance, or from a look that found it leading,
	// until this instance leads.
	newerLeads atomic.Bool
	leadsAgain wake.Signal
	led        wake.Signal

	mu    sync.Mutex // held while the leader keeps a file of the node, and to begin and end leading
	leads bool
}

// New returns the Lock of a plugin instance. The lock files are in dir, which all instances of the
// node share.
func New(dir string) *Lock {
	return &Lock{
		lock:        newFlock(filepath.Join(dir, "publisher.lock")),
		started:     time.Now(),
		requestPath: filepath.Join(dir, "publisher.request"),
		leadsAgain:  wake.New(),
		led:         wake.New(),
	}
}

// newFlock returns the lock on a file that only root can open. The open never waits, even if the
// file is a pipe.
func newFlock(path string) *flock.Flock {
	return flock.New(path, flock.SetPermissions(0o600), flock.SetFlag(os.O_CREATE|os.O_RDONLY|syscall.O_NONBLOCK))
}

// NewerLeads reports whether a newer instance leads, as far as this instance has seen.
func (l *Lock) NewerLeads() bool { return l.newerLeads.Load() }

// LeadsAgain returns a channel that gets a value when this instance leads after a newer one has
// ended. That instance may have left files of the node broken.
func (l *Lock) LeadsAgain() <-chan struct{} { return l.leadsAgain }

// Led returns a channel that gets a value when this instance begins to lead.
func (l *Lock) Led() <-chan struct{} { return l.led }

// WhileLeading calls do if this instance leads. Until do returns, no other instance leads.
func (l *Lock) WhileLeading(do func() error) (leads bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.leads {
		err = do()
	}
	return l.leads, err
}

func (l *Lock) setLeads(leads bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.leads = leads
}

// errHandover is the cause of the end of a leader's context if a newer instance asked to lead.
var errHandover = errors.New("a newer instance of the plugin asked to lead")

// Acquire waits until this plugin instance has the leader lock, and asks an older leader to give it
// up. The returned context ends with ctx, at Release, and when a newer instance asks to lead.
// Acquire returns an error if ctx ends or a lock file cannot be locked.
func (l *Lock) Acquire(ctx context.Context) (leading context.Context, _ error) {
	request := newFlock(l.requestPath)
	defer func() { _ = request.Unlock() }()
	if !l.findNewer() { // first without the lock, which asks an older leader
		if _, err := request.TryLockContext(ctx, lockPoll); err != nil {
			return nil, fmt.Errorf("lock %s: %w", request.Path(), err)
		}
		// Another instance that asked has led since, and written its start time before it unlocked.
		if l.findNewer() {
			_ = request.Unlock()
		}
	}
	if l.NewerLeads() {
		// This instance waits until the newer one has the leader lock, and does not ask for it.
		if _, err := request.TryRLockContext(ctx, lockPoll); err != nil {
			return nil, fmt.Errorf("lock %s: %w", request.Path(), err)
		}
		_ = request.Unlock()
	}
	if _, err := l.lock.TryLockContext(ctx, lockPoll); err != nil {
		return nil, fmt.Errorf("lock %s: %w", l.lock.Path(), err)
	}
	if err := l.writeStarted(); err != nil {
		// Only an older instance that leads later would ask without need.
		klog.FromContext(ctx).Error(err, "Failed to write the leader's start time", "path", l.lock.Path())
	}
	l.leading, l.resign = context.WithCancelCause(ctx)
	l.watching.Go(func() { l.watchRequests(l.leading, l.resign) })
	if l.newerLeads.Swap(false) {
		l.leadsAgain.Wake()
	}
	l.setLeads(true)
	l.led.Wake()
	return l.leading, nil
}

// findNewer reports whether a newer instance leads or has led last.
func (l *Lock) findNewer() bool {
	if l.leaderStarted().After(l.started) {
		l.newerLeads.Store(true)
	}
	return l.NewerLeads()
}

// leaderStarted returns the start time of the last leader, or the zero time if it is unknown. It
// ignores a time in the future, because the clock was set back.
func (l *Lock) leaderStarted() (started time.Time) {
	text, err := durable.OS{}.ReadFile(l.lock.Path())
	if err != nil || started.UnmarshalText(text) != nil || started.After(time.Now()) {
		return time.Time{}
	}
	return started
}

// writeStarted writes into the lock file, whose inode carries the lock.
func (l *Lock) writeStarted() error {
	text, err := l.started.MarshalText()
	if err != nil {
		return err
	}
	return os.WriteFile(l.lock.Path(), text, 0o600)
}

// Release gives up the leader lock. Afterwards this instance touches no file, which an
// uninstallation may have removed.
func (l *Lock) Release(ctx context.Context) {
	l.resign(nil)
	l.watching.Wait()
	if errors.Is(context.Cause(l.leading), errHandover) {
		l.newerLeads.Store(true) // before the lock is free, so that no two instances keep the node's files
	}
	l.setLeads(false)
	if err := l.lock.Unlock(); err != nil {
		klog.FromContext(ctx).Error(err, "Failed to release the leader lock", "path", l.lock.Path())
	}
}

// watchRequests resigns when a newer plugin instance asks to lead. It ends with the context.
func (l *Lock) watchRequests(ctx context.Context, resign context.CancelCauseFunc) {
	request := newFlock(l.requestPath)
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(requestPoll):
		}
		if free, err := request.TryRLock(); !free && err == nil {
			break
		}
		_ = request.Unlock()
	}
	klog.FromContext(ctx).Info("Handing over to a newer instance of the plugin")
	resign(errHandover)
}
