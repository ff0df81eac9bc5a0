package schedules

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metadata"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/busmodel"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/migmodel"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/preparetest"
)

const (
	driverName = "gpu.nvidia.com"
	pool       = "node-1"
	state      = "/state"
)

// process is a simulated process of the plugin. Every call to the disk, the hardware, the MPS
// supervisor and the API server goes through [process.do].
type process struct {
	preparetest.Transaction

	id    int
	world *world
	ctx   context.Context //nolint:containedctx // it is the lifetime of the process
	end   context.CancelFunc
	dead  atomic.Bool
	// ready is set when the plugin has recovered the node and accepts calls.
	ready   bool
	running int
	orphan  types.UID // the last orphaned claim that the process detected
}

var (
	_ durable.FS       = &process{}
	_ steps.Partitions = migmodel.Partitions{}
	_ steps.Daemons    = supervisor{}
)

func (w *world) newProcess() *process {
	w.processes++
	ctx, end := context.WithCancel(klog.NewContext(context.Background(), logr.Discard()))
	p := &process{id: w.processes, world: w, ctx: ctx, end: end}
	w.living = append(w.living, p)
	return p
}

// open creates the process's Preparer with the simulated node's disk and hardware.
func (p *process) open() error {
	records, err := checkpoint.Open(state, p)
	if err != nil {
		return err
	}
	locks, err := lock.NewSet(p.world.lockFile)
	if err != nil {
		return err
	}
	p.Transaction = preparetest.New(prepare.Options{
		Pool: pool, Locks: locks, Metadata: true,
		Node: steps.Node{
			BootID: p.world.bootID(), Now: func() time.Time { return time.Now().Add(p.world.clockOffset) }, Records: records,
			Hardware: p, Specs: specStore{p, p.world.specs.open()}, Partitions: p.partitions(), Binder: p.binder(), MPS: supervisor{p},
		},
		Claims:   &preparetest.Claims{OnRead: p.reread, OnUnpreparedSince: overtaken},
		Observer: &preparetest.Observer{OnUnprepared: p.unprepared},
		Edits:    &preparetest.Edits{OnVerify: p.world.verify, OnBinding: p.world.binding, OnMPSClient: mpsEdits, OnMIG: migEdits},
	})
	return nil
}

// callKey is the key under which a context carries the kubelet's call.
type callKey struct{}

// unprepared marks this process's running Prepare calls for a claim as outdated, because they may
// have read the claim object before the claim was unprepared. Package driver does the same.
func (p *process) unprepared(uid types.UID) {
	for _, c := range p.world.claims {
		for _, k := range c.calls {
			if k.process == p && k.what == "Prepare" && k.object.UID == uid {
				k.overtaken = true
			}
		}
	}
}

func overtaken(ctx context.Context, _ types.UID) bool {
	k, ok := ctx.Value(callKey{}).(*call)
	return ok && k.overtaken
}

// do makes a call of the process. The call first waits at its fault point, where the schedule may
// inject a fault. The function in parameter effect does what the call is for. If the fault
// interrupts the call halfway, the function in parameter partial runs instead.
func (p *process) do(ctx context.Context, point faultPoint, effect func() error, partial func()) error {
	if p.dead.Load() {
		return errDead
	}
	f := none
	if !p.world.noFaults {
		f = p.world.blocked.block(p, point)
	}
	if f == slow {
		wait(ctx, p.world.slowFor)
	}
	if p.dead.Load() {
		return errDead
	}
	switch f {
	case killWithin, cutWithin:
		partial()
	case killAfter, cutAfter, lostAnswer:
		if err := effect(); err != nil && f == lostAnswer {
			return err
		}
	case noEffect:
		return nil
	case hangs:
		wait(ctx, time.Hour)
		return failure(device.FailureTimeout, point, device.Card{})
	case fails, unreadable, full, readOnly, inUse:
		if partial != nil && (f == fails || f == full) {
			partial()
		}
		return p.failed(point, f)
	default:
		return effect()
	}
	switch f {
	case killWithin, killAfter:
		p.world.kill(p)
	case cutWithin, cutAfter:
		p.world.powerCut()
	default:
		return failure(device.FailureDied, point, device.Card{})
	}
	return errDead
}

// failed returns the error of a call that fault f interrupts at the fault point.
func (p *process) failed(point faultPoint, f fault) error {
	switch f {
	case unreadable:
		return syscall.EIO
	case full:
		return syscall.ENOSPC
	case readOnly:
		return syscall.EROFS
	case inUse:
		return failure(device.FailureInUse, point, device.Card{})
	}
	switch c, _ := point.class(); c {
	case reading, listing, specListing:
		return syscall.EMFILE
	case querying, changing:
		return failure(device.FailureOther, point, device.Card{})
	case daemons, listingMPS:
		return errors.New("the MPS supervisor answered with an error")
	case asking:
		return apierrors.NewTooManyRequests("slow down", 1)
	default:
		return syscall.EIO
	}
}

// The following methods implement durable.FS. Disk calls wait with the process's context, so only
// the end of the process interrupts them.

func (p *process) Create(path string, data []byte) error {
	disk := p.world.disk
	return p.do(p.ctx, onFile("create", path), func() error { return disk.Create(path, data) },
		func() { _ = disk.Create(path, data[:len(data)/2]) })
}

func (p *process) MkdirAll(dir string) error {
	return p.do(p.ctx, "state: make directory", func() error { return p.world.disk.MkdirAll(dir) }, nil)
}

func (p *process) Rename(from, to string) error {
	return p.do(p.ctx, onRename(from, to), func() error { return p.world.disk.Rename(from, to) }, nil)
}

func (p *process) Remove(path string) error {
	return p.do(p.ctx, onFile("remove", path), func() error { return p.world.disk.Remove(path) }, nil)
}

func (p *process) SyncDir(dir string) error {
	return p.do(p.ctx, onDir("sync", dir), func() error { return p.world.disk.SyncDir(dir) }, nil)
}

func (p *process) ReadFile(path string) (data []byte, err error) {
	err = p.do(p.ctx, onFile("read", path), func() error { data, err = p.world.disk.ReadFile(path); return err }, nil)
	if errors.Is(err, syscall.EIO) {
		p.world.markUnreadable(path)
	}
	return data, err
}

func (p *process) ReadDir(dir string) (names []string, err error) {
	err = p.do(p.ctx, onDir("list", dir), func() error { names, err = p.world.disk.ReadDir(dir); return err }, nil)
	slices.Sort(names)
	return names, err
}

// specStore gives access to the CDI directory. Before each call the process waits at a fault point.
type specStore struct {
	p *process
	steps.Specs
}

func (s specStore) EnsureBase(edits specs.ContainerEdits, usable func(specs.ContainerEdits) error) error {
	return s.p.do(s.p.ctx, baseWrite, func() error { return s.Specs.EnsureBase(edits, usable) }, func() {})
}

func (s specStore) WriteClaim(uid types.UID, devices []specs.Device) error {
	return s.p.do(s.p.ctx, specWrite, func() error { return s.Specs.WriteClaim(uid, devices) },
		func() { s.p.world.specs.partial(uid) })
}

// WriteMetadata has a fault point before and after each file.
func (s specStore) WriteMetadata(c metadata.Claim, requests []metadata.Request) error {
	for i := range requests {
		write := func() error { return s.Specs.WriteMetadata(c, requests[i:i+1]) }
		if err := s.p.do(s.p.ctx, metadataWrite, write, func() {}); err != nil {
			return err
		}
	}
	return nil
}

func (s specStore) RemoveClaim(uid types.UID) error {
	return s.p.do(s.p.ctx, specRemove, func() error { return s.Specs.RemoveClaim(uid) }, nil)
}

func (s specStore) Claims() (uids []types.UID, err error) {
	err = s.p.do(s.p.ctx, specList, func() error { uids, err = s.Specs.Claims(); return err }, nil)
	return uids, err
}

// Snapshot returns the result of the last inventory scan.
func (p *process) Snapshot() inventory.Snapshot { return p.world.snapshot }

func (p *process) reread(ctx context.Context, _, name string) (c *resourceapi.ResourceClaim, err error) {
	err = p.do(ctx, readClaim, func() error {
		if c = p.world.apiClaim(name); c == nil {
			return apierrors.NewNotFound(schema.GroupResource{Group: "resource.k8s.io", Resource: "resourceclaims"}, name)
		}
		return nil
	}, nil)
	return c, err
}

// delayCall waits at a fault point at the start of a Prepare. In the meantime, the claim object
// that the kubelet read may become outdated.
func (p *process) delayCall(ctx context.Context) error {
	return p.do(ctx, readClaim, func() error { return nil }, nil)
}

// foundGone waits at a fault point. It is called when a claim was found to be orphaned, before the
// claim is unprepared.
func (p *process) foundGone(ctx context.Context) error {
	return p.do(ctx, foundGone, func() error { return nil }, nil)
}

// partitions gives access to the simulated GPUs. Before each call the process waits at a fault
// point.
func (p *process) partitions() migmodel.Partitions {
	return migmodel.Partitions{Call: func(
		ctx context.Context, op migmodel.Op, _ string, c device.Card, effect func(*migmodel.GPU) error,
	) error {
		point := faultPoint("GPU: " + string(op))
		return p.do(ctx, point, func() error {
			return p.world.onGPU(point, c, func(g *gpu) error { return p.world.change(g, effect) })
		}, nil)
	}}
}

// binder gives access to the PCI bus. Before each write the process waits at a fault point.
func (p *process) binder() steps.Binder {
	b := p.world.bus()
	b.Write = func(op busmodel.Op, effect func() error) error {
		return p.do(p.ctx, faultPoint("PCI: "+string(op)), func() error { return p.world.rebind(effect) }, nil)
	}
	return busmodel.Binder{Bus: b}
}

// rebind lets the plugin write to the PCI bus. A claim with admin access to a GPU that gets another
// driver has no CDI spec until the GPU is back.
func (w *world) rebind(effect func() error) error {
	before := map[*gpu]bool{}
	for _, g := range w.gpus {
		before[g] = g.isAway()
	}
	err := effect()
	for _, g := range w.gpus {
		if g.isAway() == before[g] {
			continue
		}
		if !g.isAway() {
			w.returned(g)
		}
		for _, c := range w.claims {
			c.specMayBeGone = c.specMayBeGone || c.phase == prepared && monitors(c.got, g)
			for _, k := range c.calls {
				k.rebound = k.rebound || monitors(k.object, g)
			}
		}
	}
	return err
}

// monitors reports whether the claim has admin access to the GPU.
func monitors(c *resourceapi.ResourceClaim, g *gpu) bool {
	return slices.ContainsFunc(results(c), func(r result) bool {
		name, _ := device.ParseName(r.Device)
		return r.AdminAccess != nil && *r.AdminAccess && name.GPU == g.name()
	})
}

// Reconcile does what the plugin does regularly.
func (p *process) Reconcile(ctx context.Context) error {
	before := p.world.disturbances()
	claims, err := p.PreparedClaims()
	err = errors.Join(err, p.WithdrawSpecs(ctx, claims), p.Transaction.Reconcile(ctx))
	if err == nil && !p.dead.Load() && slices.Equal(before, p.world.disturbances()) {
		p.world.checkNumbers()
	}
	return err
}

// change lets the plugin change a GPU, and then checks what it removed and who enabled MIG mode.
func (w *world) change(g *gpu, effect func(*migmodel.GPU) error) error {
	before, wasEnabled := maps.Clone(g.Instances), g.Enabled
	err := effect(&g.GPU)
	g.modeIsOurs = g.Enabled && (g.modeIsOurs || !wasEnabled)
	for id, in := range before {
		if len(g.Instances[id].Compute) < len(in.Compute) {
			w.checkRemoval(g, id)
		}
	}
	return err
}

// supervisor simulates the MPS supervisor, with a fault point before each call.
type supervisor struct{ p *process }

func (s supervisor) Start(ctx context.Context, d mps.Daemon) error {
	return s.p.do(ctx, startDaemon, func() error { return s.p.world.start(d) }, nil)
}

// Stop also succeeds for an MPS daemon that ended with its supervisor.
func (s supervisor) Stop(ctx context.Context, id string) error {
	return s.p.do(ctx, stopDaemon, func() error { delete(s.p.world.daemons, id); return nil }, nil)
}

func (s supervisor) List(ctx context.Context) (all []mps.Status, err error) {
	err = s.p.do(ctx, listDaemons, func() error {
		if s.p.world.absent {
			return errNoSupervisor
		}
		for _, d := range s.p.world.daemons {
			all = append(all, mps.Status{Daemon: d, State: mps.Ready})
		}
		return nil
	}, nil)
	slices.SortFunc(all, func(a, b mps.Status) int { return strings.Compare(a.Daemon.ID, b.Daemon.ID) })
	return all, err
}

func mpsEdits(id string) specs.ContainerEdits {
	return specs.ContainerEdits{
		Env:    []string{"CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"},
		Mounts: []*specs.Mount{{HostPath: daemonDir + id, ContainerPath: "/tmp/nvidia-mps"}},
	}
}

const (
	daemonDir = "/mps/"
	capDir    = "/dev/nvidia-caps/nvidia-cap"
)

// migEdits returns the CDI edits of the whole GPU plus the MIG instance's two capability device
// nodes.
func migEdits(parent specs.ContainerEdits, in device.Instance, c device.ComputeInstance) specs.ContainerEdits {
	parent.DeviceNodes = slices.Clone(parent.DeviceNodes)
	for _, minor := range []int{in.Minor, c.Minor} {
		parent.DeviceNodes = append(parent.DeviceNodes, &specs.DeviceNode{Path: fmt.Sprintf("%s%d", capDir, minor)})
	}
	return parent
}

// verify returns an error unless every device node and MPS daemon that the CDI edits name exists.
func (w *world) verify(edits specs.ContainerEdits) error {
	there := w.nodes()
	for _, n := range edits.DeviceNodes {
		if !there[n.Path] {
			return fmt.Errorf("device node %s: %w", n.Path, fs.ErrNotExist)
		}
	}
	for _, m := range edits.Mounts {
		if id, ok := strings.CutPrefix(m.HostPath, daemonDir); ok {
			if _, runs := w.daemons[id]; !runs {
				return fmt.Errorf("mount %s: %w", m.HostPath, fs.ErrNotExist)
			}
		}
	}
	return nil
}

// deviceNode returns the path of the GPU's device node, which its driver made.
func (g *gpu) deviceNode() string {
	if g.isAway() {
		return "/dev/vfio/" + string(g.PCIAddress)
	}
	return fmt.Sprintf("/dev/nvidia%d", g.Minor)
}

// nodes returns the paths of the node's device nodes.
func (n *node) nodes() map[string]bool {
	there := map[string]bool{}
	for _, g := range n.gpus {
		if !g.unfound {
			there[g.deviceNode()] = true
		}
		for _, in := range g.Instances {
			there[fmt.Sprintf("%s%d", capDir, in.Minor)] = true
			for _, c := range in.Compute {
				there[fmt.Sprintf("%s%d", capDir, c.Minor)] = true
			}
		}
	}
	return there
}
