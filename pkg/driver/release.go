package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

const (
	// releaseAnnotation lets an admin, or what upgrades drivers, ask for the hardware: "true" on the Node.
	releaseAnnotation = DriverName + "/release-driver"
	// paused is in the value of a label by which NVIDIA's k8s-driver-manager and mig-parted tell clients of the driver to go away.
	paused = "paused-for-"
	// endLimit is how long what was killed is waited for at once; who has not ended by then is looked at again, after heldFirst at first and heldMost in the end.
	endLimit  = 5 * time.Second
	heldFirst = 10 * time.Second
	heldMost  = 30 * time.Second
)

var errLetGo = errors.New("the hardware has been let go of, for a change of its driver")

// release lets go of the hardware while somebody changes its driver: an open handle of NVML keeps the kernel module loaded.
//
// While it is on nobody listens to GPUs, none is looked at or cut, and nothing is prepared; claims are given back all the same, for which a GPU that was
// cut for one is opened for as long as that takes. That the hardware is let go of is told only when nothing of ours has it open.
type release struct {
	readiness *readiness
	// labels of the Node ask for the hardware when they are paused.
	labels []string
	// memory keeps over a restart what the Node asked for last; nil keeps nothing.
	memory *releaseMemory
	// workers ends those who cut GPUs when they are through; nil if there are none.
	workers func(context.Context) error
	// told is called when the hardware was let go of, and why, and when it may be taken again; held with what keeps it, once for each.
	told func(on bool, reason string)
	held func(error)

	mu     sync.Mutex
	reason string             // empty while it is off
	cancel context.CancelFunc // of the present context
	ctx    context.Context    //nolint:containedctx // it is what is waited for and ended
	over   chan struct{}      // closed when it is off again
	// users are under way with the hardware; unused is closed when there are none.
	users  int
	unused chan struct{}
	// hanging are processes that were killed and have not ended.
	hanging []*nvidia.HangingError
}

func newRelease() *release {
	r := &release{over: make(chan struct{}), unused: make(chan struct{})}
	close(r.over)
	close(r.unused)
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// wanted says why a Node asks for the hardware, and is empty if it does not.
func (r *release) wanted(node *corev1.Node) string {
	if node.Annotations[releaseAnnotation] == "true" {
		return "the Node's annotation " + releaseAnnotation + " asks for it"
	}
	for _, label := range r.labels {
		if value := node.Labels[label]; strings.Contains(value, paused) {
			return "the Node's label " + label + " is " + value
		}
	}
	return ""
}

// See follows the Node.
func (r *release) See(node *corev1.Node) {
	reason := r.wanted(node)
	r.mu.Lock()
	defer r.mu.Unlock()
	if reason == r.reason {
		return
	}
	r.memory.Keep(reason)
	r.change(reason)
	if reason == "" {
		r.told(false, "")
	}
}

// Remember lets the hardware go if the Node asked for it when it was last seen: until the API server answers that is what is known.
func (r *release) Remember(ctx context.Context) {
	reason, err := r.memory.Last()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Whether the hardware was let go of before the start is not known")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if reason != "" {
		r.change(reason)
	}
}

// change must be called with the lock, and with another reason than the one that there is.
func (r *release) change(reason string) {
	on, was := reason != "", r.reason != ""
	r.reason = reason
	if on {
		r.readiness.Report(condition{
			source: "release", code: codeReleased, message: errLetGo.Error() + ": " + reason, types: nvidiaTypes,
		})
	}
	switch {
	case on && !was:
		r.cancel()
		r.over = make(chan struct{})
	case !on:
		r.ctx, r.cancel = context.WithCancel(context.Background())
		r.readiness.Clear("release")
		close(r.over)
	}
}

// On says whether the hardware is to be let go of.
func (r *release) On() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.reason != ""
}

// Use is asked by whoever goes to the hardware: the hardware is not let go of before done. It is false if nobody may.
func (r *release) Use() (done func(), ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.reason != "" {
		return func() {}, false
	}
	if r.users == 0 {
		r.unused = make(chan struct{})
	}
	r.users++
	return sync.OnceFunc(func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.users--; r.users == 0 {
			close(r.unused)
		}
	}), true
}

// present is a context that ends when the hardware is to be let go of, and what to wait for until it may be taken again.
func (r *release) present() (ctx context.Context, over <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ctx, r.over
}

// While runs what has the hardware, as long and as often as it may be had. An error of run says that the hardware is held although run has returned.
func (r *release) While(ctx context.Context, run func(context.Context) error) {
	var err error
	for ctx.Err() == nil {
		present, over := r.present()
		if present.Err() != nil {
			r.letGo(ctx, over, err)
			select {
			case <-ctx.Done():
			case <-over:
			}
			continue
		}
		running, stop := context.WithCancel(ctx)
		released := context.AfterFunc(present, stop)
		err = run(running)
		released()
		stop()
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "The hardware is not listened to any more")
		}
		if hanging(err) != nil {
			r.remain(err) // they are waited for like all others
			err = nil
		}
		if present.Err() == nil {
			return // it ended by itself
		}
	}
}

// letGo waits until nothing of ours has the hardware, and tells it. What keeps it is told, and looked at again until it has ended or the hardware is not
// asked for any more. Who listened has failed to let go, in a way that nothing can be waited for, if there is an error.
func (r *release) letGo(ctx context.Context, over <-chan struct{}, failed error) {
	waiting, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		defer stop()
		select {
		case <-over:
		case <-waiting.Done():
		}
	}()
	told := ""
	for pause := heldFirst; ; pause = min(2*pause, heldMost) {
		keeps := failed
		if keeps == nil {
			keeps = r.settled(waiting)
		}
		told = r.tell(waiting, over, keeps, told)
		if keeps == nil || failed != nil {
			return
		}
		select {
		case <-waiting.Done():
			return
		case <-time.After(pause):
		}
	}
}

// tell says that the hardware was let go of, or what keeps it, unless that is what was told last. It returns what is told now.
func (r *release) tell(ctx context.Context, over <-chan struct{}, keeps error, told string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case ctx.Err() != nil || r.over != over || r.reason == "": // it is not asked for any more
	case keeps == nil:
		klog.FromContext(ctx).Info("Nothing of ours has the hardware while its driver is changed", "reason", r.reason)
		r.told(true, r.reason)
	case keeps.Error() != told:
		klog.FromContext(ctx).Error(keeps, "The hardware cannot be let go of; looking again until it can", "reason", r.reason)
		r.held(keeps)
		return keeps.Error()
	}
	return told
}

// settled waits for all that has the hardware besides who listens.
func (r *release) settled(ctx context.Context) error {
	r.mu.Lock()
	unused := r.unused
	r.mu.Unlock()
	select {
	case <-unused:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	r.mu.Lock()
	processes := r.hanging
	r.mu.Unlock()
	limit := time.NewTimer(endLimit)
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
	if r.workers == nil {
		return nil
	}
	ctx, stop := context.WithTimeoutCause(ctx, endLimit, fmt.Errorf("it has not ended for %s", endLimit))
	defer stop()
	return r.workers(ctx)
}

// Scan is a look at the hardware that is not taken, and not gone on with, while it is let go of.
func (r *release) Scan(scan func(context.Context) (nvidia.Node, error)) func(context.Context) (nvidia.Node, error) {
	return func(ctx context.Context) (nvidia.Node, error) {
		present, _ := r.present()
		ctx, stop := context.WithCancel(ctx)
		defer stop()
		defer context.AfterFunc(present, stop)()
		if done, ok := r.Use(); ok {
			defer done()
			node, err := scan(ctx)
			r.remain(err)
			if present.Err() == nil {
				return node, err
			}
		}
		return nvidia.Node{}, &nvidia.NotReadyError{Reason: errLetGo.Error()}
	}
}

// remain keeps in mind the processes that an error says hang, and forgets those that have ended.
func (r *release) remain(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	left := slices.DeleteFunc(slices.Clone(r.hanging), func(h *nvidia.HangingError) bool {
		select {
		case <-h.Gone:
			return true
		default:
			return false
		}
	})
	r.hanging = append(left, hanging(err)...)
}

// hanging are the processes that an error says hang.
func hanging(err error) []*nvidia.HangingError {
	var several interface{ Unwrap() []error }
	var one *nvidia.HangingError
	switch {
	case errors.As(err, &several):
		var all []*nvidia.HangingError
		for _, e := range several.Unwrap() {
			all = append(all, hanging(e)...)
		}
		return all
	case errors.As(err, &one):
		return []*nvidia.HangingError{one}
	}
	return nil
}

// tellRelease says where people and upgrades look that the hardware was let go of, or may be taken again.
func (d *Driver) tellRelease(on bool, reason string) {
	d.metrics.Released(on)
	if on {
		d.events.normal("DriverReleased", "The hardware was let go of: nothing of this plugin has it open, and its driver can be changed; claims can be given back, and none is prepared: "+reason)
	} else {
		d.events.normal("DriverTaken", "The hardware is not asked for any more, and is used again as soon as its driver is there")
	}
	wake(d.toReconcile)
}
