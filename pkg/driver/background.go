package driver

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
)

// The driver checks every checkInterval that the host can run the CDI hook and that the container
// runtime reads the driver's CDI specs. While the node is not ready, it checks every
// unreadyCheckInterval, because an admin may just have fixed the cause.
const (
	checkInterval        = time.Minute
	unreadyCheckInterval = 5 * time.Second
)

// startBackground starts the driver's background goroutines, which end with the context. The Wait
// of the returned WaitGroup returns after the last of them has ended.
func (d *Driver) startBackground(ctx context.Context, policy *nodePolicy) *sync.WaitGroup {
	var wg sync.WaitGroup
	d.health.Restore(ctx)
	wg.Go(func() { d.health.Run(ctx) })
	wg.Go(func() { d.healthReport.Run(ctx) })
	wg.Go(func() { d.quiesce.Run(ctx, d.health.Watcher(ctx)) })
	wg.Go(func() { policy.Watch(ctx) })
	wg.Go(func() { d.inv.Run(ctx) })
	wg.Go(func() { d.node.Run(ctx) })
	wg.Go(func() { d.followNode(ctx) })
	wg.Go(func() { d.reconciler.Run(ctx) })
	wg.Go(func() { d.claimGC.Run(ctx) })
	wg.Go(func() { d.status.Run(ctx, d.preparer) })
	wg.Go(func() {
		if err := d.publisher.Run(ctx); err != nil {
			d.fail(err)
		}
	})
	wg.Go(func() { d.specs.Watch(ctx, d.reconciler.RepairSpecs, d.reconciler.ReportRepairedSpecs) })
	wg.Go(func() { d.reconciler.RunSpecRepairs(ctx) })
	return &wg
}

// newNodePolicy returns the watcher of the Node object. The caller must call Read before the driver
// prepares claims or opens GPUs, because the Node may forbid partitions or request a release of the
// GPUs.
func (d *Driver) newNodePolicy() *nodePolicy {
	return &nodePolicy{
		client: d.client, node: d.cfg.NodeName,
		onPolicies: func(annotated device.Policies) {
			d.publisher.SetNodePolicies(annotated)
			d.reconciler.Wake()
		},
		onProblem: func(message string) { d.events.Warn("PolicyIgnored", message) },
		onNode: func(node *corev1.Node) {
			d.quiesce.Observe(node)
			d.devicePlugin.Observe(node)
			d.health.Observe(node)
		},
	}
}

// followNode runs until the context ends. After each change of the node it checks the host, writes
// the node-wide base CDI spec, reports what has changed and wakes reconciliation. If device nodes
// were created again, it also repairs the CDI specs of prepared claims.
func (d *Driver) followNode(ctx context.Context) {
	logger := klog.FromContext(ctx)
	select { // nothing is reported before the first scan, unless that hangs
	case <-ctx.Done():
		return
	case <-d.node.FirstLook():
	case <-time.After(checkInterval):
	}
	reason, files, generation := "", "", uint64(0)
	for {
		checked := d.node.Refresh()
		d.node.Conditions().Check(ctx, d.checks)
		renumbered := d.writeBaseSpec(&files)
		v := d.node.Refresh()
		d.reportWithheldGPUs(v)
		s, gpus := v.Preparable, len(v.Inventory.Node.GPUs)
		d.metrics.Inventory(s.Ready, gpus)
		switch {
		case s.Ready && reason != "":
			logger.Info("Offering devices", "gpus", gpus, "driver", s.Node.Driver.Version)
			d.events.Normal("DevicesAvailable", fmt.Sprintf("%d GPUs are offered (driver %s)", gpus, s.Node.Driver.Version))
		case s.Reason != reason:
			logger.Info("Refusing to prepare claims", "reason", s.Reason)
			d.events.Warn("DevicesUnavailable", "This node refuses to prepare claims: "+s.Reason)
		}
		reason = s.Reason
		if s.Ready && v.Generation != generation {
			d.reconciler.Wake()
		}
		generation = v.Generation
		if renumbered { // the CDI specs of prepared claims may have old device numbers
			if err := d.reconciler.RepairSpecs(ctx); err != nil {
				logger.Error(err, "Failed to update the CDI specs of prepared claims")
			}
		}
		pause := checkInterval
		if v.Blocked() {
			pause = unreadyCheckInterval
		}
		select {
		case <-ctx.Done():
			return
		case <-checked.Changed():
		case <-d.leader.LeadsAgain():
			// A newer plugin instance has ended. It may have left files broken, and while the leader lock
			// passed from one to the other, neither of them repaired CDI specs.
			if err := d.reconciler.RepairSpecs(ctx); err != nil {
				logger.Error(err, "Failed to restore all CDI specs")
			}
		case <-time.After(pause):
		}
	}
}

// writeBaseSpec writes the node-wide base CDI spec if the file differs from the inventory. While
// that fails, the node is not ready. files points to the fingerprint of the device nodes at the
// last call; renumbered is true if the device nodes were created again since then.
func (d *Driver) writeBaseSpec(files *string) (renumbered bool) {
	if d.leader.NewerLeads() {
		d.node.Conditions().Clear("base-spec")
		return false
	}
	done, ok := d.quiesce.Use()
	defer done()
	s := d.inv.Snapshot()
	if !ok || !s.Ready {
		d.node.Conditions().Clear("base-spec") // another condition says why the spec is not written
		return false
	}
	write := d.specs.WriteBase
	if s.Files != *files {
		write = d.specs.RewriteBase
	}
	if err := write(s.Node.Common); err != nil {
		d.node.Conditions().Report(nodeview.Condition{
			Source: "base-spec", Code: nodeview.CodeBaseSpec, Transient: true, Types: nodeview.NVIDIATypes,
			Message: fmt.Sprintf("cannot write the node-wide CDI spec: %v", err),
		})
		return false
	}
	d.node.Conditions().Clear("base-spec")
	renumbered = d.reconciler.TakeUncheckedSpecs() || s.Files != *files
	*files = s.Files
	return renumbered
}
