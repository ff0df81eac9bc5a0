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

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

const (
	// releaseAnnotation is the Node's annotation with which an admin or a tool for driver upgrades
	// requests a release of the GPUs. Its value is "true".
	releaseAnnotation = DriverName + "/release-driver"
	// pausedValue is a part of label values. With such a value NVIDIA's k8s-driver-manager and
	// mig-parted ask clients of the GPU driver to stop.
	pausedValue = "paused-for-"
	// processExitTimeout is how long the quiescer waits for killed processes to exit. If they do not,
	// it reports that, and waits again after minBlockedPause. That pause doubles up to
	// maxBlockedPause.
	processExitTimeout = 5 * time.Second
	minBlockedPause    = 10 * time.Second
	maxBlockedPause    = 30 * time.Second
)

var errQuiesced = errors.New("GPUs are released for a driver upgrade")

// quiescer releases the GPUs during an upgrade of their driver, because an open NVML handle keeps
// the kernel module loaded.
//
// While a release is requested, the plugin does not watch, scan or partition GPUs and prepares
// nothing. Claims are still unprepared, which may open a partitioned GPU for a moment. The plugin
// reports the GPUs as released when none of its processes has them open.
type quiescer struct {
	readiness *nodeview.Readiness
	// labels are Node labels that request a release of the GPUs if their value contains pausedValue.
	labels []string
	// store keeps the release request across restarts. If it is nil, a restart loses the request.
	store *quiesceStore
	// stopWorkers ends the processes that partition GPUs, once they are idle. It is nil if there are
	// none.
	stopWorkers func(context.Context) error
	// onChange is called with on true and the reason when the GPUs are released, and with on false
	// when they may be used again.
	onChange func(on bool, reason string)
	// onBlocked is called with an error that blocks the release, but not twice in a row with the same
	// one.
	onBlocked func(error)

	mu     sync.Mutex
	reason string             // why a release is requested, or "" if none is
	cancel context.CancelFunc // cancels ctx
	ctx    context.Context    //nolint:containedctx // it lasts as long as the hardware may be used
	ended  chan struct{}      // closed when the release request ends
	// uses counts the running uses of the hardware. unused is closed while there are none.
	uses   int
	unused chan struct{}
	// hanging has killed processes that have not exited yet.
	hanging []*nvidia.HangingError
}

func newQuiescer() *quiescer {
	q := &quiescer{ended: make(chan struct{}), unused: make(chan struct{})}
	close(q.ended)
	close(q.unused)
	q.ctx, q.cancel = context.WithCancel(context.Background())
	return q
}

// reasonOn returns why the Node requests a release of the GPUs, or "" if it does not.
func (q *quiescer) reasonOn(node *corev1.Node) string {
	if node.Annotations[releaseAnnotation] == "true" {
		return "the Node's annotation " + releaseAnnotation + " asks for it"
	}
	for _, label := range q.labels {
		if value := node.Labels[label]; strings.Contains(value, pausedValue) {
			return "the Node's label " + label + " is " + value
		}
	}
	return ""
}

// Observe starts the release of the GPUs if node, the newest version of the Node, requests it. If
// node no longer requests it, Observe ends the release.
func (q *quiescer) Observe(node *corev1.Node) {
	reason := q.reasonOn(node)
	q.mu.Lock()
	defer q.mu.Unlock()
	if reason == q.reason {
		return
	}
	q.store.Save(reason)
	q.setReason(reason)
	if reason == "" {
		q.onChange(false, "")
	}
}

// Restore starts the release of the GPUs if the Node requested one when an earlier plugin process
// last read it. If the Node no longer does, Observe ends the release as soon as the API server
// answers.
func (q *quiescer) Restore(ctx context.Context) {
	reason, err := q.store.Load()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Failed to read the stored request to release the GPUs")
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if reason != "" {
		q.setReason(reason)
	}
}

// setReason starts the release for a new reason, or ends it if reason is "". The caller holds q.mu.
func (q *quiescer) setReason(reason string) {
	on, was := reason != "", q.reason != ""
	q.reason = reason
	if on {
		q.readiness.Report(nodeview.Condition{
			Source: "release", Code: nodeview.CodeReleased, Message: errQuiesced.Error() + ": " + reason, Types: nodeview.NVIDIATypes,
		})
	}
	switch {
	case on && !was:
		q.cancel()
		q.ended = make(chan struct{})
	case !on:
		q.ctx, q.cancel = context.WithCancel(context.Background())
		q.readiness.Clear("release")
		close(q.ended)
	}
}

// Active reports whether a release of the GPUs is requested.
func (q *quiescer) Active() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.reason != ""
}

// Use must be called before any access to the hardware, and done after it. The GPUs are not
// reported as released before done is called. ok is false if the hardware must not be accessed
// because a release is requested.
func (q *quiescer) Use() (done func(), ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.reason != "" {
		return func() {}, false
	}
	if q.uses == 0 {
		q.unused = make(chan struct{})
	}
	q.uses++
	return sync.OnceFunc(func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.uses--; q.uses == 0 {
			close(q.unused)
		}
	}), true
}

// current returns the context ctx, which ends when a release of the GPUs is requested, and the
// channel ended, which is closed when the GPUs may be used again.
func (q *quiescer) current() (ctx context.Context, ended <-chan struct{}) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.ctx, q.ended
}

// RunUnlessQuiesced calls run, the hardware watcher, and cancels it when a release is requested.
// After the release it calls run again. An error of run means that run may still have the hardware
// open.
func (q *quiescer) RunUnlessQuiesced(ctx context.Context, run func(context.Context) error) {
	var err error
	for ctx.Err() == nil {
		current, ended := q.current()
		if current.Err() != nil {
			q.awaitReleased(ctx, ended, err)
			select {
			case <-ctx.Done():
			case <-ended:
			}
			continue
		}
		running, stop := context.WithCancel(ctx)
		detach := context.AfterFunc(current, stop)
		err = run(running)
		detach()
		stop()
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Stopped watching the GPUs after an error")
		}
		if hangingProcesses(err) != nil {
			q.trackHanging(err) // awaitUnused waits for these processes
			err = nil
		}
		if current.Err() == nil {
			return // run ended without a release request
		}
	}
}

// awaitReleased waits until no process of this plugin has the GPUs open, and then reports the
// release. While a process has them open, it reports that and tries again. It returns early if the
// request ends, or if watchErr, the hardware watcher's error, blocks the release for good.
func (q *quiescer) awaitReleased(ctx context.Context, ended <-chan struct{}, watchErr error) {
	waiting, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		defer stop()
		select {
		case <-ended:
		case <-waiting.Done():
		}
	}()
	reported := ""
	for pause := minBlockedPause; ; pause = min(2*pause, maxBlockedPause) {
		blocker := watchErr
		if blocker == nil {
			blocker = q.awaitUnused(waiting)
		}
		reported = q.report(waiting, ended, blocker, reported)
		if blocker == nil || watchErr != nil {
			return
		}
		select {
		case <-waiting.Done():
			return
		case <-time.After(pause):
		}
	}
}

// report reports the release of the GPUs if blocker is nil, and otherwise the error blocker, unless
// its text is the one reported last. It returns the text reported last. If the release is no longer
// requested, it reports nothing.
func (q *quiescer) report(ctx context.Context, ended <-chan struct{}, blocker error, reported string) string {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case ctx.Err() != nil || q.ended != ended || q.reason == "": // the release is no longer requested
	case blocker == nil:
		klog.FromContext(ctx).Info("Released all GPU handles for the driver upgrade", "reason", q.reason)
		q.onChange(true, q.reason)
	case blocker.Error() != reported:
		klog.FromContext(ctx).Error(blocker, "Failed to release the GPUs; checking again", "reason", q.reason)
		q.onBlocked(blocker)
		return blocker.Error()
	}
	return reported
}

// awaitUnused waits until all uses of the hardware have ended, killed processes have exited and
// worker processes are stopped. It returns an error that names what still blocks the release.
func (q *quiescer) awaitUnused(ctx context.Context) error {
	q.mu.Lock()
	unused := q.unused
	q.mu.Unlock()
	select {
	case <-unused:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	q.mu.Lock()
	processes := q.hanging
	q.mu.Unlock()
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
	if q.stopWorkers == nil {
		return nil
	}
	ctx, stop := context.WithTimeoutCause(ctx, processExitTimeout, fmt.Errorf("it has not exited for %s", processExitTimeout))
	defer stop()
	return q.stopWorkers(ctx)
}

// Scan wraps scan so that it fails while a release of the GPUs is requested. A release also cancels
// a running scan.
func (q *quiescer) Scan(scan func(context.Context) (nvidia.Node, error)) func(context.Context) (nvidia.Node, error) {
	return func(ctx context.Context) (nvidia.Node, error) {
		current, _ := q.current()
		ctx, stop := context.WithCancel(ctx)
		defer stop()
		defer context.AfterFunc(current, stop)()
		if done, ok := q.Use(); ok {
			defer done()
			node, err := scan(ctx)
			q.trackHanging(err)
			if current.Err() == nil {
				return node, err
			}
		}
		return nvidia.Node{}, &nvidia.NotReadyError{Reason: errQuiesced.Error()}
	}
}

// trackHanging adds the hanging processes that err names to q.hanging, and removes those that have
// exited.
func (q *quiescer) trackHanging(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	left := slices.DeleteFunc(slices.Clone(q.hanging), func(h *nvidia.HangingError) bool {
		select {
		case <-h.Gone:
			return true
		default:
			return false
		}
	})
	q.hanging = append(left, hangingProcesses(err)...)
}

// hangingProcesses returns the hanging processes that err names.
func hangingProcesses(err error) []*nvidia.HangingError {
	var several interface{ Unwrap() []error }
	var one *nvidia.HangingError
	switch {
	case errors.As(err, &several):
		var all []*nvidia.HangingError
		for _, e := range several.Unwrap() {
			all = append(all, hangingProcesses(e)...)
		}
		return all
	case errors.As(err, &one):
		return []*nvidia.HangingError{one}
	}
	return nil
}

// reportQuiesce writes an Event when the GPUs are released, and another when they may be used
// again. Admins and tools for driver upgrades wait for these Events.
func (d *Driver) reportQuiesce(on bool, reason string) {
	d.metrics.Released(on)
	if on {
		d.events.Normal("DriverReleased", "Released all GPUs because "+reason+". The GPU driver can be replaced now. "+
			"Until the release request is removed, the plugin unprepares claims but prepares none")
	} else {
		d.events.Normal("DriverTaken", "The release request was removed: the plugin uses the GPUs again as soon as their driver is loaded")
	}
	wake(d.toReconcile)
}
