package driver

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claimgc"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claimstatus"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health/loop"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health/report"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/hook"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/migrate"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/cut"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/scan"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/watch"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/predecessor"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/publish"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/publish/leader"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/quiesce"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/reconciler"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/uninstall"
)

// NewHardware returns the functions with which the inventory reads the node's hardware. NVML is
// loaded only in a child process.
func NewHardware(cfg *config.Config) (inventory.Hardware, error) {
	executable, err := os.Executable()
	if err != nil {
		return inventory.Hardware{}, fmt.Errorf("find the plugin's own binary, which scans the hardware in a child process: %w", err)
	}
	paths := Paths(cfg)
	changes := scan.NewChangeDetector(paths)
	return inventory.Hardware{
		Scan:        scan.Isolated(paths, executable, ScanCommand),
		Fingerprint: changes.Fingerprint,
		Present:     changes.Present,
	}, nil
}

// NewPartitions returns the interface that changes the node's GPUs and their partitions. A worker
// process per GPU loads NVML.
func NewPartitions(cfg *config.Config, m *metrics.Metrics) (*cut.Partitions, error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the plugin's own binary, which partitions GPUs in child processes: %w", err)
	}
	return cut.New(Paths(cfg), m.MIGCall, executable, cut.Command), nil
}

// NewWatch returns a function that watches the node's hardware with NVML in a child process. That
// process pauses while partitions are changed.
func NewWatch(cfg *config.Config, partitions *cut.Partitions) (func(ctx context.Context, report func(device.Signal)) error, error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the plugin's own binary for the process that watches the hardware: %w", err)
	}
	options := watch.Options{Paths: Paths(cfg), Command: []string{executable, watch.Command}, Partitions: partitions}
	return func(ctx context.Context, report func(device.Signal)) error { return watch.Run(ctx, options, report) }, nil
}

// Parts are the dependencies that New needs for a Driver.
type Parts struct {
	Client kubernetes.Interface
	// StatusClient writes claim statuses and looks up prepared claims. It must not be Client, because
	// it would use up the request rate that Prepare needs.
	StatusClient kubernetes.Interface
	Hardware     inventory.Hardware
	// Partitions changes GPUs and their partitions. If it is nil, the driver offers whole GPUs only.
	Partitions steps.Partitions
	// Supervisor starts and stops MPS control daemons. If it is nil, New uses the supervisor that runs
	// on this node.
	Supervisor Supervisor
	// Watch watches the hardware and reports signals about its health until the context ends. If it
	// returns an error, the hardware may still be open. Nil means that the driver watches no health.
	Watch   func(ctx context.Context, report func(device.Signal)) error
	Metrics *metrics.Metrics
}

// New returns a Driver that is ready to Run. It writes nothing outside the plugin directory.
func New(ctx context.Context, cfg *config.Config, parts Parts) (*Driver, error) {
	policies, err := device.ParsePolicies(cfg.MIGPolicy)
	if err != nil {
		return nil, err
	}
	shares, err := device.ParseShares(cfg.Shares)
	if err != nil {
		return nil, err
	}
	effects, err := health.ParseEffects(cfg.HealthEffects)
	if err != nil {
		return nil, err
	}
	rules, err := health.ParseRules(cfg.XIDRules)
	if err != nil {
		return nil, err
	}
	if parts.Supervisor == nil {
		parts.Supervisor = mps.NewClient(MPSPaths(cfg))
	}
	supervisor := nodeSupervisor{parts.Supervisor, MPSPaths(cfg), cfg.ProcRoot, parts.Metrics}
	conditions := nodeview.NewConditions()
	access := quiesce.NewAccess()
	parts.Hardware.Scan = access.Scan(parts.Hardware.Scan)
	inv := inventory.New(parts.Hardware)
	d := &Driver{
		cfg: cfg, client: parts.Client, metrics: parts.Metrics, inv: inv,
		specs:  cdi.NewStore(cfg.CDIRoot),
		events: events.New(ctx, parts.Client, cfg.NodeName),
		leader: leader.New(cfg.PluginDir, time.Now()),
		calls:  newInFlightCalls(),
		shares: shares, supervisor: supervisor,
	}
	statusClient := parts.StatusClient
	if !cfg.ClaimStatus {
		statusClient = nil
	}
	d.status = claimstatus.New(statusClient, d.events, parts.Metrics.ClaimStatusError)
	instanceLock, err := uninstall.AcquireInstanceLock(ctx, cfg.PluginDir)
	if err != nil {
		return nil, err
	}
	state, err := openState(cfg)
	if err != nil {
		instanceLock.Release()
		return nil, err
	}
	d.healthReport = report.New(parts.Client, d.events, parts.Metrics, state.records, d.leader)
	d.health = loop.New(loop.Options{
		Rules: rules, StateDir: cfg.StateDir(), BootID: state.bootID,
		Inventory: inv, Records: state.records, Reporter: d.healthReport, Watch: parts.Watch,
	})
	d.predecessor = predecessor.NewStore(cfg.PluginDir, cfg.StateDir(), DriverName, state.bootID, durable.OS{})
	d.node = nodeview.New(inv, conditions, d.health, d.predecessor)
	d.preparer = d.newTransaction(ctx, state, Paths(cfg), parts.Partitions)
	d.devicePlugin = nodeview.NewDevicePlugin(cfg.DevicePluginConflict == config.ConflictRefuse, conditions, d.events, d.metrics)
	cdiHook, mpsHook := hook.New(cfg.HookSource, cfg.HookPath), hook.New(cfg.MPSHookSource, cfg.MPSHookPath())
	d.checks = []nodeview.Check{
		nodeview.HookCheck{CDI: cdiHook, MPS: mpsHook, Path: cfg.HookPath, NewerLeads: d.leader.NewerLeads},
		nodeview.RuntimeCheck{Socket: cfg.CRISocket, CDIRoot: cfg.CDIRoot},
	}
	d.publisher = publish.New(publish.Options{
		Client: d.client, NodeName: cfg.NodeName, Leader: d.leader, Policies: policies, Shares: shares, Effects: effects,
		Node: d.node, Health: d.health, Claims: d.preparer, Events: d.events, Metrics: d.metrics,
	})
	d.migrator = migrate.New(migrate.Options{
		CDIRoot: cfg.CDIRoot, Checkpoint: d.predecessor, Inventory: inv, Locks: d.preparer, GPUs: d.preparer.Partitions,
		Reports: reports{d.events, d.metrics}, Publisher: d.publisher,
	})
	d.reconciler = reconciler.New(reconciler.Options{
		StateDir: cfg.StateDir(), NewerLeads: d.leader.NewerLeads,
		Claims: d.preparer, Hardware: access, Inventory: inv, Layouts: d.publisher, Status: d.status,
		Daemons:  &daemonReports{supervisor: supervisor, metrics: d.metrics, events: d.events, fractionsOffered: d.publisher.OffersFractions},
		BaseSpec: d.specs, Reports: reports{d.events, d.metrics},
	})
	d.claimGC = claimgc.New(claimgc.Options{
		Grace: cfg.ClaimGrace, BootID: d.preparer.BootID, Client: parts.StatusClient, NewerLeads: d.leader.NewerLeads,
		Claims: d.preparer, Containers: claimgc.Containerd{Socket: cfg.CRISocket}, Hardware: access,
		Reconciler: d.reconciler, Reports: reports{d.events, d.metrics},
	})
	workers, _ := parts.Partitions.(quiesce.Workers)
	d.quiesce = quiesce.New(ctx, quiesce.Options{
		Labels:   strings.FieldsFunc(cfg.ReleaseLabels, func(r rune) bool { return r == ',' }),
		StateDir: cfg.StateDir(), Access: access, Workers: workers,
		Readiness: conditions, Reports: d.events, Metrics: d.metrics, Reconciler: d.reconciler,
	})
	d.cleaner = uninstall.NewCleaner(uninstall.Options{
		Client: parts.Client, Namespace: cfg.Namespace, DaemonSet: cfg.DaemonSetName,
		Node: cfg.NodeName, PluginDir: cfg.PluginDir, StateDir: cfg.StateDir(),
		Lock: instanceLock, Claims: d.preparer, Hardware: access, Inventory: d.node,
		Daemons: supervisor, BaseSpec: d.specs, Hooks: []uninstall.Hook{cdiHook, mpsHook}, Events: d.events,
	})
	return d, nil
}

// state is the driver's state on disk, and the ID of the node's boot.
type state struct {
	records *checkpoint.Store
	locks   *lock.Set
	bootID  string
}

func openState(cfg *config.Config) (s state, err error) {
	if s.records, err = checkpoint.Open(cfg.StateDir(), durable.OS{}); err != nil {
		return state{}, err
	}
	if s.locks, err = lock.NewSet(filepath.Join(cfg.StateDir(), "locks")); err != nil {
		return state{}, err
	}
	if s.bootID, err = durable.BootID(cfg.ProcRoot); err != nil {
		return state{}, fmt.Errorf("%w (--proc-root)", err)
	}
	return s, nil
}
