// These helpers fake a node, start plugins on it, build claims and check what is left.

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
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
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
	shares       device.ShareRules
	daemons      *daemons
	mpsDisabled  bool
	conflictWait time.Duration // Options.ConflictWait
	stopping     chan struct{}
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

// breakLock replaces a lock file by a link to nowhere, so that it cannot be opened.
func (w *world) breakLock(t *testing.T, file string) (path string) {
	t.Helper()
	path = filepath.Join(w.locks, file)
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("nowhere/at/all", path); err != nil {
		t.Fatal(err)
	}
	return path
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
		Pool: pool, Locks: locks, ConflictWait: w.conflictWait, Stopping: w.stopping, MPSDisabled: w.mpsDisabled,
		Node: steps.Node{BootID: w.bootID, Now: time.Now, Records: records, Specs: w.specs, Hardware: w, MPS: w.daemons},
		Claims: &preparetest.Claims{OnRead: func(context.Context, string, string) (*resourceapi.ResourceClaim, error) {
			if w.readClaim == nil {
				return nil, errors.New("not expected to read the claim again")
			}
			return w.readClaim()
		}},
		Edits: &preparetest.Edits{
			OnVerify: w.verify, OnMIG: migEdits, OnMPSClient: w.daemons.edits,
			OnMemoryLimit: func(gpu string, mebibytes uint64) specs.ContainerEdits {
				return specs.ContainerEdits{Hooks: []*specs.Hook{{HookName: "createRuntime", Path: fmt.Sprintf("/limit/%s/%d", gpu, mebibytes)}}}
			},
		},
		ShareTotals: totalsBy(w.shares), Observer: p.Observer,
	}
	if w.hardware != nil {
		o.Node.Partitions = w.hardware
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
		disk: disk, specs: &specsFake{disk: disk, claims: map[types.UID]string{}},
		locks: t.TempDir(), bootID: "boot-1",
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

// RepairAllSpecs calls RepairSpecs, and then RepairClaimSpec for the claims that RepairSpecs left.
// Package driver does the same.
func (p *plugin) RepairAllSpecs(ctx context.Context) error {
	left, err := p.RepairSpecs(ctx)

	errs := make([]error, len(left)+1)
	errs[len(left)] = err
	var wg sync.WaitGroup
	for i, uid := range left {
		wg.Go(func() { errs[i] = p.RepairClaimSpec(ctx, uid) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// totalsBy returns Options.ShareTotals for these sharing rules. It treats every GPU as the node's
// first one.
func totalsBy(rules device.ShareRules) func(device.GPU, device.Name) map[string]resource.Quantity {
	return func(g device.GPU, n device.Name) map[string]resource.Quantity { return rules.Totals(g, 0, n) }
}

// Limits of packages prepare and reconcile, which the tests wait for.
const (
	conflictPoll    = 50 * time.Millisecond
	tryWait         = 10 * time.Millisecond
	recoverWait     = 2 * time.Second
	sharedCheckTime = 10 * time.Second
	claimLocks      = "claims"
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

func (s *specsFake) WriteBase(edits specs.ContainerEdits) error {
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

func (s *specsFake) RemoveClaim(uid types.UID) error {
	return s.set(func() { delete(s.claims, uid) })
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

type result = resourceapi.DeviceRequestAllocationResult

func allocated(request, name string) result {
	return result{Request: request, Driver: driverName, Pool: pool, Device: name}
}

func admin(request, name string) result {
	r := allocated(request, name)
	r.AdminAccess = ptr.To(true)
	return r
}

func newClaim(name string, results ...result) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
		Status: resourceapi.ResourceClaimStatus{
			Allocation:  &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod-" + name, UID: types.UID("pod-" + name)}},
		},
	}
}

func configured(c *resourceapi.ResourceClaim, parameters string) *resourceapi.ResourceClaim {
	c.Status.Allocation.Devices.Config = append(c.Status.Allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
		Source: resourceapi.AllocationConfigSourceClaim,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: driverName, Parameters: runtime.RawExtension{Raw: []byte(parameters)},
		}},
	})
	return c
}

// forPods makes the claim reserved for exactly these Pods.
func forPods(c *resourceapi.ResourceClaim, pods ...string) *resourceapi.ResourceClaim {
	c.Status.ReservedFor = nil
	for _, pod := range pods {
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: pod,
			UID: types.UID(pod)})
	}
	return c
}

const (
	small0   = gpu0 + "-mig-19-0" // 1g.10gb at 0
	small1   = gpu0 + "-mig-19-1"
	large4   = gpu0 + "-mig-9-4" // 3g.40gb at 4
	large0   = gpu0 + "-mig-9-0"
	neighbor = gpu1 + "-mig-19-6"
	nothing  = ""
)

const (
	share0    = gpu0 + "-share"
	share1    = gpu1 + "-share"
	migShare0 = small0 + "-share"
)

// fraction returns an allocated share with this much memory and this percentage of the cores.
func fraction(request, name, memory, cores string) result {
	r := shareOf(request, name)
	r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory),
		"cores": resource.MustParse(cores)}
	return r
}

// plain returns an allocated plain share, which has no limits.
func plain(request, name string) result {
	r := shareOf(request, name)
	r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"shares": resource.MustParse("1")}
	return r
}

func shareOf(request, name string) result {
	r := allocated(request, name)
	r.ShareID = ptr.To(types.UID("share-" + request))
	return r
}

// shareBy adds a configuration of this kind to the claim, with these sharing settings. It applies
// to all requests.
func shareBy(c *resourceapi.ResourceClaim, kind, sharing string) *resourceapi.ResourceClaim {
	return configured(c, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"`+kind+`","sharing":`+sharing+`}`)
}

// shareEach adds one configuration for each request, all with the same sharing settings.
func shareEach(c *resourceapi.ResourceClaim, kind, sharing string) *resourceapi.ResourceClaim {
	for _, r := range c.Status.Allocation.Devices.Results {
		shareBy(c, kind, sharing)
		all := c.Status.Allocation.Devices.Config
		all[len(all)-1].Requests = []string{r.Request}
	}
	return c
}

func slicing(interval string) string {
	return `{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"` + interval + `"}}`
}

const byMPS = `{"strategy":"MPS"}`

var several = newClaim("c", allocated("a", small0), allocated("b", neighbor))

var (
	sliced   = shareBy(newClaim("c", allocated("r", gpu0)), "GpuConfig", slicing("Long"))
	grouped  = shareBy(newClaim("c", allocated("a", gpu0), allocated("b", gpu1)), "GpuConfig", byMPS)
	parted   = shareEach(newClaim("c", allocated("a", small0), allocated("b", neighbor)), "MigDeviceConfig", byMPS)
	part1    = newClaim("c", fraction("r", share0, "10Gi", "30"))
	part2    = newClaim("d", fraction("r", share0, "10Gi", "30"))
	migPart1 = newClaim("c", fraction("r", migShare0, "2Gi", "0"))
	migPart2 = newClaim("d", fraction("r", migShare0, "2Gi", "0"))
	long1    = shareBy(newClaim("c", plain("r", share0)), "GpuConfig", slicing("Long"))
	long2    = shareBy(newClaim("d", plain("r", share0), plain("s", share1)), "GpuConfig", slicing("Long"))
	moved    = newClaim("c", fraction("r", share1, "10Gi", "30"))
)

const gib = 1 << 30

// newWorldWithShares returns a fake node on which claims with limited shares can use 40 GiB of each
// GPU, and 9.75 GiB of each 1g.10gb partition.
func newWorldWithShares(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	withMPS(w)
	for i := range w.snapshot.Node.GPUs {
		g := &w.snapshot.Node.GPUs[i]
		g.MemoryBytes = 41 * gib
		mig := *g.MIG
		mig.Profiles = slices.Clone(mig.Profiles)
		for j := range mig.Profiles {
			if mig.Profiles[j].ID == 19 {
				mig.Profiles[j].MemoryBytes = 10 * gib
			}
		}
		g.MIG = &mig
	}
	w.shares = parseShareRules(t, "shares:2,*/1g.10gb=shares:2")
	return w
}

func parseShareRules(t *testing.T, rules string) device.ShareRules {
	t.Helper()
	r, err := device.ParseShares(rules)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func mustPrepare(t *testing.T, p *plugin, c *resourceapi.ResourceClaim) []kubeletplugin.Device {
	t.Helper()
	devices, err := p.Prepare(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return devices
}

func mustUnprepare(t *testing.T, p *plugin, uid types.UID) {
	t.Helper()
	if err := p.Unprepare(t.Context(), uid); err != nil {
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

// checkClean fails the test if a record, a CDI spec or another file of a claim is left on the node.
func checkClean(t *testing.T, w *world) {
	t.Helper()
	if r := w.records(); len(r) != 0 {
		t.Errorf("records left: %q", r)
	}
	if s, _ := w.specs.Claims(); len(s) != 0 {
		t.Errorf("specs left: %q", s)
	}
	locks, err := os.ReadDir(w.locks)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range locks {
		if l.Name() != claimLocks && !strings.HasPrefix(l.Name(), "gpu-") {
			t.Errorf("lock left: %s", l.Name())
		}
	}
}

// checkRecordsMatchHardware fails the test unless the claims' records, the CDI specs and the MIG
// instances agree. The instances in "theirs", which an admin created, must be unchanged.
func checkRecordsMatchHardware(t *testing.T, w *world, h *hardware, p *plugin, theirs []device.Instance) {
	t.Helper()
	explained := map[string]int{}
	for _, name := range w.records() {
		uid, _, _ := strings.Cut(name, "_")
		if strings.HasPrefix(name, ".") || !strings.HasSuffix(name, ".json") {
			t.Errorf("%s is left over", name)
			continue
		}
		r, _, err := p.Records.Load(types.UID(uid))
		if err != nil || r.State != checkpoint.Prepared {
			t.Errorf("claim %s is %s: %v", uid, r.State, err)
			continue
		}
		if r.BootID != w.bootID {
			continue
		}
		spec := w.specs.of(r.ClaimUID)
		if spec == "" {
			t.Errorf("claim %s has no spec", uid)
		}
		list, err := steps.Decode(r.Steps)
		if err != nil {
			t.Error(err)
		}
		for _, step := range list {
			s, ok := step.(*steps.MIGInstance)
			if !ok {
				continue
			}
			there, ok := h.of(t, s.GPU).Instances[s.Instance.ID]
			if !ok || len(there.Compute) != 1 || there.Compute[0] != s.Instance.Compute[0] || there.Placement != s.Placement {
				t.Errorf("claim %s has %+v, but the GPU has %+v", uid, s.Instance, there)
			}
			if !strings.Contains(spec, fmt.Sprintf("nvidia-cap%d\"", s.Instance.Compute[0].Minor)) {
				t.Errorf("the spec does not name the instance's node: %s", spec)
			}
			explained[s.GPU]++
		}
	}
	for _, file := range w.holders() {
		if held, _, err := p.Records.Holder(strings.TrimSuffix(file, ".json")); err == nil && held.BootID == w.bootID &&
			held.Step.Kind == steps.MIGInstanceKind {
			explained[held.GPUs[0]]++
		}
	}
	if specs, _ := w.specs.Claims(); len(specs) > len(w.records()) {
		t.Errorf("specs %q, records %q", specs, w.records())
	}
	var stayed []device.Instance
	for _, gpu := range []string{gpu0, gpu1} {
		there := h.of(t, gpu).State().MIG.Instances
		ours, err := p.OwnedInstances(gpu, there)
		if err != nil || len(ours) != explained[gpu] {
			t.Errorf("%s: %d instances are explained, by %d claims' partitions: %v", gpu, len(ours), explained[gpu], err)
		}
		for _, in := range there {
			if !slices.ContainsFunc(ours, func(o device.Instance) bool { return o.ID == in.ID }) {
				stayed = append(stayed, in)
			}
		}
	}
	same := func(a, b device.Instance) bool { return steps.SameInstance(a, b) && len(a.Compute) == len(b.Compute) }
	if !slices.EqualFunc(stayed, theirs, same) {
		t.Errorf("foreign instances were %s and are %s", steps.DescribeInstances(theirs...), steps.DescribeInstances(stayed...))
	}
}

// checkSharedState fails the test unless the claims' records and the files of shared settings agree
// with the GPU settings and MPS daemons. Settings that no claim shares must have their original
// values, for example the value "found" as gpu0's time slice.
func checkSharedState(t *testing.T, w *world, h *hardware, p *plugin, found device.TimeSlice) {
	t.Helper()
	slice, mode := map[string]device.TimeSlice{gpu0: found}, map[string]device.ComputeMode{gpu0: device.ComputeDefault,
		gpu1: device.ComputeDefault}
	running := 0
	for _, file := range w.holders() {
		key, ok := strings.CutSuffix(file, ".json")
		if unfinished, is := strings.CutPrefix(file, ".tmp-"); is && slices.Contains(w.holders(), unfinished) {
			continue // the next write of the holder file replaces the unfinished one
		}
		held, _, err := p.Records.Holder(key)
		if !ok || strings.HasPrefix(key, ".") || err != nil {
			t.Errorf("%s is left: %v", file, err)
			continue
		}
		if held.BootID != w.bootID {
			continue
		}
		if held.State != checkpoint.Applied || len(held.Claims) == 0 {
			t.Errorf("%s is %s, held by %v", key, held.State, held.Claims)
		}
		for _, c := range held.Claims {
			r, _, err := p.Records.Load(c.UID)
			if err != nil || r.State != checkpoint.Prepared || !slices.ContainsFunc(r.Steps,
				func(s checkpoint.Step) bool { return strings.Contains(string(s.Params), key) }) {
				t.Errorf("%s is held by claim %s, whose record is %+v, %v", key, c, r, err)
			}
		}
		step, err := steps.StepOf(held)
		if err != nil {
			t.Error(err)
		}
		switch s := step.(type) {
		case *steps.TimeSlice:
			slice[s.GPU] = s.Want
		case *steps.ComputeMode:
			mode[s.GPU] = device.ComputeExclusiveProcess
		case *steps.MPSDaemon:
			running++
			if d, ok := w.daemons.running[s.ID]; !ok || !slices.Equal(d.Devices, s.UUIDs) {
				t.Errorf("%s has %q, and there is %+v", key, s.UUIDs, d)
			}
			for _, uuid := range s.UUIDs {
				if !h.serves(uuid) {
					t.Errorf("%s has %s, which is not there for it", key, uuid)
				}
			}
		case *steps.MIGInstance:
			there := h.of(t, s.GPU).State().MIG.Instances
			if _, ok := s.FindIntact(there); !ok {
				t.Errorf("%s has %s, and there is %s", key, steps.DescribeInstances(*s.Instance), steps.DescribeInstances(there...))
			}
		}
	}
	if len(w.daemons.running) != running {
		t.Errorf("the daemons are %v, want %d", w.daemons.running, running)
	}
	for _, gpu := range []string{gpu0, gpu1} {
		if s := h.of(t, gpu); s.TimeSlice != slice[gpu] || s.ComputeMode != mode[gpu] {
			t.Errorf("%s: time slice %d, not %d, compute mode %s, not %s", gpu, s.TimeSlice, slice[gpu], s.ComputeMode, mode[gpu])
		}
	}
}

func killProcess(w *world, now bool) error {
	if !now {
		return nil
	}
	w.disk.StopAt(1)
	_ = w.disk.Write()
	return durabletest.ErrStopped
}

// interruptPrepare prepares the claim called "several", and kills the plugin after this many
// hardware calls.
func interruptPrepare(t *testing.T, w *world, h *hardware, calls int) {
	t.Helper()
	h.takeCalls()
	h.fault = func(call int, after bool) error { return killProcess(w, after && call == calls) }
	if _, err := w.plugin(t).Prepare(t.Context(), several); !w.disk.Stopped() {
		t.Fatalf("the process was not killed: %v", err)
	}
	h.fault = nil
	w.disk.Restart()
}

func confirmAlways(context.Context, checkpoint.Record) error { return nil }
