package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/hook"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
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
	gate     *gate
	layouts  *layouts
	// shares says which devices several claims may hold; supervisor runs the daemons that such claims, and those that ask for MPS, need.
	shares     device.ShareRules
	supervisor Supervisor
	status     *claimStatus
	calls      *inflight
	// toReconcile asks for records and hardware to be compared soon.
	toReconcile chan struct{}
	// limited is what was last said of GPUs that are not offered in every shape. Only the publisher uses it.
	limited map[string]string
	// toldShares is what was last said of what is not shared. Only the publisher uses it.
	toldShares toldShares
	// lost is what was last said of devices that claims have lost. Only reconcile uses it.
	lost map[string]toldLost
	// unhealthy says of the devices that claims have lost, by name, what became of them.
	unhealthy atomic.Pointer[map[string]string]
	presence  *presence
	// health has the verdicts on devices; watch listens to the hardware for it.
	health     *healthWatch
	healthTold healthTold
	// release lets go of the hardware while its driver is changed.
	release *release
	watch   func(ctx context.Context, tell func(device.Signal))

	fail   context.CancelCauseFunc
	helper atomic.Pointer[kubeletplugin.Helper]
	// superseded is true once a newer instance publishes: what is one per node (base spec, hook) is then that instance's to keep, or the two
	// would take turns in undoing each other's work.
	superseded atomic.Bool
}

var _ kubeletplugin.DRAPlugin = &Driver{}

// NewHardware is the node that the configuration names: its files, and NVML in a child process of its own.
func NewHardware(cfg *config.Config) (inventory.Hardware, error) {
	executable, err := os.Executable()
	if err != nil {
		return inventory.Hardware{}, fmt.Errorf("find the plugin's own binary, which looks at the hardware in a child process: %w", err)
	}
	paths := Paths(cfg)
	return inventory.Hardware{
		Scan:        nvidia.Isolated(paths, executable, ScanCommand),
		Fingerprint: func() string { return nvidia.Fingerprint(paths) },
		Present:     func() (bool, error) { return nvidia.HasNVIDIADevice(cfg.SysfsRoot) },
	}, nil
}

// NewPartitions is the node's hardware as far as it is cut: NVML in a worker process per GPU.
func NewPartitions(cfg *config.Config, m *metrics.Metrics) (*nvidia.Partitions, error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the plugin's own binary, which cuts GPUs in child processes: %w", err)
	}
	partitions := nvidia.NewPartitions(Paths(cfg), executable, nvidia.PartitionCommand)
	partitions.Observe = m.MIGCall
	return partitions, nil
}

// Parts are what a Driver is made of.
type Parts struct {
	Client kubernetes.Interface
	// StatusClient writes what claims were given. With a client of its own it takes nothing from the rate of requests that Prepare needs.
	StatusClient kubernetes.Interface
	Hardware     inventory.Hardware
	// Partitions may be nil: then whole GPUs are handed out and nothing is cut.
	Partitions prepare.Partitions
	// Supervisor runs the control daemons of MPS. Nil is the one of this node.
	Supervisor Supervisor
	// Watch tells what the hardware says about its health, until the context ends. Nil is nobody who listens.
	Watch   func(ctx context.Context, tell func(device.Signal))
	Metrics *metrics.Metrics
}

// New wires the rooms together. It writes nothing outside the plugin directory.
func New(ctx context.Context, cfg *config.Config, parts Parts) (*Driver, error) {
	policies, err := device.ParsePolicies(cfg.MIGPolicy)
	if err != nil {
		return nil, err
	}
	shares, err := device.ParseShares(cfg.Shares)
	if err != nil {
		return nil, err
	}
	if parts.Supervisor == nil {
		parts.Supervisor = mps.NewClient(MPSPaths(cfg))
	}
	release := newRelease()
	parts.Hardware.Scan = release.Scan(parts.Hardware.Scan)
	inv := inventory.New(parts.Hardware)
	d := &Driver{
		cfg: cfg, client: parts.Client, metrics: parts.Metrics, inv: inv,
		specs: cdi.NewStore(cfg.CDIRoot),
		hook:  hook.New(cfg.HookSource, cfg.HookPath), mpsHook: hook.New(cfg.MPSHookSource, cfg.MPSHookPath()),
		events: newNodeEvents(ctx, parts.Client, cfg.NodeName),
		gate:   &gate{inv: inv},
		calls:  newInflight(),
		status: newClaimStatus(parts.StatusClient, parts.Metrics.ClaimStatusError),
		shares: shares, supervisor: supervised{parts.Supervisor, MPSPaths(cfg), parts.Metrics},

		toReconcile: make(chan struct{}, 1),
	}
	if d.presence, err = bePresent(ctx, cfg.PluginDir); err != nil {
		return nil, err
	}
	if d.preparer, err = d.newPreparer(Paths(cfg), parts.Partitions); err != nil {
		d.presence.End()
		return nil, err
	}
	d.layouts = newLayouts(d.preparer, policies)
	d.release, release.gate, release.told = release, d.gate, d.tellRelease
	if err := d.watchHealth(parts.Watch); err != nil {
		d.presence.End()
		return nil, err
	}
	return d, nil
}

// newPreparer opens what is on the disk.
func (d *Driver) newPreparer(paths nvidia.Paths, partitions prepare.Partitions) (*prepare.Preparer, error) {
	records, err := checkpoint.Open(d.cfg.StateDir(), durable.OS{})
	if err != nil {
		return nil, err
	}
	locks, err := lock.NewSet(filepath.Join(d.cfg.StateDir(), "locks"))
	if err != nil {
		return nil, err
	}
	bootID, err := readBootID(d.cfg.ProcRoot)
	if err != nil {
		return nil, err
	}
	return prepare.New(prepare.Options{
		DriverName: DriverName, Pool: d.cfg.NodeName,
		Hardware: d.gate, Specs: d.specs, Records: records, Locks: locks, BootID: bootID, Now: time.Now,
		Verify:     func(edits specs.ContainerEdits) error { return cdi.Verify(edits, d.visible(paths)) },
		Partitions: partitions,
		MIGEdits:   paths.CapabilityEdits,
		MPS:        d.supervisor,
		MPSEdits: func(daemon string) specs.ContainerEdits {
			return mps.Edits(MPSPaths(d.cfg), d.cfg.MPSHookPath(), daemon)
		},
		Policy:  func(g device.GPU) device.Policy { return d.layouts.Policy(g) },
		Changed: func(ctx context.Context, c kubeletplugin.NamespacedObject) { d.status.Changed(ctx, c, d.given(c.UID)) },
		Reread: func(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
			return d.client.ResourceV1().ResourceClaims(namespace).Get(ctx, name, metav1.GetOptions{})
		},
	}), nil
}

// readBootID tells this boot of the node from any other. A proc that does not have it (an unusual mount) is no reason to fail: the process's own has.
func readBootID(procRoot string) (string, error) {
	const file = "sys/kernel/random/boot_id"
	raw, err := os.ReadFile(filepath.Join(procRoot, file))
	if errors.Is(err, fs.ErrNotExist) {
		raw, err = os.ReadFile(filepath.Join("/proc", file))
	}
	if err != nil {
		return "", fmt.Errorf("read the kernel's boot ID (--proc-root): %w", err)
	}
	return strings.TrimSpace(string(raw)), nil
}

// Run serves the node until the context ends, then lets what is under way finish. A non-nil error is fatal: it tells main to exit with a code other than 0.
func (d *Driver) Run(ctx context.Context, probe *Probe) error {
	logger := klog.FromContext(ctx)
	defer d.presence.End()
	ctx, d.fail = context.WithCancelCause(ctx)
	defer d.fail(nil)

	if err := removeStaleSockets(ctx, d.cfg.PluginDir, d.cfg.RegistrarDir); err != nil {
		logger.Error(err, "Stale sockets stay")
	}
	if err := d.preparer.Recover(ctx); err != nil {
		return fmt.Errorf("recover the records in %s: %w", d.cfg.StateDir(), err)
	}
	d.countHeld(ctx)
	// Before the first call of the kubelet: no Pod may slip through while nobody knows yet that the runtime would ignore its GPUs.
	d.checkHook(ctx)
	d.askRuntime(ctx)
	notLooked := d.inv.Snapshot().Reason
	background := d.startBackground(ctx)
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
	if s := d.gate.Snapshot(); !s.Ready {
		return fmt.Errorf("no devices are offered yet: %s", s.Reason)
	}
	return nil
}

// leaveIfUninstalled removes what we made on the node, if the DaemonSet is gone for good and no claim needs it.
func (d *Driver) leaveIfUninstalled(ctx context.Context) {
	logger := klog.FromContext(ctx)
	if d.cfg.DaemonSetName == "" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	gone, err := daemonSetGone(ctx, d.client, d.cfg.Namespace, d.cfg.DaemonSetName)
	if err != nil {
		logger.Error(err, "Leaving everything on the node in its place")
		return
	}
	if !gone {
		return
	}
	alone, err := d.presence.Alone()
	if err != nil {
		logger.Error(err, "Leaving everything on the node in its place")
		return
	}
	if !alone {
		logger.Info("The driver is being uninstalled, but another instance of it lives on this node, which goes on using what is there, or removes it when it ends")
		return
	}
	if err := d.withdraw(ctx); err != nil {
		logger.Error(err, "The kubelet will do that soon")
	}
	held, err := d.preparer.Held()
	if err != nil || held.Claims > 0 {
		logger.Info("The driver is being uninstalled, but claims are held: what their Pods need stays on the node", "claims", held.Claims, "err", err)
		return
	}
	left, err := d.leaveNode(ctx)
	switch {
	case err != nil:
		logger.Error(err, "Could not remove everything that the driver made on this node")
	case len(left) > 0:
		logger.Info("The driver is being uninstalled: removed all that it made on this node; its directory stays, because of what it did not make", "directory", d.cfg.PluginDir, "left", left)
	default:
		logger.Info("The driver is being uninstalled: removed all that it made on this node")
	}
}

func (d *Driver) countHeld(ctx context.Context) {
	held, err := d.preparer.Held()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not count the claims that are held")
		return
	}
	d.metrics.Held(held.Claims, held.GPUs)
}
