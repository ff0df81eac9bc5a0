package driver

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// How often the hook is looked at and the container runtime is asked again whether it injects CDI specs: seldom while both are as they should be, soon
// after someone may have followed the advice otherwise.
const (
	runtimeInterval = time.Minute
	mendedInterval  = 5 * time.Second
)

// startBackground starts the driver's loops; each ends with the context, and Wait returns when all have.
func (d *Driver) startBackground(ctx context.Context, policy *nodePolicy, toPublisher chan struct{}) *sync.WaitGroup {
	var wg sync.WaitGroup
	d.startHealth(ctx, &wg, func() { wake(toPublisher) })
	wg.Go(func() { d.release.While(ctx, d.listener(ctx)) })
	wg.Go(func() { policy.Watch(ctx) })
	wg.Go(func() { d.inv.Run(ctx) })
	wg.Go(func() { d.follow(ctx, toPublisher) })
	wg.Go(func() { d.reconcile(ctx) })
	wg.Go(func() { d.abandoned.Run(ctx) })
	wg.Go(func() { d.status.Run(ctx) })
	wg.Go(func() {
		if err := d.publisher(ctx).Run(ctx, toPublisher); err != nil {
			d.fail(err)
		}
	})
	wg.Go(func() { d.specs.Watch(ctx, d.mend, d.mended) })
	wg.Go(func() { d.mender.Run(ctx) })
	return &wg
}

// nodePolicy follows what the Node says. It must be read before anything is decided: what is
// offered would change at once, and hardware would be opened that somebody has asked for.
func (d *Driver) nodePolicy(toPublisher chan<- struct{}) *nodePolicy {
	return &nodePolicy{
		client: d.client, node: d.cfg.NodeName,
		set: func(annotated device.Policies) {
			d.layouts.Annotate(annotated)
			wake(toPublisher)
			wake(d.toReconcile)
		},
		wrong: func(message string) { d.events.warn("PolicyIgnored", message) },
		seen: func(node *corev1.Node) {
			d.release.See(node)
			d.beside.See(node)
			d.health.Clear(node.Annotations[clearAnnotation])
		},
	}
}

// follow does what a change of the inventory asks for: the base spec, then the slices, then the specs of
// held claims. A Pod may come before the base spec is written; its container then fails to start and is
// tried again.
func (d *Driver) follow(ctx context.Context, toPublisher chan<- struct{}) {
	logger := klog.FromContext(ctx)
	reason, files := "", ""
	for {
		// Before the first look there is nothing to say: the inventory's first answer wakes this loop too.
		pause := runtimeInterval
		if d.readiness.Blocked() {
			pause = mendedInterval
		}
		changed := false
		select {
		case <-ctx.Done():
			return
		case <-d.inv.Changed():
			changed = true
		case <-d.toFollow:
		case <-time.After(pause):
		}
		d.checkHook(ctx)
		renumbered := d.writeBase(&files)
		d.askRuntime(ctx)
		d.tellWithheld()
		s := d.readiness.Snapshot()
		d.metrics.Inventory(s.Ready, len(s.Node.GPUs))
		switch {
		case s.Ready:
			if reason != "" {
				changed = true
				logger.Info("Devices are offered", "gpus", len(s.Node.GPUs), "driver", s.Node.Driver.Version)
				d.events.normal("DevicesAvailable", fmt.Sprintf("%d GPUs are offered (driver %s)", len(s.Node.GPUs), s.Node.Driver.Version))
			}
			reason = ""
			if changed {
				wake(toPublisher)
				wake(d.toReconcile)
			}
		case s.Reason != reason:
			reason = s.Reason
			logger.Info("No claim is prepared on this node", "reason", reason)
			d.events.warn("DevicesUnavailable", "No claim is prepared on this node: "+reason)
			wake(toPublisher) // the last GPU may be gone
		}
		if renumbered { // device nodes may have other numbers now: what held claims have is looked at too
			if err := d.mend(ctx); err != nil {
				logger.Error(err, "Could not bring the CDI specs of all held claims up to date")
			}
		}
	}
}

// writeBase keeps the base spec as the inventory says, and anew where device nodes were made anew since
// files: then claims have to be looked at too. The node is not ready while the spec cannot be written.
func (d *Driver) writeBase(files *string) (renumbered bool) {
	if d.superseded.Load() {
		d.readiness.Clear("base-spec")
		return false
	}
	done, ok := d.release.Use()
	defer done()
	s := d.inv.Snapshot()
	if !ok || !s.Ready {
		d.readiness.Clear("base-spec") // it is not written now, for a reason of its own
		return false
	}
	write := d.specs.WriteBase
	if s.Files != *files {
		write = d.specs.RewriteBase
	}
	if err := write(s.Node.Common); err != nil {
		d.readiness.Report(condition{
			source: "base-spec", code: codeBaseSpec, passing: true, types: nvidiaTypes,
			message: fmt.Sprintf("the node-wide CDI spec cannot be written: %v", err),
		})
		return false
	}
	d.readiness.Clear("base-spec")
	renumbered = d.unmended.Swap(false) || s.Files != *files
	*files = s.Files
	return renumbered
}

// checkHook keeps the hook binary on the host. The node is not ready while the host could not run
// it: containers with a GPU would then fail to start. A superseded instance leaves installing to
// the newer one, but still checks: it serves claims, and must not keep a condition that the newer
// one has removed.
func (d *Driver) checkHook(ctx context.Context) {
	superseded, changed := d.superseded.Load(), false
	var err error
	if !superseded {
		changed, err = d.hook.Install()
	}
	if err == nil {
		err = d.hook.Check()
	}
	if err != nil {
		d.readiness.Report(condition{source: "hook", code: codeHookMissing, message: err.Error(), types: nvidiaTypes})
		return
	}
	if changed {
		klog.FromContext(ctx).Info("Installed the CDI hook on the host", "path", d.cfg.HookPath)
	}
	d.readiness.Clear("hook")
	if superseded {
		return
	}
	// Only fractions that the driver holds containers to need this one: their claims say so if it
	// is missing.
	if _, err := d.mpsHook.Install(); err != nil {
		klog.FromContext(ctx).Error(err, "Claims with fractions that limit whole containers cannot be prepared")
	}
}

// askRuntime asks whether the container runtime would ignore our specs: then the node is not ready.
// A runtime that cannot be asked changes nothing.
func (d *Driver) askRuntime(ctx context.Context) {
	if d.cfg.CRISocket == "" {
		return
	}
	code, message, err := runtimeRefusesCDI(ctx, d.cfg.CRISocket, d.cfg.CDIRoot)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Could not find out whether the container runtime has CDI switched on", "err", err)
		return
	}
	if code == "" {
		d.readiness.Clear("runtime")
		return
	}
	d.readiness.Report(condition{source: "runtime", code: code, message: message})
}

func (d *Driver) publisher(ctx context.Context) *publisher {
	return &publisher{
		client: d.client, nodeName: d.cfg.NodeName, inv: d.publishable(),
		turn:   newTurn(d.cfg.PluginDir, time.Now()),
		slices: d.offer, mark: d.marked, due: d.readiness.Due,
		onError: d.HandleError, onVersion: d.slow.Serves,
		onTurn: func(held, superseded bool) {
			d.metrics.Publisher(held)
			if held {
				d.layouts.Begin()
			}
			d.health.Publishes(held)
			if d.superseded.Swap(superseded) && held {
				wake(d.toFollow)
				// What happened while neither instance mended.
				if err := d.mend(ctx); err != nil {
					klog.FromContext(ctx).Error(err, "Could not write all CDI specs again")
				}
			}
		},
	}
}
