package quiesce

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// processExitTimeout is how long awaitUnused waits for killed processes to exit.
const processExitTimeout = 5 * time.Second

var errReleased = errors.New("GPUs are released for a driver upgrade")

// Access counts the running uses of the hardware, and denies new ones while the GPUs are released.
// Whatever opens a GPU goes through it, except for an Unprepare.
type Access struct {
	mu     sync.Mutex
	denied bool
	ctx    context.Context    //nolint:containedctx // it lasts as long as the hardware may be used
	cancel context.CancelFunc // cancels ctx
	ended  chan struct{}      // closed when the release ends
	// uses counts the running uses. unused is closed while there are none.
	uses   int
	unused chan struct{}
	// hanging has killed processes that have not exited yet.
	hanging []*nvidia.HangingError
}

// NewAccess returns an Access that allows the use of the hardware.
func NewAccess() *Access {
	a := &Access{ended: make(chan struct{}), unused: make(chan struct{})}
	close(a.ended)
	close(a.unused)
	a.ctx, a.cancel = context.WithCancel(context.Background())
	return a
}

// Use must be called before any access to the hardware, and done after it. The GPUs are not
// reported as released before done is called. ok is false if the hardware must not be accessed.
func (a *Access) Use() (done func(), ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.denied {
		return func() {}, false
	}
	if a.uses == 0 {
		a.unused = make(chan struct{})
	}
	a.uses++
	return sync.OnceFunc(func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.uses--; a.uses == 0 {
			close(a.unused)
		}
	}), true
}

// Scan wraps scan so that it fails while the hardware must not be accessed. A release also cancels
// a running scan.
func (a *Access) Scan(scan func(context.Context) (nvidia.Node, error)) func(context.Context) (nvidia.Node, error) {
	return func(ctx context.Context) (nvidia.Node, error) {
		current, _ := a.current()
		ctx, stop := context.WithCancel(ctx)
		defer stop()
		defer context.AfterFunc(current, stop)()
		if done, ok := a.Use(); ok {
			defer done()
			node, err := scan(ctx)
			a.trackHanging(err)
			if current.Err() == nil {
				return node, err
			}
		}
		return nvidia.Node{}, &nvidia.NotReadyError{Reason: errReleased.Error()}
	}
}

// deny makes Use and Scan fail until allow, and cancels what runs in the context of current.
func (a *Access) deny() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.denied {
		a.denied, a.ended = true, make(chan struct{})
		a.cancel()
	}
}

func (a *Access) allow() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.denied {
		a.denied = false
		a.ctx, a.cancel = context.WithCancel(context.Background())
		close(a.ended)
	}
}

// current returns the context ctx, which ends when the hardware must no longer be accessed, and the
// channel ended, which is closed when it may be accessed again.
func (a *Access) current() (ctx context.Context, ended <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.ctx, a.ended
}

// awaitUnused waits until all uses of the hardware have ended and killed processes have exited. It
// returns an error that names what still has the hardware open.
func (a *Access) awaitUnused(ctx context.Context) error {
	a.mu.Lock()
	unused := a.unused
	a.mu.Unlock()
	select {
	case <-unused:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	a.mu.Lock()
	processes := a.hanging
	a.mu.Unlock()
	limit := time.NewTimer(processExitTimeout)
	defer limit.Stop()
	for _, h := range processes {
		select {
		case <-h.Gone:
		case <-limit.C:
			return h
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// trackHanging adds the hanging processes that err names to a.hanging, and removes those that have
// exited.
func (a *Access) trackHanging(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	left := slices.DeleteFunc(slices.Clone(a.hanging), func(h *nvidia.HangingError) bool {
		select {
		case <-h.Gone:
			return true
		default:
			return false
		}
	})
	a.hanging = append(left, hangingProcesses(err)...)
}

// hangingProcesses returns the hanging processes that err names.
func hangingProcesses(err error) (hanging []*nvidia.HangingError) {
	var several interface{ Unwrap() []error }
	if errors.As(err, &several) {
		for _, e := range several.Unwrap() {
			hanging = append(hanging, hangingProcesses(e)...)
		}
	} else if one, ok := errors.AsType[*nvidia.HangingError](err); ok {
		hanging = append(hanging, one)
	}
	return hanging
}
