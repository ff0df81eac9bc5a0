package driver

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/workqueue"
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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/predecessor"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/publish"
)

// NewHardware is the node that the configuration names: its files, and NVML in a child process of its own.
func NewHardware(cfg *config.Config) (inventory.Hardware, error) {
	executable, err := os.Executable()
	if err != nil {
		return inventory.Hardware{}, fmt.Errorf("find the plugin's own binary, which looks at the hardware in a child process: %w", err)
	}
	paths := Paths(cfg)
	glance := nvidia.NewGlance(paths)
	return inventory.Hardware{
		Scan:        nvidia.Isolated(paths, executable, ScanCommand),
		Fingerprint: glance.Fingerprint,
		Present:     glance.Present,
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
	// StatusClient writes what claims were given, and looks up claims that are held. With a client of its own it takes nothing from the rate of requests that Prepare needs.
	StatusClient kubernetes.Interface
	Hardware     inventory.Hardware
	// Partitions may be nil: then whole GPUs are handed out and nothing is cut.
	Partitions prepare.Partitions
	// Supervisor runs the control daemons of MPS. Nil is the one of this node.
	Supervisor Supervisor
	// Watch tells what the hardware says about its health, until the context ends. Nil is nobody who listens.
	// Its error says that the hardware is still held.
	Watch   func(ctx context.Context, tell func(device.Signal)) error
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
	release.labels = strings.FieldsFunc(cfg.ReleaseLabels, func(r rune) bool { return r == ',' })
	if w, ok := parts.Partitions.(interface {
		Dismiss(ctx context.Context) error
	}); ok {
		release.workers = w.Dismiss
	}
	parts.Hardware.Scan = release.Scan(parts.Hardware.Scan)
	inv := inventory.New(parts.Hardware)
	d := &Driver{
		cfg: cfg, client: parts.Client, metrics: parts.Metrics, inv: inv,
		specs: cdi.NewStore(cfg.CDIRoot),
		hook:  hook.New(cfg.HookSource, cfg.HookPath), mpsHook: hook.New(cfg.MPSHookSource, cfg.MPSHookPath()),
		events: newNodeEvents(ctx, parts.Client, cfg.NodeName),
		calls:  newInflight(tidy, debug.FreeOSMemory),
		shares: shares, supervisor: supervised{parts.Supervisor, MPSPaths(cfg), cfg.ProcRoot, parts.Metrics},

		toReconcile: make(chan struct{}, 1), toPublisher: make(chan struct{}, 1), toFollow: make(chan struct{}, 1),
	}
	if cfg.ClaimStatus {
		d.status = newClaimStatus(parts.StatusClient, parts.Metrics.ClaimStatusError)
	}
	d.readiness = newReadiness(inv, func() { wake(d.toPublisher); wake(d.toFollow) })
	if d.presence, err = bePresent(ctx, cfg.PluginDir); err != nil {
		return nil, err
	}
	if d.preparer, err = d.newPreparer(ctx, Paths(cfg), parts.Partitions); err != nil {
		d.presence.End()
		return nil, err
	}
	d.beside = &besidePlugin{refuse: cfg.BesideDevicePlugin == config.BesideRefuse, readiness: d.readiness, warn: d.events.warn, seen: d.metrics.DevicePlugin}
	d.modes = &modes{turnOff: d.preparer.ModeOff, changed: inv.Doubt}
	d.abandoned = d.newAbandonment(parts.StatusClient)
	d.mender = &claimMender{
		claims: d.preparer, left: workqueue.NewTyped[types.UID](), failed: func() { wake(d.toReconcile) },
		use: func() (func(), bool) { return d.release.Use() }, off: func() { d.unmended.Store(true) },
	}
	d.layouts = publish.NewLayouts(d.preparer, publish.APIServer{Client: d.client, Driver: DriverName, Node: cfg.NodeName}, policies)
	d.slow = &slowScheduler{warn: d.events.warn, show: d.metrics.SlowScheduler}
	d.release, release.readiness, release.told = release, d.readiness, d.tellRelease
	release.memory = newReleaseMemory(cfg.StateDir(), func(err error) {
		klog.FromContext(ctx).Error(err, "A plugin that starts while the driver is changed and the API server is away would take the hardware")
	})
	release.held = func(err error) {
		d.events.warn("DriverHeld", "The hardware cannot be let go of: "+err.Error())
	}
	if err := d.watchHealth(parts.Watch); err != nil {
		d.presence.End()
		return nil, err
	}
	return d, nil
}

// heldPatience is shorter than a kubelet waits before it asks again, and long enough for a Pod that ends when it is told to, or has a short grace period: a
// Pod that was deleted by force has all of that.
const heldPatience = 10 * time.Second

// newPreparer opens what is on the disk. With the context the plugin stops.
func (d *Driver) newPreparer(ctx context.Context, paths nvidia.Paths, partitions prepare.Partitions) (*prepare.Preparer, error) {
	records, err := checkpoint.Open(d.cfg.StateDir(), durable.NewWatched())
	if err != nil {
		return nil, err
	}
	locks, err := lock.NewSet(filepath.Join(d.cfg.StateDir(), "locks"))
	if err != nil {
		return nil, err
	}
	bootID, err := durable.BootID(d.cfg.ProcRoot)
	if err != nil {
		return nil, fmt.Errorf("%w (--proc-root)", err)
	}
	d.before = predecessor.NewStore(d.cfg.PluginDir, d.cfg.StateDir(), DriverName, bootID, durable.OS{})
	if partitions != nil {
		partitions = newForgetful(partitions, d.events)
	}
	return prepare.New(prepare.Options{
		DriverName: DriverName, Pool: d.cfg.NodeName,
		Hardware: withheld{d.readiness, d.before}, Specs: d.specs, Records: records, Locks: locks, BootID: bootID, Now: time.Now, HeldPatience: heldPatience, Stopping: ctx.Done(),
		Verify:     (&cdi.Verifier{Visible: d.visible(paths)}).Verify,
		Partitions: partitions,
		MIGEdits:   paths.CapabilityEdits,
		MPS:        d.supervisor,
		NoMPS:      !d.cfg.MPS,
		MPSEdits: func(daemon string) specs.ContainerEdits {
			return mps.Edits(MPSPaths(d.cfg), daemon)
		},
		LimitEdits: func(gpuUUID string, mebibytes uint64) specs.ContainerEdits {
			return mps.LimitEdits(mps.Roots{Driver: d.cfg.DriverRoot, Cgroups: d.cfg.CgroupRoot}, d.cfg.MPSHookPath(), gpuUUID, mebibytes)
		},
		GivenBack: d.givenBack, Overtaken: d.calls.Overtaken, Repaired: d.repaired, NotLooked: d.lost.NotLooked,
		Totals:  d.shareTotals,
		Changed: func(ctx context.Context, c kubeletplugin.NamespacedObject) { d.status.Changed(ctx, c, d.given(c.UID)) },
		Reread: func(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
			return d.client.ResourceV1().ResourceClaims(namespace).Get(ctx, name, metav1.GetOptions{})
		},
	}), nil
}
