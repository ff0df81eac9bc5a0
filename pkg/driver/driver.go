package driver

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/hook"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/predecessor"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/publish"
)

// DriverName is the name under which claims' DeviceClasses find our devices, and the kubelet our plugin.
const DriverName = "gpu.nvidia.com"

// ScanCommand is the subcommand of the plugin's own binary that looks at the hardware for it; see nvidia.Isolated for why in a process of its own.
const ScanCommand = "scan"

// drainTimeout bounds how long a terminating plugin lets the kubelet's calls finish. The chart's grace period is longer.
const drainTimeout = 30 * time.Second

// firstLookTimeout bounds how long a starting plugin stays unknown to the kubelet for want of an answer of the hardware.
const firstLookTimeout = 5 * time.Second

// inventorySource is what the driver needs to know of the node's devices.
type inventorySource interface {
	Snapshot() inventory.Snapshot
}

// Driver is one instance of the plugin.
type Driver struct {
	cfg      *config.Config
	client   kubernetes.Interface
	metrics  *metrics.Metrics
	inv      *inventory.Inventory
	specs    *cdi.Store
	hook     *hook.Hook
	mpsHook  *hook.Hook
	preparer *prepare.Preparer
	events   *nodeEvents
	// readiness joins all that keeps the node from preparing claims.
	readiness *readiness
	layouts   *publish.Layouts
	// slow warns of schedulers that are slow with counters.
	slow *slowScheduler
	// shares says which devices several claims may hold; supervisor runs the daemons that such claims, and those that ask for MPS, need.
	shares     device.ShareRules
	supervisor Supervisor
	status     *claimStatus
	calls      *inflight
	abandoned  *abandonment
	modes      *modes
	mender     *claimMender
	beside     *besidePlugin
	// before is what the reference driver has left on the node, if it was here before; toldWithheld what was last said of it.
	before       *predecessor.Store
	toldWithheld string
	// toPublisher asks for the slices to be made anew.
	toPublisher chan struct{}
	// unsettled says that claims keep devices from being offered as configured.
	unsettled atomic.Bool
	// toFollow asks for hook, runtime and base spec to be checked at once. A readiness condition has come
	// or gone, or a newer instance was rolled back and may have left what does not work.
	toFollow chan struct{}
	// toReconcile asks for records and hardware to be compared soon.
	toReconcile chan struct{}
	// limited is what was last said of GPUs that are not offered as their policy wants. Only the
	// publisher uses it.
	limited map[string]string
	// toldShares is what was last said of what is not shared. Only the publisher uses it.
	toldShares toldShares
	// fractions says that there are devices which claims can only have with MPS; absentSince is since when its supervisor is missed,
	// absentTold whether that was said. Only reconcile uses them.
	fractions   atomic.Bool
	absentSince time.Time
	absentTold  bool
	lost        losses
	presence    *presence
	// health has the verdicts on devices; watch listens to the hardware for it.
	health     *healthWatch
	healthTold healthTold
	// release lets go of the hardware while its driver is changed.
	release *release
	watch   func(ctx context.Context, tell func(device.Signal)) error
	// unrecovered says that what calls left unfinished before the start was not looked at, because the hardware was let go of, and unmended that specs
	// were not.
	unrecovered, unmended atomic.Bool

	fail   context.CancelCauseFunc
	helper atomic.Pointer[kubeletplugin.Helper]
	// superseded is true once a newer instance publishes: what is one per node (base spec, hook) is then that instance's to keep, or the two
	// would take turns in undoing each other's work.
	superseded atomic.Bool
}

var _ kubeletplugin.DRAPlugin = &Driver{}

// Run serves the node until the context ends, then lets what is under way finish. A non-nil error is fatal: it tells main to exit with a code other than 0.
func (d *Driver) Run(ctx context.Context, probe *Probe) error {
	logger := klog.FromContext(ctx)
	defer d.presence.End()
	ctx, d.fail = context.WithCancelCause(ctx)
	defer d.fail(nil)

	if err := removeStaleSockets(ctx, d.cfg.PluginDir, d.cfg.RegistrarDir); err != nil {
		logger.Error(err, "Stale sockets stay")
	}
	// Before anything is done with the hardware: the Node may ask for it.
	d.release.Remember(ctx)
	policy := d.nodePolicy(d.toPublisher)
	policy.Read(ctx)
	if err := d.recover(ctx); err != nil {
		return err
	}
	d.metrics.Held(d.countHeld)
	// Before the first call of the kubelet: no Pod may slip through while nobody knows yet that the runtime would ignore its GPUs.
	d.checkHook(ctx)
	d.askRuntime(ctx)
	notLooked := d.inv.Snapshot().Reason
	background := d.startBackground(ctx, policy, d.toPublisher)
	defer background.Wait()
	defer d.fail(nil)
	d.awaitFirstLook(ctx, notLooked)

	// Background work ends before Run does; the gRPC servers get a context of their own, so that calls under way outlive the signal.
	serving, stopServing := context.WithCancel(context.WithoutCancel(ctx))
	defer stopServing()
	options := []kubeletplugin.Option{
		kubeletplugin.DriverName(DriverName),
		kubeletplugin.KubeClient(d.client),
		kubeletplugin.NodeName(d.cfg.NodeName),
		kubeletplugin.PluginDataDirectoryPath(d.cfg.PluginDir),
		kubeletplugin.RegistrarDirectoryPath(d.cfg.RegistrarDir),
		kubeletplugin.Serialize(false),
		kubeletplugin.GRPCInterceptor(d.calls.intercept),
	}
	if d.cfg.PodUID != "" {
		options = append(options, kubeletplugin.RollingUpdate(types.UID(d.cfg.PodUID)))
	}
	helper, err := kubeletplugin.Start(serving, d, options...)
	if err != nil {
		return fmt.Errorf("serve the kubelet: %w", err)
	}
	defer helper.Stop()
	d.helper.Store(helper)
	probe.Set(d.live, d.ready)

	<-ctx.Done()
	logger.Info("Stopping: no new work is begun, calls under way may finish", "cause", context.Cause(ctx))
	background.Wait()
	drain, cancel := context.WithTimeout(serving, drainTimeout)
	defer cancel()
	drained := d.calls.Drain(drain)
	if drained != nil {
		logger.Error(drained, "Calls of the kubelet are still under way; it will repeat them", "timeout", drainTimeout)
	}
	helper.Stop()
	if drained == nil {
		d.leaveIfUninstalled(serving)
	}
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
}

// recover finishes or undoes what calls left unfinished, as soon as the hardware may be had.
func (d *Driver) recover(ctx context.Context) error {
	done, ok := d.release.Use()
	defer done()
	d.unrecovered.Store(!ok)
	if !ok {
		return nil
	}
	if err := d.preparer.Recover(ctx); err != nil {
		return fmt.Errorf("recover the records in %s: %w", d.cfg.StateDir(), err)
	}
	return nil
}

// awaitFirstLook lets the inventory look at the node once before the kubelet is told of this instance: from then on the kubelet sends it what an older
// instance answers until then, and "not looked yet" would be a worse answer. Hardware that does not answer keeps claims from being given back only for
// so long.
func (d *Driver) awaitFirstLook(ctx context.Context, notLooked string) {
	ctx, cancel := context.WithTimeout(ctx, firstLookTimeout)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for d.inv.Snapshot().Reason == notLooked {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// HandleError is told of background failures. What can be retried is logged and counted; anything else ends the process in order.
func (d *Driver) HandleError(ctx context.Context, err error, msg string) {
	utilruntime.HandleErrorWithContext(ctx, err, msg)
	if errors.Is(err, kubeletplugin.ErrRecoverable) || isRecoverable(err) {
		d.metrics.PublishError()
		if apierrors.IsInvalid(err) { // a retry alone does not help
			what := "this node's ResourceSlices"
			if errors.As(err, new(probeError)) {
				what = "the plugin's test slices (dry run)"
			}
			d.events.warn("SlicesRejected", "The API server rejects "+what+"; look for an admission policy that refuses them, else report a bug: "+rejection(err))
		}
		return
	}
	d.fail(fmt.Errorf("%s: %w", msg, err))
}

// live is false when only a restart helps: the CDI directory was removed on the host, and this container's mount still shows the removed one.
// Calls to the hardware are bounded, so for the rest an answer at all is the proof.
func (d *Driver) live(context.Context) error {
	var stat syscall.Stat_t
	if err := syscall.Stat(d.cfg.CDIRoot, &stat); err == nil && stat.Nlink == 0 {
		return fmt.Errorf("the CDI directory %s was removed on the host: a restarted container sees the new one", d.cfg.CDIRoot)
	}
	return nil
}

// ready is true when the kubelet knows us and the node's devices are known.
func (d *Driver) ready(context.Context) error {
	status := d.helper.Load().RegistrationStatus()
	switch {
	case status == nil:
		return errors.New("the kubelet has not registered the plugin yet")
	case !status.PluginRegistered:
		return fmt.Errorf("the kubelet refused to register the plugin: %s", status.Error)
	}
	if s := d.readiness.Snapshot(); !s.Ready {
		return fmt.Errorf("claims are not prepared yet: %s", s.Reason)
	}
	return nil
}

func (d *Driver) countHeld() (claims, gpus int, _ error) {
	held, err := d.preparer.Held()
	return held.Claims, held.GPUs, err
}
