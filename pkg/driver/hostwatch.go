package driver

import (
	"context"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/publish/leader"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/quiesce"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/reconciler"
)

// The driver checks every checkInterval that the host can run the CDI hook and that the container
// runtime reads the driver's CDI specs. While the node is not ready, it checks every
// unreadyCheckInterval, because an admin may just have fixed the cause.
const (
	checkInterval        = time.Minute
	unreadyCheckInterval = 5 * time.Second
)

// hostWatch checks what the host must provide, writes the node-wide base CDI spec and reports
// whether the node offers devices.
type hostWatch struct {
	node   *nodeview.Node
	checks []nodeview.Check
	// leader knows whether a newer plugin instance leads. That one maintains the files that exist once
	// per node: the base spec and the CDI hook.
	leader   *leader.Lock
	inv      *inventory.Inventory
	hardware *quiesce.Access
	specs    *cdi.Store
	paths    nvidia.Paths
	// charDir is the host's /dev/char, or empty if the plugin makes no links there.
	charDir    string
	reconciler *reconciler.Reconciler
	events     *events.Recorder
	metrics    *metrics.Metrics
}

// Check reports or clears the conditions of the host once.
func (h *hostWatch) Check(ctx context.Context) { h.node.Conditions().Check(ctx, h.checks) }

// Run works until the context ends. After each change of the node it checks the host, writes the
// node-wide base CDI spec, reports what has changed and wakes reconciliation. If device nodes
// were created again, it also repairs the CDI specs of prepared claims.
func (h *hostWatch) Run(ctx context.Context) {
	logger := klog.FromContext(ctx)
	select { // nothing is reported before the first scan, unless that hangs
	case <-ctx.Done():
		return
	case <-h.node.FirstLook():
	case <-time.After(checkInterval):
	}
	reason, files, generation := "", "", uint64(0)
	for {
		checked := h.node.Refresh()
		h.Check(ctx)
		renumbered := h.writeBaseSpec(&files)
		v := h.node.Refresh()
		h.reportWithheldGPUs(v)
		s, gpus := v.Preparable, len(v.Inventory.Node.GPUs)
		h.metrics.Inventory(s.Ready, gpus)
		switch {
		case s.Ready && reason != "":
			logger.Info("Offering devices", "gpus", gpus, "driver", s.Node.Driver.Version)
			h.events.Normal("DevicesAvailable", fmt.Sprintf("%d GPUs are offered (driver %s)", gpus, s.Node.Driver.Version))
		case s.Reason != reason:
			logger.Info("Refusing to prepare claims", "reason", s.Reason)
			h.events.Warn("DevicesUnavailable", "This node refuses to prepare claims: "+s.Reason)
		}
		reason = s.Reason
		if s.Ready && v.Generation != generation {
			h.reconciler.Wake()
		}
		generation = v.Generation
		if renumbered { // the CDI specs of prepared claims may have old device numbers
			if err := h.reconciler.RepairSpecs(ctx); err != nil {
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
		case <-h.leader.LeadsAgain():
			// A newer plugin instance has ended. It may have left files broken, and while the leader lock
			// passed from one to the other, neither of them repaired CDI specs.
			if err := h.reconciler.RepairSpecs(ctx); err != nil {
				logger.Error(err, "Failed to restore all CDI specs")
			}
		case <-time.After(pause):
		}
	}
}

// writeBaseSpec writes the node-wide base CDI spec if the file differs from the inventory. While
// that fails, the node is not ready. files points to the fingerprint of the device nodes at the
// last call; renumbered is true if the device nodes were created again since then.
func (h *hostWatch) writeBaseSpec(files *string) (renumbered bool) {
	if h.leader.NewerLeads() {
		h.node.Conditions().Clear("base-spec")
		return false
	}
	done, ok := h.hardware.Use()
	defer done()
	s := h.inv.Snapshot()
	if !ok || !s.Ready {
		h.node.Conditions().Clear("base-spec") // another condition says why the spec is not written
		return false
	}
	write := h.specs.WriteBase
	if s.Files != *files {
		write = h.specs.RewriteBase
	}
	if err := write(s.Node.Common); err != nil {
		h.node.Conditions().Report(nodeview.Condition{
			Source: "base-spec", Code: nodeview.CodeBaseSpec, Transient: true, Types: nodeview.NVIDIATypes,
			Message: fmt.Sprintf("cannot write the node-wide CDI spec: %v", err),
		})
		return false
	}
	h.node.Conditions().Clear("base-spec")
	if err := nvidia.LinkDeviceNodes(h.paths, s.Node, h.charDir); err != nil {
		klog.ErrorS(err, "Failed to link device nodes by number; containers may lose their GPU when systemd reloads its units")
	}
	renumbered = h.reconciler.TakeUncheckedSpecs() || s.Files != *files
	*files = s.Files
	return renumbered
}
