package occupancy

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/inventorytest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/settingstest"
)

// node is a node whose GPUs are offered whole, in partitions and in shares, and those with a
// Passthrough to virtual machines.
type node struct {
	gpus    []device.GPU
	shares  string
	taint   string // the name of a device with a taint
	records *checkpoint.Store
	standby bool
}

func (n *node) View() *nodeview.View {
	v := &nodeview.View{}
	for _, g := range n.gpus {
		v.GPUs = append(v.GPUs, nvidia.GPU{GPU: g})
	}
	return v
}

func (n *node) Slices() ([]resourceslice.Slice, bool) {
	rules, err := settingstest.Shares(n.shares)
	if err != nil {
		panic(err)
	}
	var offerings []device.Offering
	for _, g := range n.gpus {
		offerings = append(offerings, device.Offering{
			GPU: g, Layout: device.Layout{Whole: true, VFIO: g.Passthrough != nil, Placements: true, Instances: g.MIG.Instances}, Shares: rules,
		})
	}
	all := device.Slices(device.Offer(offerings), device.Driver{Version: "580.65.06", CUDAVersion: "13.0"}, false)
	for _, s := range all {
		for i := range s.Devices {
			if s.Devices[i].Name == n.taint {
				s.Devices[i].Taints = []resourceapi.DeviceTaint{{Key: "k", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
			}
		}
	}
	return all, !n.standby
}

// h100s returns H100s with the profiles 1g.10gb, 3g.40gb and 7g.80gb.
func h100s(n int) (all []device.GPU) {
	for i := range n {
		all = append(all, device.GPU{
			PCIAddress: device.PCIAddress(fmt.Sprintf("0000:%02x:00.0", 0x1b+i)), UUID: fmt.Sprintf("GPU-%d", i),
			ProductName: "NVIDIA H100 80GB HBM3", CUDAComputeCapability: "9.0", MemoryBytes: 81408 << 20,
			MIG: &device.MIG{Profiles: []device.Profile{
				{ID: 0, Name: "7g.80gb", Slices: 7, MaxInstances: 1, MemoryBytes: 79 << 30, Size: 8, Starts: []uint32{0}},
				{ID: 9, Name: "3g.40gb", Slices: 3, MaxInstances: 2, MemoryBytes: 39 << 30, Size: 4, Starts: []uint32{0, 4}},
				{ID: 19, Name: "1g.10gb", Slices: 1, MaxInstances: 7, MemoryBytes: 9 << 30, Size: 1, Starts: []uint32{0, 1, 2, 3, 4, 5, 6}},
			}},
		})
	}
	return all
}

// cut gives the GPU an instance of profile 1g.10gb at the place start, and returns the partition's
// device name.
func cut(g *device.GPU, start uint32) string {
	c := device.ComputeInstance{Name: "1g.10gb", UUID: fmt.Sprintf("MIG-%s-%d", g.UUID, start)}
	at := device.Placement{Start: start, Size: 1}
	i := device.Instance{ID: start + 7, ProfileID: 19, Placement: at, Compute: []device.ComputeInstance{c}}
	g.MIG.Enabled, g.MIG.Instances = true, append(g.MIG.Instances, i)
	return i.DeviceName(g.WholeName(), c)
}

func newNode(t *testing.T, gpus ...device.GPU) *node {
	t.Helper()
	records, err := checkpoint.Open("/state", durabletest.New())
	if err != nil {
		t.Fatal(err)
	}
	return &node{gpus: gpus, records: records}
}

// prepare saves the record of a prepared claim.
func (n *node) prepare(t *testing.T, name, pod string, devices ...checkpoint.Device) {
	t.Helper()
	for i := range devices {
		d := &devices[i]
		parsed, _ := device.ParseName(d.Device)
		d.Request, d.Pool, d.GPU = fmt.Sprint("r", i), "node-1", parsed.GPU
		for _, g := range n.gpus {
			if g.WholeName() != parsed.GPU {
				continue
			}
			d.GPUUUID = g.UUID
			for _, in := range g.MIG.Instances {
				if parsed.Partition != nil && in.Placement.Start == parsed.Partition.Start {
					d.MIGUUID = in.Compute[0].UUID
				}
			}
		}
	}
	r := checkpoint.Record{
		ClaimUID: types.UID("uid-" + name), Namespace: "team", Name: name, Pod: pod, State: checkpoint.Prepared, BootID: "boot", Devices: devices,
	}
	if err := n.records.Save(r); err != nil {
		t.Fatal(err)
	}
}

func (n *node) source() Source {
	s := inventory.Snapshot{Ready: true, Known: true}
	s.Node.GPUs = n.View().GPUs
	return Source{NodeName: "node-1", Node: n, Publisher: n, Claims: ledger.New(n.records, "boot", inventorytest.New(s))}
}

func (n *node) read(t *testing.T) metrics.Occupancy {
	t.Helper()
	o, ok := n.source().Read()
	if !ok {
		t.Fatal("no answer")
	}
	return o
}

func whole(g device.GPU) checkpoint.Device { return checkpoint.Device{Device: g.WholeName()} }

func TestWhatIsFree(t *testing.T) {
	type expected struct {
		gpus    int
		largest []string // by GPU
	}
	for name, c := range map[string]struct {
		setUp func(t *testing.T, n *node)
		want  expected
	}{
		"nothing is taken": {func(*testing.T, *node) {}, expected{2, []string{"7g.80gb", "7g.80gb"}}},
		"a GPU is held whole": {func(t *testing.T, n *node) { n.prepare(t, "a", "", whole(n.gpus[0])) },
			expected{1, []string{"", "7g.80gb"}}},
		"a partition leaves half a GPU": {func(t *testing.T, n *node) {
			n.prepare(t, "a", "", checkpoint.Device{Device: cut(&n.gpus[0], 5)})
		}, expected{1, []string{"3g.40gb", "7g.80gb"}}},
		"two partitions leave no room for a large one": {func(t *testing.T, n *node) {
			n.prepare(t, "a", "", checkpoint.Device{Device: cut(&n.gpus[0], 1)})
			n.prepare(t, "b", "", checkpoint.Device{Device: cut(&n.gpus[0], 5)})
		}, expected{1, []string{"1g.10gb", "7g.80gb"}}},
		"a share takes its GPU": {func(t *testing.T, n *node) {
			n.prepare(t, "a", "", checkpoint.Device{Device: n.gpus[1].WholeName() + "-share", ShareID: ptr.To(types.UID("s"))})
		}, expected{1, []string{"7g.80gb", ""}}},
		"admin access takes nothing": {func(t *testing.T, n *node) {
			n.prepare(t, "a", "", checkpoint.Device{Device: n.gpus[0].WholeName(), AdminAccess: true})
		}, expected{2, []string{"7g.80gb", "7g.80gb"}}},
		"virtual machines may have a GPU too": {func(_ *testing.T, n *node) { n.gpus[0].Passthrough = &device.Passthrough{} },
			expected{2, []string{"7g.80gb", "7g.80gb"}}},
		"a virtual machine has a GPU": {func(t *testing.T, n *node) {
			n.gpus[0].Passthrough = &device.Passthrough{}
			n.prepare(t, "a", "", checkpoint.Device{Device: n.gpus[0].WholeName() + "-vfio"})
		}, expected{1, []string{"", "7g.80gb"}}},
		"a taint keeps claims away": {func(_ *testing.T, n *node) { n.taint = n.gpus[0].WholeName() },
			expected{1, []string{"7g.80gb", "7g.80gb"}}},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, h100s(2)...)
			n.shares = "[{kind: shares, count: 4}]"
			c.setUp(t, n)
			o := n.read(t)
			got := expected{gpus: o.FreeGPUs}
			for _, p := range o.Partitions {
				got.largest = append(got.largest, p.Profile)
			}
			if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(expected{})); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestDevicesAndAllocations(t *testing.T) {
	n := newNode(t, h100s(1)...)
	part := cut(&n.gpus[0], 6)
	n.prepare(t, "mine", "worker-0", checkpoint.Device{Device: part})
	n.prepare(t, "watch", "", checkpoint.Device{Device: n.gpus[0].WholeName(), AdminAccess: true})
	o := n.read(t)
	gpu := metrics.Device{
		Name: "gpu-0000-1b-00-0", UUID: "GPU-0", PCIBusID: "0000:1b:00.0", Model: "NVIDIA H100 80GB HBM3", ParentUUID: "GPU-0",
	}
	mig := gpu
	mig.Name, mig.UUID, mig.Profile, mig.Instance = "gpu-0000-1b-00-0-mig-19-6", "MIG-GPU-0-6", "1g.10gb", "13"
	if diff := cmp.Diff([]metrics.Device{gpu, mig}, o.Devices); diff != "" {
		t.Errorf("devices, -want +got:\n%s", diff)
	}
	if diff := cmp.Diff([]metrics.Allocation{
		{Namespace: "team", Claim: "mine", Pod: "worker-0", Device: mig.Name, UUID: mig.UUID, ParentUUID: "GPU-0", Instance: "13"},
		{Namespace: "team", Claim: "watch", Device: gpu.Name, UUID: gpu.UUID, ParentUUID: "GPU-0", AdminAccess: true},
	}, o.Allocations); diff != "" {
		t.Errorf("allocations, -want +got:\n%s", diff)
	}
}

func TestSharesAddUp(t *testing.T) {
	n := newNode(t, h100s(2)...)
	n.shares = "[{kind: fractions}]"
	share := func(id, memory string) checkpoint.Device {
		return checkpoint.Device{
			Device: n.gpus[0].WholeName() + "-share", ShareID: ptr.To(types.UID(id)), Fraction: true,
			ConsumedCapacity: map[string]resource.Quantity{"memory": resource.MustParse(memory), "cores": resource.MustParse("25")},
		}
	}
	n.prepare(t, "a", "", share("1", "10Gi"), share("2", "5Gi"))
	n.prepare(t, "b", "", share("3", "1Gi"))
	o := n.read(t)
	gpu0, gpu1 := n.gpus[0].WholeName(), n.gpus[1].WholeName()
	const memory = (81408 - 1280) << 20
	if diff := cmp.Diff([]metrics.Share{
		{Device: gpu0, Resource: "cores", Capacity: 100, Used: 75}, {Device: gpu0, Resource: "memory", Capacity: memory, Used: 16 << 30},
		{Device: gpu1, Resource: "cores", Capacity: 100}, {Device: gpu1, Resource: "memory", Capacity: memory},
	}, o.Shares); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	m := metrics.New("v1")
	m.ReadOccupancy(n.source().Read)
	families, err := m.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "gpu_dra_allocation_info" && len(f.GetMetric()) != 2 {
			t.Errorf("%v: want one for each claim and device", f.GetMetric())
		}
	}
}

func TestOnlyTheLeaderReports(t *testing.T) {
	n := newNode(t, h100s(1)...)
	n.standby = true
	if _, ok := n.source().Read(); ok {
		t.Error("another instance of the node reports the same")
	}
}

// The page says how many time series a node has, so that admins can plan. This is the node with the
// most: each GPU has seven partitions, each with a claim.
func TestNumberOfSeriesIsBounded(t *testing.T) {
	const gpus, partitions, nodes = 8, 7, 300
	n := newNode(t, h100s(gpus)...)
	m := metrics.New("v1")
	var health []metrics.DeviceHealth
	for i := range n.gpus {
		g := &n.gpus[i]
		health = append(health, metrics.DeviceHealth{Device: g.WholeName(), State: "Unhealthy", Code: "xid-79"})
		m.HealthEvents(g.WholeName(), "xid-79", 1)
		for p := range uint32(partitions) {
			n.prepare(t, fmt.Sprintf("c-%d-%d", i, p), "pod", checkpoint.Device{Device: cut(g, p)})
		}
	}
	m.ReadOccupancy(n.source().Read)
	m.CountPrepared(func() (int, int, error) { return gpus * partitions, gpus, nil })
	m.Inventory(true, gpus)
	m.Health(health)
	m.HealthFindings(health)
	m.Tainted(map[metrics.Taint]int{{Key: "xid", Effect: "NoSchedule"}: gpus, {Key: "not-ready", Effect: "NoSchedule"}: gpus})
	m.ReceivesEvents(true)
	m.Shares(nil)
	m.MIG(metrics.MIGState{
		Offered: map[string]int{"1g.10gb": 1, "3g.40gb": 1, "7g.80gb": 1}, Ours: map[string]int{"1g.10gb": 56}, GPUs: map[string]int{"": gpus},
	})
	for _, op := range []metrics.Operation{metrics.Prepare, metrics.Unprepare} {
		for _, cause := range []string{"held", "not-ready", "canceled", "record", "step", "claim", "device"} {
			m.Request(op)(cause)
		}
	}
	for _, call := range []string{"look", "create", "destroy", "mode"} {
		m.MIGCall(call, time.Second, "in-use")
	}
	families, err := m.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	byName := map[string]int{}
	ours, total := 0, 0
	for _, f := range families {
		n := 0
		for _, one := range f.GetMetric() {
			switch f.GetType().String() {
			case "HISTOGRAM":
				n += len(one.GetHistogram().GetBucket()) + 3 // +Inf, sum, count
			case "SUMMARY":
				n += len(one.GetSummary().GetQuantile()) + 2
			default:
				n++
			}
		}
		total += n
		if strings.HasPrefix(f.GetName(), "gpu_dra_") {
			byName[f.GetName()] = n
			ours += n
		}
	}
	const devices, claims = gpus * (1 + partitions), gpus * partitions
	if byName["gpu_dra_device_info"] != devices || byName["gpu_dra_allocation_info"] != claims {
		t.Errorf("%d devices and %d allocations", byName["gpu_dra_device_info"], byName["gpu_dra_allocation_info"])
	}
	t.Logf("a node has %d series, %d of them of this driver; %d nodes have %d", total, ours, nodes, nodes*total)
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		t.Logf("%4d %s", byName[name], name)
	}
	// docs/operations.md, "Number of time series"
	if perNode, all := 450, 135_000; total > perNode || total*nodes > all {
		t.Errorf("%d series on a node, %d on %d nodes: the page says at most %d and %d", total, total*nodes, nodes, perNode, all)
	}
}
