package driver

import (
	"context"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claim"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claimstatus"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health/stream"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/migrate"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/publish"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/reconciler"
)

// requests answers the kubelet's calls.
type requests struct {
	pool string
	admission
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
	hint := r.oversizedHint(r.node.View(), c)
	devices, err := r.preparer.Prepare(ctx, c)
	if err != nil {
		ended(string(cause.Of(err)))
		logger.Error(err, "Failed to prepare claim")
		return kubeletplugin.PrepareResult{Err: err}
	}
	took := ended("")
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

// oversizedHint returns a hint for users whose claim asks for at most half of a GPU's memory but
// got the whole GPU. For a claim that is prepared already, it returns "". So the caller must call
// it before Prepare, which records the claim.
func (r *requests) oversizedHint(v *nodeview.View, c *resourceapi.ResourceClaim) string {
	found := claim.Oversized(c, DriverName, func(name string) uint64 {
		for _, g := range v.Inventory.Node.GPUs {
			if g.WholeName() == name {
				return g.MemoryBytes
			}
		}
		return 0
	})
	if found == "" {
		return ""
	}
	if record, known, err := r.preparer.Records.Load(c.UID); err != nil || known && record.State == checkpoint.Prepared {
		return ""
	}
	if r.publisher.OffersFractions() {
		return found + ". Class shared.gpu.nvidia.com gives a share with a limit of memory"
	}
	return found + ". This node offers no shares with a limit of memory; " +
		"the chart's value shares=[{kind: fractions}] offers them in class shared.gpu.nvidia.com"
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
	if err != nil {
		ended(string(cause.Of(err)))
		logger.Error(err, "Failed to unprepare claim")
		r.events.ClaimEvent(c, events.UnprepareFailed, err.Error())
		return err
	}
	took := ended("")
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

// inFlightCalls has the kubelet's running calls, so that a stopping plugin can wait for them before
// it stops the gRPC server. It also tells a running Prepare call whether one of its claims was
// unprepared meanwhile.
type inFlightCalls struct {
	mu      sync.Mutex
	running map[*call]struct{}
	// draining makes intercept refuse new Prepare calls. The kubelet retries them, and the next plugin
	// instance answers.
	draining bool
}

// call is a running call. unprepared has the claims that were unprepared since it began.
type call struct{ unprepared map[types.UID]bool }

type callKey struct{}

func newInFlightCalls() *inFlightCalls {
	return &inFlightCalls{running: map[*call]struct{}{}}
}

// intercept is a [grpc.UnaryServerInterceptor], which runs around each call of the kubelet.
func (f *inFlightCalls) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	c := &call{unprepared: map[types.UID]bool{}}
	f.mu.Lock()
	if f.draining && strings.HasSuffix(info.FullMethod, "/NodePrepareResources") {
		f.mu.Unlock()
		return nil, status.Error(codes.Unavailable, "the plugin is stopping")
	}
	f.running[c] = struct{}{}
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.running, c)
	}()
	return handler(context.WithValue(ctx, callKey{}, c), req)
}

// Unprepared notes in all running calls that the claim was unprepared. The caller must still hold
// the claim's lock, because these calls may have read the claim before.
func (f *inFlightCalls) Unprepared(claim types.UID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range f.running {
		c.unprepared[claim] = true
	}
}

// UnpreparedSince reports whether the claim was unprepared after the call with this context began.
func (f *inFlightCalls) UnpreparedSince(ctx context.Context, claim types.UID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	c, _ := ctx.Value(callKey{}).(*call)
	return c != nil && c.unprepared[claim]
}

// drainPoll is how often Drain checks whether a call still runs. A stopping plugin does nothing
// else.
const drainPoll = 20 * time.Millisecond

// Drain makes the plugin refuse new Prepare calls, and waits until no call runs. It returns an
// error if the context ends before.
func (f *inFlightCalls) Drain(ctx context.Context) error {
	return wait.PollUntilContextCancel(ctx, drainPoll, true, func(context.Context) (bool, error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.draining = true
		return len(f.running) == 0, nil
	})
}
