package driver

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/publish/leader"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/reconciler"
)

// The driver checks the host every checkInterval. While the node is not ready, it checks every
// unreadyCheckInterval, because an admin may just have fixed the cause.
const (
	checkInterval        = time.Minute
	unreadyCheckInterval = 5 * time.Second
)

// hostWatch checks what the host must provide, and reports whether the node offers devices.
type hostWatch struct {
	node       *nodeview.Node
	base       *baseSpec
	checks     []nodeview.Check // also base
	leader     *leader.Lock
	reconciler *reconciler.Reconciler
	events     *events.Recorder
	metrics    *metrics.Metrics

	// What Run has reported last: why the node is not ready, and the View.
	lastReason     string
	lastGeneration uint64
}

// Check reports or clears the conditions of the host once.
func (h *hostWatch) Check(ctx context.Context) { h.node.Check(ctx, h.checks) }

// Run works until the context ends. It checks the host regularly, and after each change of the
// inventory. It reports each change of the node.
func (h *hostWatch) Run(ctx context.Context) {
	select { // nothing is reported before the first scan, unless that hangs
	case <-ctx.Done():
		return
	case <-h.node.FirstLook():
	case <-time.After(checkInterval):
	}
	var known inventory.Snapshot // what was known when the host was last checked
	var checkedAt time.Time
	for {
		v := h.node.View()
		pause := checkInterval
		if v.Blocked() {
			pause = unreadyCheckInterval
		}
		next := checkedAt.Add(pause)
		if !time.Now().Before(next) || !reflect.DeepEqual(v.Inventory, known) {
			h.Check(ctx)
			known, checkedAt = v.Inventory, time.Now()
			continue
		}
		h.report(ctx, v)
		select {
		case <-ctx.Done():
			return
		case <-v.Changed():
		case <-time.After(time.Until(next)):
		case <-h.leader.Led():
			h.node.Check(ctx, []nodeview.Check{h.base}) // the leader keeps it
		case <-h.leader.LeadsAgain():
			// A newer plugin instance has ended. It may have left files broken, and while the leader lock
			// passed from one to the other, neither of them repaired CDI specs.
			h.reconciler.Wake()
			checkedAt = time.Time{}
		}
	}
}

// report reports what has changed since the last report, and wakes reconciliation. That also
// renews the CDI specs of prepared claims after their device nodes were created again.
func (h *hostWatch) report(ctx context.Context, v *nodeview.View) {
	s, gpus := v.Preparable, len(v.Inventory.Node.GPUs)
	h.metrics.Inventory(s.Ready, gpus)
	h.metrics.InventoryProblems(v.Inventory.Node.ProblemCounts())
	h.reportWithheldGPUs(v)
	switch logger := klog.FromContext(ctx); {
	case s.Ready && h.lastReason != "":
		logger.Info("Offering devices", "gpus", gpus, "driver", s.Node.Driver.Version)
		h.events.Event(events.DevicesAvailable, fmt.Sprintf("%d GPUs are offered (driver %s)", gpus, s.Node.Driver.Version))
	case s.Reason != h.lastReason:
		logger.Info("Refusing to prepare claims", "reason", s.Reason)
		h.events.Event(events.DevicesUnavailable, "This node refuses to prepare claims: "+s.Reason)
	}
	if s.Ready && v.Generation != h.lastGeneration {
		h.reconciler.Wake()
	}
	h.lastReason, h.lastGeneration = s.Reason, v.Generation
}

// reportWithheldGPUs writes an Event about the GPUs that claims of NVIDIA's DRA driver still use,
// if they changed since the last Event.
func (h *hostWatch) reportWithheldGPUs(v *nodeview.View) {
	var lines []string
	if v.ReferenceErr != "" {
		lines = []string{v.ReferenceErr}
	}
	for _, c := range v.ReferenceClaims {
		lines = append(lines, fmt.Sprintf("%s holds %s", c, strings.Join(c.DeviceNames(), ", ")))
	}
	now := strings.Join(lines, "; ")
	h.events.EventOnChange(events.GPUsWithheld, now,
		"Not offering the GPUs of claims that NVIDIA's DRA driver prepared, until these claims end: "+now)
	h.metrics.ReferenceDriver(len(v.ReferenceClaims), v.ReferenceErr != "")
}
