package nvidia

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	// idleLimit is how long a worker is kept after its last answer, because a claim makes several calls.
	// While it lives, no driver can be unloaded, and nobody else can remove an instance that it has read.
	idleLimit = time.Second
	// operationLimit bounds an operation whose context has no end.
	operationLimit = 2 * time.Minute
	// closeLimit is how long Close waits for workers to go.
	closeLimit = 2 * time.Second
	// Busy instances are tried again, and a fabric is looked at again, first after firstPause, then ever more seldom, at least every lastPause.
	firstPause = 50 * time.Millisecond
	lastPause  = time.Second
)

// Partitions looks at how GPUs are cut, and cuts them. Each card has a worker process of its own, started when it is needed and ended soon after: whatever
// NVML does to it, a call ends with its context, and other cards do not notice.
//
// Calls on one card are carried out one after another, in the order in which they came. A call that outlives its context kills the worker, and the
// next waits until that has really gone: a process that hangs inside the driver cannot be killed, and may still do what it was told. So a card never
// has more than one.
//
// What cannot be done is a [CutError]. After [CodeDied], [CodeTimeout] and [CodeOther] it is unknown what was done: look.
type Partitions struct {
	// Observe, if set before the first call, is told of each operation: how long it took and with which [CutCode] it failed, empty if it did not.
	Observe func(op string, took time.Duration, code string)

	paths   Paths
	command []string
	idle    time.Duration
	ctx     context.Context
	cancel  context.CancelCauseFunc

	// excluded are the cards that the watcher must not have open.
	excluded *exclusions

	mu    sync.Mutex
	seats map[device.PCIAddress]*seat
}

var errClosed = errors.New("the plugin is ending")

// NewPartitions cuts with workers that command starts, which must call [ServePartitions] on its standard input and output.
func NewPartitions(p Paths, command ...string) *Partitions {
	ctx, cancel := context.WithCancelCause(context.Background())
	return &Partitions{paths: p, command: command, idle: idleLimit, ctx: ctx, cancel: cancel, seats: map[device.PCIAddress]*seat{}, excluded: newExclusions()}
}

// Look says how a card is cut now.
func (p *Partitions) Look(ctx context.Context, card Card) (State, error) {
	return p.state(ctx, request{Op: opLook, Card: card})
}

// SetMode turns MIG mode on or off, unless it is as wanted. On a board with NVLink fabric a card without MIG mode can be used only after it has
// registered there: SetMode waits for that. Before the mode changes, the watcher lets go of the card;
// SetMode returns when the card is watched again.
func (p *Partitions) SetMode(ctx context.Context, card Card, on bool) (State, error) {
	ctx, cancel := p.bounded(ctx)
	defer cancel()
	r := request{Op: opSetMode, Card: card, On: on, Watched: true}
	s, err := p.state(ctx, r)
	if err == nil && s.MIG.Enabled != on {
		s, err = p.changeMode(ctx, r, s.Minor)
	}
	if err == nil && !on {
		err = p.awaitFabric(ctx, card)
	}
	if err != nil {
		return State{}, err
	}
	return s, nil
}

// changeMode changes the mode while the watcher does not have the card open.
func (p *Partitions) changeMode(ctx context.Context, r request, minor int) (State, error) {
	klog.FromContext(ctx).Info("Excluding GPU from the health watch while its MIG mode changes", "gpu", r.Card.String(), "mig", r.On)
	restore, err := p.excluded.exclude(ctx, r.Card.PCIAddress, minor)
	if err != nil {
		refusal := r.fail(CodeInUse, "%v", err)
		refusal.cause = context.Cause(ctx)
		return State{}, refusal
	}
	r.Watched = false
	s, err := p.state(ctx, r)
	restore()
	p.excluded.awaitWatch(ctx, r.Card.PCIAddress)
	return s, err
}

// CreateInstance makes a GPU instance at exactly this place, where nothing may be.
func (p *Partitions) CreateInstance(ctx context.Context, card Card, profileID uint32, at device.Placement) (device.Instance, error) {
	return p.instance(ctx, request{Op: opCreateInstance, Card: card, Profile: profileID, At: at})
}

// CreateCompute makes the compute instance that fills an empty GPU instance, and the device nodes of the two capabilities. The answer is the GPU
// instance with it inside.
func (p *Partitions) CreateCompute(ctx context.Context, card Card, instanceID uint32) (device.Instance, error) {
	return p.instance(ctx, request{Op: opCreateCompute, Card: card, Instance: device.Instance{ID: instanceID}})
}

// Destroy takes away a GPU instance and the compute instances in it, if ID, profile, placement and the given compute instances with their UUIDs are those
// on the card. One that is gone already is no error. While something uses it, Destroy tries again until ctx ends.
func (p *Partitions) Destroy(ctx context.Context, card Card, in device.Instance) error {
	ctx, cancel := p.bounded(ctx)
	defer cancel()
	r := request{Op: opDestroy, Card: card, Instance: in}
	var busy *CutError
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		_, err := p.observed(ctx, r)
		var cut *CutError
		switch {
		case errors.As(err, &cut) && cut.Code == CodeInUse:
			busy = cut
		case busy != nil && ctx.Err() != nil:
			return busy // that says more than that time is over
		default:
			return err
		}
		if !rest(ctx, pause) {
			return busy
		}
	}
}

// SetComputeMode says how many processes may use a card at once, unless it is so already. Where persistence mode is off ([State].Persistence), the driver
// forgets it when the last process closes the card.
func (p *Partitions) SetComputeMode(ctx context.Context, card Card, mode device.ComputeMode) error {
	_, err := p.state(ctx, request{Op: opSetComputeMode, Card: card, ComputeMode: mode})
	return err
}

// TimeSlice says how long a process computes on a card before the next has its turn. It takes the driver's own nvidia-smi: NVML has no call for it.
func (p *Partitions) TimeSlice(ctx context.Context, card Card) (device.TimeSlice, error) {
	return p.timeSlice(ctx, request{Op: opTimeSlice, Card: card})
}

// SetTimeSlice sets it, unless it is so already. Where persistence mode is off the driver forgets it as it does the compute mode.
func (p *Partitions) SetTimeSlice(ctx context.Context, card Card, to device.TimeSlice) error {
	_, err := p.timeSlice(ctx, request{Op: opSetTimeSlice, Card: card, TimeSlice: to})
	return err
}

// awaitFabric waits until a card has registered with its fabric.
func (p *Partitions) awaitFabric(ctx context.Context, card Card) error {
	r := request{Op: opFabric, Card: card}
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		a, err := p.observed(ctx, r)
		if err != nil || a.Waiting == "" {
			return err
		}
		if !rest(ctx, pause) {
			late := r.fail(CodeTimeout, "%s: look at nvidia-fabricmanager and its log", a.Waiting)
			late.cause = context.Cause(ctx)
			return late
		}
	}
}

// rest pauses, and says whether there is time left after that.
func rest(ctx context.Context, pause time.Duration) bool {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// Close ends all workers, and with them the calls that are under way.
func (p *Partitions) Close() {
	p.mu.Lock()
	seats := p.seats
	p.seats = nil
	p.mu.Unlock()
	p.cancel(errClosed)
	ctx, cancel := context.WithTimeout(context.Background(), closeLimit)
	defer cancel()
	for _, s := range seats {
		_ = s.clear(ctx) // nothing is left to be done about one that hangs
	}
}

// Dismiss ends the workers that there are, each when it is through with what it does, and waits until they have gone: then nobody here has NVML. A call that
// comes later starts a worker of its own.
func (p *Partitions) Dismiss(ctx context.Context) error {
	p.mu.Lock()
	seats := maps.Clone(p.seats)
	p.mu.Unlock()
	var errs []error
	for at, s := range seats {
		if err := s.clear(ctx); err != nil {
			errs = append(errs, fmt.Errorf("end the process that cuts GPU %s: %w", at, err))
		}
	}
	return errors.Join(errs...)
}

func (p *Partitions) state(ctx context.Context, r request) (State, error) {
	a, err := p.observed(ctx, r)
	if err != nil {
		return State{}, err
	}
	if a.State == nil {
		return State{}, r.fail(CodeOther, "the worker answered nothing: it is of another version")
	}
	return *a.State, nil
}

func (p *Partitions) timeSlice(ctx context.Context, r request) (device.TimeSlice, error) {
	a, err := p.observed(ctx, r)
	if err != nil {
		return 0, err
	}
	if a.TimeSlice == nil {
		return 0, r.fail(CodeOther, "the worker answered nothing: it is of another version")
	}
	return *a.TimeSlice, nil
}

func (p *Partitions) instance(ctx context.Context, r request) (device.Instance, error) {
	a, err := p.observed(ctx, r)
	if err != nil {
		return device.Instance{}, err
	}
	if a.Instance == nil {
		return device.Instance{}, r.fail(CodeOther, "the worker answered nothing: it is of another version")
	}
	return *a.Instance, nil
}

func (p *Partitions) observed(ctx context.Context, r request) (answer, error) {
	start := time.Now()
	a, failure := p.call(ctx, r)
	code := CutCode("")
	if failure != nil {
		code = failure.Code
	}
	if p.Observe != nil {
		p.Observe(string(r.Op), time.Since(start), string(code))
	}
	if failure != nil {
		return answer{}, failure
	}
	return a, nil
}

// bounded makes a context that ends with the caller's, with us, and after [operationLimit].
func (p *Partitions) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(p.ctx, func() { cancel(context.Cause(p.ctx)) })
	ctx, done := context.WithTimeoutCause(ctx, operationLimit, fmt.Errorf("it has not ended for %s: %w", operationLimit, context.DeadlineExceeded))
	return ctx, func() {
		done()
		stop()
		cancel(nil)
	}
}

func (p *Partitions) call(ctx context.Context, r request) (answer, *CutError) {
	ctx, cancel := p.bounded(ctx)
	defer cancel()
	s := p.seat(r.Card.PCIAddress)
	if s == nil {
		return answer{}, late(r, errClosed, "nothing was done")
	}
	return s.call(ctx, r)
}

// seat is nil after Close.
func (p *Partitions) seat(at device.PCIAddress) *seat {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.seats == nil {
		return nil
	}
	if p.seats[at] == nil {
		p.seats[at] = &seat{
			idle: p.idle, turn: make(chan struct{}, 1),
			start: func() (*worker, error) { return startWorker(p.paths, p.command) },
		}
	}
	return p.seats[at]
}

// late is the error of a call that ended with its context.
func late(r request, cause error, what string) *CutError {
	e := r.fail(CodeTimeout, "%v: %s", cause, what)
	e.cause = cause
	return e
}
