package driver

import (
	"context"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

const (
	// releaseAnnotation lets an admin, or what upgrades drivers, ask for the hardware: "true" on the Node.
	releaseAnnotation = DriverName + "/release-driver"
	// releaseLabel is what NVIDIA's k8s-driver-manager pauses the GPU Operator's DRA driver by; pausedForUpgrade is in its value then.
	releaseLabel     = "nvidia.com/gpu.deploy.dra-driver"
	pausedForUpgrade = "paused-for-driver-upgrade"
)

// release lets go of the hardware while somebody changes its driver: an open handle of NVML keeps the kernel module loaded.
//
// While it is on nobody listens to GPUs, none is looked at or cut, and nothing is prepared; claims are given back all the same, for which a GPU that was
// cut for one is opened for as long as that takes.
type release struct {
	gate *gate
	// told is called with each change, and why.
	told func(on bool, reason string)

	mu     sync.Mutex
	reason string             // empty while it is off
	known  bool               // whether the Node has been seen
	cancel context.CancelFunc // of the present context
	ctx    context.Context    //nolint:containedctx // it is what is waited for and ended
	over   chan struct{}      // closed when it is off again
}

func newRelease() *release {
	r := &release{over: make(chan struct{})}
	close(r.over)
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// wanted says why a Node asks for the hardware, and is empty if it does not.
func wanted(node *corev1.Node) string {
	if node.Annotations[releaseAnnotation] == "true" {
		return "the Node's annotation " + releaseAnnotation + " asks for it"
	}
	if value := node.Labels[releaseLabel]; strings.Contains(value, pausedForUpgrade) {
		return "the Node's label " + releaseLabel + " is " + value
	}
	return ""
}

// See follows the Node.
func (r *release) See(node *corev1.Node) {
	reason := wanted(node)
	r.mu.Lock()
	defer r.mu.Unlock()
	first := !r.known
	r.known = true
	if reason == r.reason {
		return
	}
	on, was := reason != "", r.reason != ""
	r.reason = reason
	if on {
		r.gate.Close("release", "the hardware has been let go of, for a change of its driver: "+reason)
	}
	switch {
	case on && !was:
		r.cancel()
		r.over = make(chan struct{})
	case !on:
		r.ctx, r.cancel = context.WithCancel(context.Background())
		r.gate.Close("release", "")
		close(r.over)
	}
	if on || !first {
		r.told(on, reason)
	}
}

// On says whether the hardware is let go of.
func (r *release) On() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.reason != ""
}

// present is a context that ends when the hardware is to be let go of, and what to wait for until it may be taken again.
func (r *release) present() (ctx context.Context, over <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ctx, r.over
}

// While runs what has the hardware, as long and as often as it may be had.
func (r *release) While(ctx context.Context, run func(context.Context)) {
	for ctx.Err() == nil {
		_, over := r.present()
		select {
		case <-ctx.Done():
			return
		case <-over:
		}
		present, _ := r.present()
		if present.Err() != nil {
			continue // once more
		}
		running, stop := context.WithCancel(ctx)
		released := context.AfterFunc(present, stop)
		run(running)
		released()
		stop()
		if present.Err() == nil {
			return // it ended by itself
		}
		if ctx.Err() == nil {
			klog.FromContext(ctx).Info("Nobody listens to the hardware while its driver is changed")
		}
	}
}

// Scan is a look at the hardware that is not taken, and not gone on with, while it is let go of.
func (r *release) Scan(scan func(context.Context) (nvidia.Node, error)) func(context.Context) (nvidia.Node, error) {
	return func(ctx context.Context) (nvidia.Node, error) {
		present, _ := r.present()
		ctx, stop := context.WithCancel(ctx)
		defer stop()
		defer context.AfterFunc(present, stop)()
		if present.Err() == nil {
			node, err := scan(ctx)
			if present.Err() == nil {
				return node, err
			}
		}
		return nvidia.Node{}, &nvidia.NotReadyError{Reason: "the hardware has been let go of, for a change of its driver"}
	}
}

// tellRelease says where people and upgrades look that the hardware was let go of, or taken again.
func (d *Driver) tellRelease(on bool, reason string) {
	d.metrics.Released(on)
	if on {
		d.events.normal("DriverReleased", "The hardware is let go of, so that its driver can be changed; claims can be given back, and none is prepared: "+reason)
	} else {
		d.events.normal("DriverTaken", "The hardware is taken again after a change of its driver")
	}
	wake(d.toReconcile)
}
