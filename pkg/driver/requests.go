package driver

import (
	"context"
	"slices"
	"strings"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claimstatus"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health/loop"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health/stream"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/migrate"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
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
	ctx = klog.NewContext(ctx, logger)
	ended := r.metrics.Request(metrics.Prepare)
	// Use comes before View: if it is denied, the View says why.
	done, ok := r.hardware.Use()
	defer done()
	v := r.node.View()
	hint := findOversized(c, v.Inventory.Node.GPUs)
	if hint != "" {
		hint = r.oversizedHint(hint, c.UID)
	}
	var devices []kubeletplugin.Device
	err := r.refusal(v, c)
	if err == nil && !ok {
		err = cause.ForClaim(c.Namespace+"/"+c.Name, steps.NotReady(v.Preparable))
	}
	if err == nil {
		devices, err = r.preparer.Prepare(ctx, v.Preparable, c)
	}
	took := ended(string(cause.Of(err)))
	if err != nil {
		logger.Error(err, "Failed to prepare claim")
		return kubeletplugin.PrepareResult{Err: err}
	}
	r.status.Prepared(c)
	if hint != "" {
		object := kubeletplugin.NamespacedObject{NamespacedName: types.NamespacedName{Namespace: c.Namespace, Name: c.Name}, UID: c.UID}
		r.events.ClaimEvent(object, events.WholeGPUHeld, hint)
	}
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = d.DeviceName
	}
	logger.Info("Prepared claim", "devices", names, "took", took)
	return kubeletplugin.PrepareResult{Devices: devices}
}

// refusal returns an error if the claim must not be prepared although the node has its devices.
func (r *requests) refusal(v *nodeview.View, c *resourceapi.ResourceClaim) error {
	name := c.Namespace + "/" + c.Name
	for _, held := range v.ReferenceClaims {
		if held.UID == c.UID { // it already has devices, under names that this driver does not know
			return cause.Refusal(name, cause.Claim,
				"NVIDIA's DRA driver prepared it on this node as %s: its Pods keep running but cannot restart here: delete them",
				strings.Join(held.DeviceNames(), ", "))
		}
	}
	// To prepare a whole GPU the driver does not query the hardware, so without this check a container
	// would start without a GPU that is lost.
	if c.Status.Allocation == nil {
		return nil
	}
	verdicts := r.health.View()
	for _, result := range c.Status.Allocation.Devices.Results {
		n, ok := device.ParseName(result.Device)
		i := slices.IndexFunc(v.GPUs, func(g nvidia.GPU) bool { return g.WholeName() == n.GPU })
		if result.Driver != DriverName || !ok || i < 0 {
			continue
		}
		verdict := verdicts.Of(v.GPUs[i].GPU, n)
		if verdict.State != health.Lost {
			continue
		}
		if _, prepared, err := r.preparer.Records.Load(c.UID); err != nil || prepared {
			return nil //nolint:nilerr // the Preparer reports an unreadable record
		}
		return cause.Refusal(name, cause.Device,
			"request %s was allocated device %s, which cannot be prepared: %s", result.Request, result.Device, verdict.Message())
	}
	return nil
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
	ended := r.metrics.Request(metrics.Unprepare)
	err := r.preparer.Unprepare(klog.NewContext(ctx, logger), c.UID)
	if err == nil {
		err = r.migrator.EndClaim(klog.NewContext(ctx, logger), c.UID)
	}
	took := ended(string(cause.Of(err)))
	if err != nil {
		logger.Error(err, "Failed to unprepare claim")
		r.events.ClaimEvent(c, events.UnprepareFailed, err.Error())
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
	stream.Send(ctx, reports, stream.Sources{Pool: r.pool, Node: r.node.View, Verdicts: r.health, LostDevices: r.status.LostDevices})
	return nil
}
