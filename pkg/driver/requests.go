package driver

import (
	"context"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claimstatus"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health/loop"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health/stream"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/migrate"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/publish"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/quiesce"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/reconciler"
)

// requests answers the kubelet's calls.
type requests struct {
	pool string
	// node knows what may be prepared, and why not more. health has the verdicts on the devices.
	node     *nodeview.Node
	health   *loop.Loop
	hardware *quiesce.Access
	preparer transaction
	// migrator ends claims that NVIDIA's DRA driver prepared.
	migrator   *migrate.Migrator
	publisher  *publish.Publisher
	reconciler *reconciler.Reconciler
	status     *claimstatus.Reporter
	events     *events.Recorder
	metrics    *metrics.Metrics
}

// PrepareResourceClaims prepares the claims in parallel, so that a claim that waits for its GPU
// does not delay the others. The error of a claim is in the claim's own result.
func (r *requests) PrepareResourceClaims(
	ctx context.Context, claims []*resourceapi.ResourceClaim,
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := make([]kubeletplugin.PrepareResult, len(claims))
	var wg sync.WaitGroup
	for i, c := range claims {
		wg.Go(func() { results[i] = r.prepare(ctx, c) })
	}
	wg.Wait()
	answer := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	for i, c := range claims {
		answer[c.UID] = results[i]
	}
	return answer, nil
}

func (r *requests) prepare(ctx context.Context, c *resourceapi.ResourceClaim) kubeletplugin.PrepareResult {
	logger := klog.FromContext(ctx).WithValues("claim", klog.KObj(c), "claimUID", c.UID)
	start := time.Now()
	var devices []kubeletplugin.Device
	hint := ""
	// ok is not needed: while the hardware must not be used, the view is not ready. So the view must
	// be read after Use.
	done, _ := r.hardware.Use()
	defer done()
	v := r.node.Refresh()
	err := refusePredecessorClaim(v, c.UID, c.Namespace+"/"+c.Name)
	if err == nil {
		err = r.refuseLost(v, c)
	}
	if err == nil {
		hint = r.oversizedHint(v, c)
		devices, err = r.preparer.Prepare(klog.NewContext(ctx, logger), v.Preparable, c)
	}
	took := time.Since(start)
	r.metrics.Request(metrics.Prepare, took, string(cause.Of(err)))
	if err != nil {
		logger.Error(err, "Failed to prepare claim")
		return kubeletplugin.PrepareResult{Err: err}
	}
	r.status.Prepared(c)
	if hint != "" {
		r.events.NormalClaim(c, "WholeGPUHeld", hint)
	}
	logger.Info("Prepared claim", "devices", names(devices), "took", took)
	return kubeletplugin.PrepareResult{Devices: devices}
}

// oversizedHint returns a hint for users whose claim asks for at most half of a GPU's memory but
// got a whole GPU. For any other claim, and for a claim that is prepared already, it returns "". So
// the caller must call it before Prepare, which records the claim.
func (r *requests) oversizedHint(v *nodeview.View, c *resourceapi.ResourceClaim) string {
	hint := r.publisher.OversizedHint(c, v.Inventory.Node.GPUs)
	if hint == "" {
		return ""
	}
	if record, found, err := r.preparer.Record(c.UID); err != nil || found && record.State == checkpoint.Prepared {
		return ""
	}
	return hint
}

// UnprepareResourceClaims releases the claims' devices. It succeeds for claims that are not
// prepared on this node.
func (r *requests) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	errs := make([]error, len(claims))
	var wg sync.WaitGroup
	for i, c := range claims {
		wg.Go(func() { errs[i] = r.unprepare(ctx, c) })
	}
	wg.Wait()
	answer := make(map[types.UID]error, len(claims))
	for i, c := range claims {
		answer[c.UID] = errs[i]
	}
	return answer, nil
}

func (r *requests) unprepare(ctx context.Context, c kubeletplugin.NamespacedObject) error {
	logger := klog.FromContext(ctx).WithValues("claim", c.NamespacedName, "claimUID", c.UID)
	start := time.Now()
	err := r.preparer.Unprepare(klog.NewContext(ctx, logger), c.UID)
	if err == nil {
		err = r.migrator.EndClaim(klog.NewContext(ctx, logger), c.UID)
	}
	took := time.Since(start)
	r.metrics.Request(metrics.Unprepare, took, string(cause.Of(err)))
	if err != nil {
		logger.Error(err, "Failed to unprepare claim")
		r.events.WarnClaim(c, "UnprepareFailed", err.Error())
		return err
	}
	if len(r.publisher.HandedOver()) > 0 || len(r.publisher.MIGModeUnneeded()) > 0 {
		r.reconciler.Wake() // reconciliation may wait for the claim's MIG instance or for MIG mode
	}
	r.publisher.ClaimEnded()
	logger.Info("Unprepared claim", "took", took)
	return nil
}

// WatchHealthStatus sends the devices' health to the channel until the kubelet disconnects.
func (r *requests) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	stream.Send(ctx, reports, stream.Sources{Pool: r.pool, Node: r.node, Verdicts: r.health, Claims: r.status})
	return nil
}

func names(devices []kubeletplugin.Device) []string {
	out := make([]string, len(devices))
	for i, d := range devices {
		out[i] = d.DeviceName
	}
	return out
}
