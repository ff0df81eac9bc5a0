package cut

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/exclusion"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
)

const (
	// idleLimit is how long a worker lives after its last answer, so that the several calls for one
	// claim use the same worker. It is short: while a worker lives, the driver cannot be unloaded,
	// and no other tool can remove a MIG instance that the worker has read.
	idleLimit = time.Second
	// operationLimit bounds an operation whose context has no deadline.
	operationLimit = 2 * time.Minute
	// transientLimit bounds the retries of an operation that is likely to succeed soon. For example,
	// the worker of another GPU may have every GPU open, until idleLimit after its last answer.
	transientLimit = 10 * time.Second
	// Retries and awaitFabric begin after firstPause, then with growing pauses up to lastPause.
	firstPause = 50 * time.Millisecond
	lastPause  = time.Second
)

// Partitions reads and changes how GPUs are partitioned. Each card has its own worker process,
// which starts on demand and ends when idle. Whatever NVML does, a call ends with its context, and
// calls on other cards are not affected.
//
// Calls on one card run one after another, in order. A call that outlives its context kills the
// worker, and the next call waits until that process is gone. A process that hangs in the driver
// cannot be killed and may still finish its work. So a card never has more than one worker.
//
// Errors are of type [nvidia.Error]. After [device.FailureDied], [device.FailureTimeout] and
// [device.FailureOther] the caller must call Look to learn the result.
type Partitions struct {
	observe Observer
	paths   nvidia.Paths
	command []string
	idle    time.Duration

	// excluded are the cards that no process of the health watch may have open, because their MIG
	// mode changes.
	excluded *exclusion.Set

	mu    sync.Mutex
	slots map[device.PCIAddress]*workerSlot
}

// Observer receives the duration of each operation and its [device.FailureCode], which is empty on
// success.
type Observer func(op string, took time.Duration, code string)

// New returns a Partitions whose worker processes are started by command. The process must call
// [Serve] on its standard input and output. observe may be nil.
func New(p nvidia.Paths, observe Observer, command ...string) *Partitions {
	return &Partitions{
		observe: observe, paths: p, command: command, idle: idleLimit,
		slots: map[device.PCIAddress]*workerSlot{}, excluded: exclusion.NewSet(),
	}
}

// Exclusions are the cards that no process of the health watch may have open, because their MIG
// mode changes.
func (p *Partitions) Exclusions() *exclusion.Set { return p.excluded }

// Look reads how a card is partitioned now.
func (p *Partitions) Look(ctx context.Context, card device.Card) (device.CardState, error) {
	return p.state(ctx, request{Op: opLook, Card: card})
}

// SetMode enables or disables MIG mode, unless the card already is in the requested mode. The
// health watch closes the card during the change, and SetMode waits until the card is watched
// again. On an NVLink board, a card that leaves MIG mode must register with the fabric, so SetMode
// waits for that too.
func (p *Partitions) SetMode(ctx context.Context, card device.Card, on bool) (device.CardState, error) {
	ctx, cancel := bounded(ctx)
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
		return device.CardState{}, err
	}
	return s, nil
}

// changeMode changes the MIG mode while no watcher process has the card open. It fails with
// device.FailureInUse if a watcher process does not close the card. After the change, it waits
// until the card is watched again.
func (p *Partitions) changeMode(ctx context.Context, r request, minor int) (device.CardState, error) {
	klog.FromContext(ctx).Info("Excluding GPU from the health watch while its MIG mode changes", "gpu", r.Card.String(), "mig", r.On)
	restore, err := p.excluded.Exclude(ctx, r.Card.PCIAddress, minor)
	if err != nil {
		refusal := r.fail(device.FailureInUse, "%v", err)
		refusal.Cause = context.Cause(ctx)
		return device.CardState{}, refusal
	}
	r.Watched = false
	s, err := p.state(ctx, r)
	restore()
	p.excluded.AwaitWatch(ctx, r.Card.PCIAddress)
	return s, err
}

// CreateInstance creates a GPU instance at exactly the placement at, which must be free.
func (p *Partitions) CreateInstance(ctx context.Context, card device.Card, profileID uint32, at device.Placement) (device.Instance, error) {
	a, err := p.observed(ctx, request{Op: opCreateInstance, Card: card, Profile: profileID, At: at})
	return a.Instance, err
}

// CreateCompute creates the compute instance that fills an empty GPU instance, and the capability
// device nodes of both. It returns the GPU instance with the compute instance.
func (p *Partitions) CreateCompute(ctx context.Context, card device.Card, instanceID uint32) (device.Instance, error) {
	a, err := p.observed(ctx, request{Op: opCreateCompute, Card: card, Instance: device.Instance{ID: instanceID}})
	return a.Instance, err
}

// Destroy removes the GPU instance in and its compute instances. It fails if ID, profile, placement
// or the UUIDs of the compute instances in in.Compute differ on the card. If the GPU instance is
// missing, Destroy succeeds. While it is in use, Destroy retries until ctx ends.
func (p *Partitions) Destroy(ctx context.Context, card device.Card, in device.Instance) error {
	_, err := p.observed(ctx, request{Op: opDestroy, Card: card, Instance: in})
	return err
}

// SetComputeMode sets how many processes may use a card at once. If the card already has this
// compute mode, it changes nothing. Without persistence mode, the driver may reset the compute mode
// when the last process closes the card.
func (p *Partitions) SetComputeMode(ctx context.Context, card device.Card, mode device.ComputeMode) error {
	_, err := p.observed(ctx, request{Op: opSetComputeMode, Card: card, ComputeMode: mode})
	return err
}

// TimeSlice reads the time slice of a card: how long one process computes before the next one. It
// runs the driver's nvidia-smi, because NVML has no function for it.
func (p *Partitions) TimeSlice(ctx context.Context, card device.Card) (device.TimeSlice, error) {
	a, err := p.observed(ctx, request{Op: opTimeSlice, Card: card})
	return a.TimeSlice, err
}

// SetTimeSlice sets the time slice of a card, unless the card already has it. With persistence mode
// off, the driver resets the time slice when the last process closes the card.
func (p *Partitions) SetTimeSlice(ctx context.Context, card device.Card, to device.TimeSlice) error {
	_, err := p.observed(ctx, request{Op: opSetTimeSlice, Card: card, TimeSlice: to})
	return err
}

// awaitFabric waits until a card has registered with its NVLink fabric. A card without a fabric
// counts as registered.
func (p *Partitions) awaitFabric(ctx context.Context, card device.Card) error {
	r := request{Op: opFabric, Card: card}
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		a, err := p.observed(ctx, r)
		if err != nil || a.Waiting == "" {
			return err
		}
		if !nvmlx.Sleep(ctx, pause) {
			timeout := r.fail(device.FailureTimeout, "%s: check nvidia-fabricmanager and its log", a.Waiting)
			timeout.Cause = context.Cause(ctx)
			return timeout
		}
	}
}

func (p *Partitions) state(ctx context.Context, r request) (device.CardState, error) {
	a, err := p.observed(ctx, r)
	return a.State, err
}

// observed sends r to the card's worker and reports the result to the observer. It reports once for
// all attempts, because an alert counts errors.
func (p *Partitions) observed(ctx context.Context, r request) (answer, error) {
	start := time.Now()
	a := p.retried(ctx, r)
	var code device.FailureCode
	var err error
	if a.Error != nil {
		code, err = a.Error.Code, a.Error
	}
	if p.observe != nil {
		p.observe(string(r.Op), time.Since(start), string(code))
	}
	return a, err
}

// retried sends r to the card's worker until the answer is not a transient error. A removal waits
// for the end of a process until ctx ends. Other retries stop before that, so that no attempt with
// an unknown result follows a clear refusal.
func (p *Partitions) retried(ctx context.Context, r request) answer {
	ctx, cancel := bounded(ctx)
	defer cancel()
	start, limit := time.Now(), operationLimit
	if deadline, _ := ctx.Deadline(); r.Op != opDestroy {
		limit = min(transientLimit, time.Until(deadline)-2*lastPause)
	}
	var refused answer
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		a := p.slot(r.Card.PCIAddress).call(ctx, r)
		if r.Op == opDestroy && ctx.Err() != nil && a.Error != nil && refused.Error != nil {
			return refused // it explains more than the timeout
		}
		if a.Error == nil || !a.Error.Transient || time.Since(start)+pause > limit {
			return a
		}
		refused = a
		if !nvmlx.Sleep(ctx, pause) {
			return refused
		}
	}
}

// bounded returns a context that ends with ctx or after [operationLimit].
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	cause := fmt.Errorf("it has not ended after %s: %w", operationLimit, context.DeadlineExceeded)
	return context.WithTimeoutCause(ctx, operationLimit, cause)
}

// slot returns the worker slot of a card.
func (p *Partitions) slot(at device.PCIAddress) *workerSlot {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.slots[at] == nil {
		p.slots[at] = &workerSlot{
			idle: p.idle, busy: make(chan struct{}, 1),
			start: func() (*worker, error) { return child.Start[answer](child.Command{Args: p.command}, p.paths) },
		}
	}
	return p.slots[at]
}

// timeoutError returns the error of a call whose context ended because of cause. what says whether
// the operation may have changed the GPU.
func timeoutError(r request, cause error, what string) *nvidia.Error {
	e := r.fail(device.FailureTimeout, "%v: %s", cause, what)
	e.Cause = cause
	return e
}

// StopWorkers ends the existing workers, each after its current call, and waits until they are
// gone. After that no worker has NVML open. A later call starts a new worker.
func (p *Partitions) StopWorkers(ctx context.Context) error {
	p.mu.Lock()
	slots := maps.Clone(p.slots)
	p.mu.Unlock()
	var errs []error
	for at, s := range slots {
		if err := s.stop(ctx); err != nil {
			errs = append(errs, fmt.Errorf("stop the MIG worker of GPU %s: %w", at, err))
		}
	}
	return errors.Join(errs...)
}
