package driver

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claimgc"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claimstatus"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health/loop"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health/report"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/hook"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metadata"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/migrate"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/bind"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/cut"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/scan"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/watch"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/occupancy"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/predecessor"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/publish"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/publish/leader"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/quiesce"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/reconciler"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/uninstall"
)

// NewHardware returns the functions with which the inventory reads the node's hardware. Only child
// processes, of the plugin's binary executable, load NVML.
func NewHardware(cfg *config.Config, executable string) inventory.Hardware {
	paths := Paths(cfg)
	return inventory.Hardware{
		Scan:        scan.Isolated(paths, executable, ScanCommand),
		Fingerprint: func() string { return scan.Fingerprint(paths) },
		Present:     func() (bool, error) { return scan.HasNVIDIADevice(paths.Sysfs) },
	}
}

// NewPartitions returns the interface that changes the node's GPUs and their partitions. A worker
// process per GPU loads NVML.
func NewPartitions(cfg *config.Config, executable string, m *metrics.Metrics) *cut.Partitions {
	return cut.New(Paths(cfg), m.MIGCall, executable, cut.Command)
}

// NewBinder returns the interface that binds the node's GPUs to VFIO for virtual machines. A child
// process per GPU writes to sysfs.
func NewBinder(cfg *config.Config, executable string, p *cut.Partitions) *bind.Binder {
	return bind.New(bind.Options{Paths: Paths(cfg), Command: []string{executable, bind.Command}, Cards: p})
}

// NewWatch returns a function that watches the node's hardware with NVML in a child process. That
// process pauses while partitions are changed.
func NewWatch(cfg *config.Config, executable string, p *cut.Partitions) func(context.Context, func(device.Signal)) error {
	options := watch.Options{Paths: Paths(cfg), Command: []string{executable, watch.Command}, Partitions: p}
	return func(ctx context.Context, report func(device.Signal)) error { return watch.Run(ctx, options, report) }
}

// Parts are the dependencies that New needs for a Driver.
type Parts struct {
	Client kubernetes.Interface
	// StatusClient writes claim statuses and looks up prepared claims. It must not be Client, because
	// it would use up the request rate that Prepare needs.
	StatusClient kubernetes.Interface
	Hardware     inventory.Hardware
	// Partitions changes GPUs and their partitions.
	Partitions steps.Partitions
	// Binder binds GPUs to VFIO. Nil means that the node offers no GPU to virtual machines.
	Binder steps.Binder
	// StopWorkers ends the processes that partition GPUs once they are idle.
	StopWorkers func(ctx context.Context) error
	// Supervisor starts and stops MPS control daemons. If it is nil, New uses the supervisor that runs
	// in a Pod of its own on this node.
	Supervisor steps.Daemons
	// Watch watches the hardware and reports signals about its health until the context ends. If it
	// returns an error, the hardware may still be open.
	Watch   func(ctx context.Context, report func(device.Signal)) error
	Metrics *metrics.Metrics
}

// New returns a Driver that is ready to Run. It writes nothing outside the plugin directory.
func New(ctx context.Context, cfg *config.Config, parts Parts) (*Driver, error) {
	set, err := cfg.Settings.Compile(settings.Default)
	if err != nil {
		return nil, err
	}
	if parts.Supervisor == nil {
		parts.Supervisor = mps.NewClient(MPSPaths(cfg))
	}
	supervisor := nodeSupervisor{parts.Supervisor, MPSPaths(cfg), cfg.ProcRoot, parts.Metrics}
	access := quiesce.NewAccess()
	parts.Hardware.Scan = access.Scan(parts.Hardware.Scan)
	inv := inventory.New(parts.Hardware)
	cdiHook, mpsHook := hook.New(cfg.HookSource, cfg.HookPath), hook.New(cfg.MPSHookSource, cfg.MPSHookPath())
	specs := cdi.NewStore(cfg.CDIRoot)
	recorder := events.New(ctx, parts.Client, cfg.NodeName)
	toAdmins := reports{recorder, parts.Metrics}
	lead := leader.New(cfg.PluginDir)
	calls := newInFlightCalls()
	statusClient := parts.StatusClient
	if !cfg.ClaimStatus {
		statusClient = nil
	}
	status := claimstatus.New(statusClient, recorder.ClaimEvent, parts.Metrics.ClaimStatusError)
	instanceLock, err := uninstall.AcquireInstanceLock(ctx, cfg.PluginDir)
	if err != nil {
		return nil, err
	}
	state, err := openState(cfg)
	if err != nil {
		instanceLock.Release()
		return nil, err
	}
	healthReport := report.New(parts.Client, recorder, parts.Metrics, state.records, lead.NewerLeads)
	records := ledger.New(state.records, state.bootID, inv)
	verdicts := loop.New(ctx, loop.Options{
		StateDir: cfg.StateDir(), BootID: state.bootID,
		Inventory: inv, Records: state.records, InUse: records.InUse,
		Reporter: healthReport, Watch: parts.Watch,
	})
	reference := predecessor.NewStore(cfg.PluginDir, cfg.StateDir(), DriverName, state.bootID, durable.OS{})
	node := nodeview.New(inv, verdicts, reference, records.InUseByContainers)
	admitted := admission{node, verdicts, access}
	described := metadata.NewFiles(cfg.MetadataDir())
	claims := newTransaction(prepare.Options{
		Node: steps.Node{
			BootID: state.bootID, Now: time.Now, Records: state.records,
			Specs: metadata.WithSpecs{Store: specs, Files: described}, Hardware: node, MPS: supervisor,
			Partitions: parts.Partitions, Binder: parts.Binder,
		},
		Pool: cfg.NodeName, Locks: state.locks, Claims: claimReader{calls, parts.Client},
		Edits: nodeEdits{visiblePath(cfg), described, cfg, inv.RequestScan}, Admit: admitted.Admit,
		Observer: claimObserver{calls, status, toAdmins}, Rescan: inv.Rescan,
		MPSDisabled: !cfg.MPS, Metadata: cfg.DeviceMetadata, ConflictWait: conflictWait, Stopping: ctx.Done(),
	})
	parts.Metrics.CountPrepared(func() (prepared, gpus int, _ error) {
		used, err := claims.Usage()
		return used.Claims, used.GPUs, err
	})
	publisher := publish.New(publish.Options{
		Client: parts.Client, NodeName: cfg.NodeName, Leader: lead, Shares: set.Shares, Effects: set.Effects,
		RequireValidation: cfg.RequireValidation, Node: node, Health: verdicts, Claims: claims, Events: recorder, Metrics: parts.Metrics,
	})
	parts.Metrics.ReadOccupancy(occupancy.Source{NodeName: cfg.NodeName, Node: node, Publisher: publisher, Claims: claims}.Read)
	daemons := &daemonReports{
		supervisor: supervisor, metrics: parts.Metrics, events: recorder, fractionsOffered: publisher.OffersFractions,
	}
	base := &baseSpec{
		Store: specs, inventory: inv, leader: lead, hardware: access,
		visible: visiblePath(cfg), paths: Paths(cfg), charDir: cfg.DevCharDir,
	}
	reconciling := reconciler.New(reconciler.Options{
		BootID: state.bootID, NewerLeads: lead.NewerLeads,
		Claims: claims, Specs: base, Use: access.Use, Inventory: inv, Layouts: publisher,
		Allocations:   publish.APIServer{Client: parts.StatusClient, Node: cfg.NodeName}.Allocations,
		ReportDaemons: daemons.Report, Repaired: toAdmins.Repaired,
	})
	collector := claimgc.New(claimgc.Options{
		Grace: cfg.ClaimGrace, BootID: state.bootID, Client: parts.StatusClient, NewerLeads: lead.NewerLeads,
		Claims: claims, UsersOf: claimgc.Containerd{Socket: cfg.CRISocket}.UsersOf, Use: access.Use,
		Wake: reconciling.Wake, Reports: toAdmins,
	})
	quiescer := quiesce.New(ctx, quiesce.Options{
		Labels:   strings.FieldsFunc(cfg.ReleaseLabels, func(r rune) bool { return r == ',' }),
		StateDir: cfg.StateDir(), Access: access, StopWorkers: parts.StopWorkers,
		Readiness: node, Reports: recorder, Released: parts.Metrics.Released, Wake: reconciling.Wake,
	})
	devicePlugin := nodeview.DevicePlugin{
		Node: node, Refuse: cfg.DevicePluginConflict == config.ConflictRefuse, EventOnChange: recorder.EventOnChange,
		Found: parts.Metrics.DevicePlugin,
	}
	policy := &nodePolicy{
		client: parts.Client, node: cfg.NodeName, wake: reconciling.Wake, events: recorder,
		setPolicies: func(p device.Policies) {
			node.SetNodePolicies(p)
			publisher.Rebuild() // reads the node's new policies
		},
		chooser: &chooser{file: cfg.SettingsFile, document: cfg.Settings, events: recorder, apply: func(s settings.Settings) {
			verdicts.SetRules(s.XIDRules)
			node.SetConfigured(s.Policies)
			publisher.SetSettings(s.Shares, s.Effects) // reads the node's new policies
			reconciling.Wake()
		}},
		observers: []func(*corev1.Node){
			quiescer.Observe, devicePlugin.Observe, verdicts.Observe, func(n *corev1.Node) { publisher.SetNodeUID(n.UID) },
		},
		deleted: func() { publisher.SetNodeUID("") },
	}
	host := &hostWatch{
		base: base,
		checks: []nodeview.Check{
			base, // first: Prepare relies on it soon after a scan
			nodeview.HookCheck{CDI: cdiHook, MPS: mpsHook, Path: cfg.HookPath},
			nodeview.RuntimeCheck{Socket: cfg.CRISocket, CDIRoot: cfg.CDIRoot},
		},
		node: node, leader: lead, reconciler: reconciling, events: recorder, metrics: parts.Metrics,
	}
	return &Driver{
		requests: &requests{
			pool: cfg.NodeName, admission: admitted, preparer: claims,
			migrator: migrate.New(migrate.Options{
				CDIRoot: cfg.CDIRoot, Checkpoint: reference, Snapshot: inv.Snapshot, WithLocks: claims.WithLocks,
				GPUs: claims.Partitions, Reports: toAdmins, Update: node.Update,
			}),
			publisher: publisher, reconciler: reconciling, status: status, events: recorder, metrics: parts.Metrics,
		},
		cfg: cfg, client: parts.Client, inv: inv, calls: calls, policy: policy, host: host,
		background: []func(context.Context) error{
			endless(verdicts.Run), endless(healthReport.Run),
			endless(func(ctx context.Context) { quiescer.Run(ctx, verdicts.Watcher(ctx)) }),
			endless(policy.Watch), endless(policy.chooser.WatchFile), endless(node.Run), endless(host.Run),
			endless(nodeview.Holders{Node: node, InUse: claims.InUse, Foreign: func(gpus []device.GPU) map[device.PCIAddress][]nvidia.Process {
				return scan.Foreign(Paths(cfg), gpus)
			}}.Run),
			endless(func(ctx context.Context) { inv.Run(ctx, node.Update) }),
			endless(reconciling.Run), endless(collector.Run),
			endless(func(ctx context.Context) { status.Run(ctx, claims) }),
			publisher.Run,
		},
		cleaner: &uninstall.Cleaner{
			Client: parts.Client, Namespace: cfg.Namespace, DaemonSet: cfg.DaemonSetName,
			Node: cfg.NodeName, PluginDir: cfg.PluginDir, StateDir: cfg.StateDir(),
			Lock: instanceLock, Claims: claims, Use: access.Use, Snapshot: node.Snapshot, StopDaemons: supervisor.StopAll,
			RemoveFiles: []func() error{specs.RemoveBase, described.RemoveAll, removeHooks(cfg)}, EventNow: recorder.EventNow,
		},
	}, nil
}

// endless returns run, which cannot fail, as a room of [Driver].background.
func endless(run func(context.Context)) func(context.Context) error {
	return func(ctx context.Context) error { run(ctx); return nil }
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
	if s.locks, err = lock.NewSet(filepath.Join(cfg.StateDir(), "claims.lock")); err != nil {
		return state{}, err
	}
	if s.bootID, err = durable.BootID(cfg.ProcRoot); err != nil {
		return state{}, fmt.Errorf("%w (--proc-root)", err)
	}
	return s, nil
}
