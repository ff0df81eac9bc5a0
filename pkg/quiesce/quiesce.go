// Package quiesce releases the GPUs during an upgrade of their driver, because an open NVML handle
// keeps the kernel module loaded.
//
// An admin or a tool requests the release with an annotation or a label of the Node. Until the
// request ends, the plugin does not watch, scan or partition GPUs, and prepares no claim. Claims
// are still unprepared, which may open a partitioned GPU for a moment. The [Quiescer] reports the
// GPUs as released when no process of the plugin has them open. It keeps the request on disk, so
// that a plugin that starts during the upgrade does not open the GPUs.
//
// [Access] is the part that each user of the hardware needs. The package does not open GPUs itself.
package quiesce

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
)

const (
	// Annotation is the Node's annotation with which an admin or a tool for driver upgrades
	// requests a release of the GPUs. Its value is "true".
	Annotation = device.DriverName + "/release-driver"
	// pausedValue is a part of label values. With such a value NVIDIA's k8s-driver-manager and
	// mig-parted ask clients of the GPU driver to stop.
	pausedValue = "paused-for-"
	// If something still has the GPUs open, the Quiescer reports that, and checks again after
	// minBlockedPause. That pause doubles up to maxBlockedPause.
	minBlockedPause = 10 * time.Second
	maxBlockedPause = 30 * time.Second
	// conditionSource names this package in the node's readiness conditions, and codeReleased is the
	// code of its condition.
	conditionSource = "release"
	codeReleased    = "hardware-released"
)

// Readiness shows in the node's slices and errors that the GPUs are released.
type Readiness interface {
	Report(c nodeview.Condition)
	Clear(source string)
}

// Reports tells admins, and tools for driver upgrades, when the GPUs are released.
type Reports interface {
	Event(reason events.Reason, message string)
}

// Options are the settings and dependencies of a [Quiescer].
type Options struct {
	// Labels are Node labels that request a release of the GPUs if their value contains pausedValue.
	Labels []string
	// StateDir is the directory in which the release request survives restarts.
	StateDir string

	Access *Access
	// StopWorkers ends the processes that partition GPUs once they are idle.
	StopWorkers func(ctx context.Context) error
	Readiness   Readiness
	Reports     Reports
	// Released shows in the metrics whether the GPUs are released.
	Released func(is bool)
	// Wake wakes reconciliation when the hardware may be used again.
	Wake func()
}

// Quiescer denies Access while the Node requests a release of the GPUs, and reports the release.
type Quiescer struct {
	*Access
	opts   Options
	store  store
	logger klog.Logger

	mu     sync.Mutex
	reason string // why a release is requested, or "" if none is
}

// New returns a Quiescer. If the Node requested a release when an earlier plugin process last read
// it, Access is denied from now on. If the Node no longer does, Observe ends the release as soon as
// the API server answers.
func New(ctx context.Context, o Options) *Quiescer {
	q := &Quiescer{Access: o.Access, opts: o, store: newStore(o.StateDir), logger: klog.FromContext(ctx)}
	reason, err := q.store.Load()
	if err != nil {
		// The file is there, so a release was requested. Until the API server answers, it stays in force.
		q.logger.Error(err, "Failed to read the stored request to release the GPUs")
		reason = "the stored request cannot be read"
	}
	if reason != "" {
		q.setReason(reason)
	}
	return q
}

// requestOf returns why the Node requests a release of the GPUs, or "" if it does not.
func (q *Quiescer) requestOf(node *corev1.Node) string {
	if node.Annotations[Annotation] == "true" {
		return "the Node's annotation " + Annotation + " asks for it"
	}
	for _, label := range q.opts.Labels {
		if value := node.Labels[label]; strings.Contains(value, pausedValue) {
			return "the Node's label " + label + " is " + value
		}
	}
	return ""
}

// Observe starts the release of the GPUs if node, the newest version of the Node, requests it. If
// node no longer requests it, Observe ends the release.
func (q *Quiescer) Observe(node *corev1.Node) {
	reason := q.requestOf(node)
	q.mu.Lock()
	defer q.mu.Unlock()
	if reason == q.reason {
		return
	}
	if err := q.store.Save(reason); err != nil {
		q.logger.Error(err, "Failed to store the request to release the hardware; "+
			"a restart without the API server would open the GPUs during the driver upgrade")
	}
	q.setReason(reason)
	if reason == "" {
		q.logger.Info("The release of the GPUs ended")
		q.opts.Released(false)
		q.opts.Reports.Event(events.DriverTaken,
			"The release request was removed: the plugin uses the GPUs again as soon as their driver is loaded")
		q.opts.Wake()
	}
}

// setReason starts the release for a new reason, or ends it if reason is "". The caller holds q.mu.
func (q *Quiescer) setReason(reason string) {
	q.reason = reason
	if reason == "" {
		q.allow()
		q.opts.Readiness.Clear(conditionSource)
		return
	}
	// A Prepare that is denied Access must find the condition, so report it first.
	q.opts.Readiness.Report(nodeview.Condition{
		Source: conditionSource, Code: codeReleased, Message: errReleased.Error() + ": " + reason, Types: nodeview.NVIDIATypes,
	})
	q.deny()
}

// Run calls watch, the hardware watcher, and cancels it when a release is requested. After the
// release it calls watch again. If a release is requested at the start, it first calls watch with a
// canceled context, so that watch reports the GPUs as released. An error of watch means that watch
// may still have the hardware open.
func (q *Quiescer) Run(ctx context.Context, watch func(context.Context) error) {
	logger := klog.FromContext(ctx)
	for ctx.Err() == nil {
		current, _ := q.current()
		running, stop := context.WithCancel(klog.NewContext(current, logger))
		detach := context.AfterFunc(ctx, stop)
		err := watch(running)
		detach()
		stop()
		if err != nil && ctx.Err() == nil {
			logger.Error(err, "Stopped watching the GPUs after an error")
		}
		if hangingProcesses(err) != nil {
			q.trackHanging(err) // awaitUnused waits for these processes
			err = nil
		}
		if current.Err() == nil {
			return // watch ended without a release request
		}
		_, ended := q.current()
		q.awaitReleased(ctx, ended, err)
		select {
		case <-ctx.Done():
		case <-ended:
		}
	}
}

// awaitReleased waits until no process of this plugin has the GPUs open, and then reports the
// release. While a process has them open, it reports that and tries again. It returns early if the
// request ends, or if watchErr, the hardware watcher's error, blocks the release for good.
func (q *Quiescer) awaitReleased(ctx context.Context, ended <-chan struct{}, watchErr error) {
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
			blocker = q.awaitClosed(waiting)
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

// awaitClosed waits until nothing uses the hardware, and stops the worker processes. It returns an
// error that names what still blocks the release.
func (q *Quiescer) awaitClosed(ctx context.Context) error {
	if err := q.awaitUnused(ctx); err != nil {
		return err
	}
	ctx, stop := context.WithTimeoutCause(ctx, processExitTimeout, fmt.Errorf("it has not exited for %s", processExitTimeout))
	defer stop()
	return q.opts.StopWorkers(ctx)
}

// report reports the release of the GPUs if blocker is nil, and otherwise the error blocker, unless
// its text is the one reported last. It returns the text reported last. If the release is no longer
// requested, it reports nothing.
func (q *Quiescer) report(ctx context.Context, ended <-chan struct{}, blocker error, reported string) string {
	q.mu.Lock()
	defer q.mu.Unlock()
	_, now := q.current()
	switch {
	case ctx.Err() != nil || now != ended || q.reason == "": // the release is no longer requested
	case blocker == nil:
		klog.FromContext(ctx).Info("Released all GPU handles for the driver upgrade", "reason", q.reason)
		q.opts.Released(true)
		q.opts.Reports.Event(events.DriverReleased, "Released all GPUs because "+q.reason+". The GPU driver can be replaced now. "+
			"Until the release request is removed, the plugin unprepares claims but prepares none")
		q.opts.Wake()
	case blocker.Error() != reported:
		klog.FromContext(ctx).Error(blocker, "Failed to release the GPUs; checking again", "reason", q.reason)
		q.opts.Reports.Event(events.DriverHeld, "Failed to release the GPUs for the driver upgrade: "+blocker.Error())
		return blocker.Error()
	}
	return reported
}
