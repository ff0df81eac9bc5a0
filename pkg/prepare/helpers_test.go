// These helpers fake a node and start plugins on it.

package prepare_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metadata"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/busmodel"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/preparetest"
)

const (
	driverName = "gpu.nvidia.com"
	pool       = "node-1"
	gpu0       = "gpu-0000-1b-00-0"
	gpu1       = "gpu-0000-1c-00-0"
	state      = "/state"
)

// world fakes a node: disk, CDI specs, inventory, GPUs and MPS daemons. It stays the same when the
// plugin restarts.
type world struct {
	disk         *durabletest.Disk
	specs        *specsFake
	locks        string
	bootID       string
	snapshot     inventory.Snapshot
	missing      map[string]error // by path of the device node or mount
	readClaim    func() (*resourceapi.ResourceClaim, error)
	hardware     *hardware // nil for a plugin without partitions
	bus          *busmodel.Bus
	daemons      *daemons
	mpsDisabled  bool
	metadata     bool          // Options.Metadata
	conflictWait time.Duration // Options.ConflictWait
	// bindings are the present bindings of the cards to their drivers.
	bindings map[device.PCIAddress]string
	rescans  []string // number of records and drivers of the first GPU at each call of Rescan
	stopping chan struct{}
}

// scan copies the state of the fake GPUs to the inventory, as the plugin's periodic scan does.
func (w *world) scan() {
	w.snapshot.Node.GPUs = slices.Clone(w.snapshot.Node.GPUs)
	for i := range w.snapshot.Node.GPUs {
		g := &w.snapshot.Node.GPUs[i]
		card := w.hardware.cards[g.PCIAddress]
		mig := card.State().MIG
		mig.Profiles, mig.ModeFixed = profiles, card.NeedsReset
		g.MIG = &mig
	}
}

// breakLocks replaces the lock file by a link to nowhere, so that it cannot be opened.
func (w *world) breakLocks(t *testing.T) {
	t.Helper()
	if err := errors.Join(os.RemoveAll(w.locks), os.Symlink("nowhere/at/all", w.locks)); err != nil {
		t.Fatal(err)
	}
}

func recordFile(t *testing.T, w *world, uid string) string {
	t.Helper()
	for _, name := range w.records() {
		if strings.HasPrefix(name, uid) {
			return filepath.Join(state, "claims", name)
		}
	}
	t.Fatalf("%s has no record", uid)
	return ""
}

// gpuOf returns the GPU called name from the inventory.
func (w *world) gpuOf(t *testing.T, name string) device.GPU {
	t.Helper()
	for _, g := range w.snapshot.Node.GPUs {
		if g.WholeName() == name {
			return g.GPU
		}
	}
	t.Fatalf("the inventory has no %s", name)
	return device.GPU{}
}

func (w *world) holders() []string {
	names := w.disk.Names(filepath.Join(state, "holders"))
	slices.Sort(names)
	return names
}

// plugin starts a new plugin process on the fake node and returns its Preparer.
func (w *world) plugin(t *testing.T) *plugin {
	t.Helper()
	p, err := w.start()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func (w *world) start() (*plugin, error) {
	records, err := checkpoint.Open(state, w.disk)
	if err != nil {
		return nil, err
	}
	locks, err := lock.NewSet(w.locks)
	if err != nil {
		return nil, err
	}
	p := &plugin{Locks: locks, Observer: &preparetest.Observer{}}
	o := prepare.Options{
		Pool: pool, Locks: locks, ConflictWait: w.conflictWait, Stopping: w.stopping, MPSDisabled: w.mpsDisabled, Metadata: w.metadata,
		Node: steps.Node{BootID: w.bootID, Now: time.Now, Records: records, Specs: w.specs, Hardware: w, MPS: w.daemons},
		Claims: &preparetest.Claims{OnRead: func(context.Context, string, string) (*resourceapi.ResourceClaim, error) {
			if w.readClaim == nil {
				return nil, errors.New("not expected to read the claim again")
			}
			return w.readClaim()
		}},
		Edits: &preparetest.Edits{
			OnVerify: w.verify, OnMIG: migEdits, OnMPSClient: w.daemons.edits,
			OnBinding: func(a device.PCIAddress) string { return w.bindings[a] },
			OnMemoryLimit: func(gpu string, minor int, mebibytes uint64) specs.ContainerEdits {
				path := fmt.Sprintf("/limit/%s/%d/%d", gpu, minor, mebibytes)
				return specs.ContainerEdits{Hooks: []*specs.Hook{{HookName: "createRuntime", Path: path}}}
			},
		},
		Observer: p.Observer,
		Rescan:   func(context.Context) { w.rescans = append(w.rescans, fmt.Sprint(len(w.records()), drivers(w.bus))) },
	}
	if w.hardware != nil {
		o.Node.Partitions = w.hardware
	}
	if w.bus != nil {
		o.Node.Binder = busmodel.Binder{Bus: w.bus}
	}
	p.Claims, p.Edits = o.Claims.(*preparetest.Claims), o.Edits.(*preparetest.Edits)
	p.options, p.Transaction = o, preparetest.New(o)
	return p, nil
}

func (w *world) Snapshot() inventory.Snapshot {
	return w.snapshot
}

func (w *world) verify(edits specs.ContainerEdits) error {
	for _, n := range edits.DeviceNodes {
		if err := w.missing[n.Path]; err != nil {
			return err
		}
	}
	if err := w.daemons.verify(edits); err != nil {
		return err
	}
	for _, m := range edits.Mounts {
		if err := w.missing[m.HostPath]; err != nil {
			return err
		}
	}
	return nil
}

// reboot simulates a power cut: unsynced writes, the CDI specs, MIG instances, GPU settings and MPS
// daemons are gone.
func (w *world) reboot() {
	w.disk.PowerCut()
	w.specs.clear()
	w.bootID += "+"
	if w.hardware != nil {
		w.hardware.boot()
		w.scan()
	}
	clear(w.daemons.running)
}

func (w *world) records() []string {
	names := w.disk.Names(filepath.Join(state, "claims"))
	slices.Sort(names)
	return names
}

func newWorld(t *testing.T) *world {
	t.Helper()
	disk := durabletest.New()
	return &world{
		disk: disk, specs: &specsFake{disk: disk, claims: map[types.UID]string{}, metadata: map[types.UID][]metadata.Request{}},
		locks: filepath.Join(t.TempDir(), "claims.lock"), bootID: "boot-1",
		daemons: &daemons{absent: true, running: map[string]mps.Daemon{}, hang: map[string]bool{}},
		snapshot: inventory.Snapshot{Ready: true, Known: true, Node: nvidia.Node{
			Common: specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: "/usr/lib/libcuda.so.1", ContainerPath: "/usr/lib/libcuda.so.1"}}},
			GPUs:   []nvidia.GPU{newGPU("0000:1b:00.0", "GPU-0", "/dev/nvidia0"), newGPU("0000:1c:00.0", "GPU-1", "/dev/nvidia1")},
		}},
	}
}

func newGPU(address device.PCIAddress, uuid, node string) nvidia.GPU {
	return nvidia.GPU{
		GPU:   device.GPU{PCIAddress: address, UUID: uuid},
		Edits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: node}}},
	}
}

// plugin is a plugin process on the fake node.
type plugin struct {
	preparetest.Transaction
	*preparetest.Observer
	*preparetest.Claims
	*preparetest.Edits

	Locks   *lock.Set
	options prepare.Options
}

// with changes what the plugin works on.
func (p *plugin) with(change func(*steps.Node)) {
	change(&p.options.Node)
	p.Transaction = preparetest.New(p.options)
}

// Limits of packages prepare and reconcile, which the tests wait for.
const (
	conflictPoll    = 50 * time.Millisecond
	tryWait         = 10 * time.Millisecond
	busyWait        = 2 * time.Second
	sharedCheckTime = 10 * time.Second
)

// specsFake is a fake of the directory with the CDI specs. Its writes fail while writes to the fake
// disk fail.
type specsFake struct {
	disk     *durabletest.Disk
	unlisted error // if set, Claims returns it

	mu     sync.Mutex
	base   string
	claims map[types.UID]string
	writes int
	// metadata has what the claims' metadata files say.
	metadata map[types.UID][]metadata.Request
}

func (s *specsFake) set(change func()) error {
	if err := s.disk.Write(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
	return nil
}

func (s *specsFake) EnsureBase(edits specs.ContainerEdits, _ func(specs.ContainerEdits) error) error {
	raw, err := json.Marshal(edits)
	if err != nil {
		return err
	}
	return s.set(func() { s.base = string(raw) })
}

func (s *specsFake) WriteClaim(uid types.UID, devices []specs.Device) error {
	raw, err := json.Marshal(devices)
	if err != nil {
		return err
	}
	return s.set(func() { s.claims[uid] = string(raw); s.writes++ })
}

func (s *specsFake) WriteMetadata(c metadata.Claim, requests []metadata.Request) error {
	return s.set(func() {
		for _, r := range requests {
			others := slices.DeleteFunc(slices.Clone(s.metadata[c.UID]), func(there metadata.Request) bool { return there.Name == r.Name })
			s.metadata[c.UID] = append(others, r)
		}
	})
}

func (s *specsFake) RemoveClaim(uid types.UID) error {
	return s.set(func() { delete(s.claims, uid); delete(s.metadata, uid) })
}

func (s *specsFake) Claims() ([]types.UID, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.unlisted != nil {
		return nil, s.unlisted
	}
	return slices.Collect(maps.Keys(s.claims)), nil
}

func (s *specsFake) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.base, s.claims = "", map[types.UID]string{}
}

func (s *specsFake) of(uid types.UID) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.claims[uid]
}

const gib = 1 << 30

// newWorldWithShares returns a fake node on which claims with limited shares can use 40 GiB of each
// GPU, and 9.75 GiB of each 1g.10gb partition.
func newWorldWithShares(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	withMPS(w)
	for i := range w.snapshot.Node.GPUs {
		g := &w.snapshot.Node.GPUs[i]
		g.MemoryBytes = 41*gib + gib/4
		mig := *g.MIG
		mig.Profiles = slices.Clone(mig.Profiles)
		for j := range mig.Profiles {
			if mig.Profiles[j].ID == 19 {
				mig.Profiles[j].MemoryBytes = 10 * gib
			}
		}
		g.MIG = &mig
	}
	return w
}
