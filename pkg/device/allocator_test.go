package device

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

const (
	driverName = "gpu.nvidia.com"
	simulator  = "../../test/nvmlsim"
)

// machine is a node and what it publishes.
type machine struct {
	t      *testing.T
	gpus   []GPU
	slices []*resourceapi.ResourceSlice
}

func newMachine(t *testing.T, gpus []GPU, d Driver) machine {
	t.Helper()
	m := machine{t: t, gpus: gpus}
	cut := Slices(Offer(dynamic(gpus...)), d)
	for i, s := range cut {
		m.slices = append(m.slices, &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("slice-%d", i)},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: driverName, NodeName: ptr.To("node"), Devices: s.Devices, SharedCounters: s.SharedCounters,
				Pool: resourceapi.ResourcePool{Name: "node", Generation: 1, ResourceSliceCount: int64(len(cut))},
			},
		})
	}
	return m
}

// dynamic offers the GPUs in every shape.
func dynamic(gpus ...GPU) []Offering {
	offerings := make([]Offering, len(gpus))
	for i, g := range gpus {
		layout, _ := Decide(g, nil, PolicyDynamic, true)
		offerings[i] = Offering{g, layout}
	}
	return offerings
}

// allocate asks the scheduler's own allocator for one claim and returns the devices it got, nil if it got none.
func (m machine) allocate(taken sets.Set[structured.DeviceID], spec resourceapi.DeviceClaim) []string {
	m.t.Helper()
	features := structured.Features{AdminAccess: true, PrioritizedList: true, DeviceTaints: true, PartitionableDevices: true, ConsumableCapacity: true}
	a, err := structured.NewAllocator(m.t.Context(), features, structured.AllocatedState{AllocatedDevices: taken}, classes{}, m.slices, cel.NewCache(100, cel.Features{}))
	if err != nil {
		m.t.Fatal(err)
	}
	for i := range spec.Requests {
		spec.Requests[i].Name = fmt.Sprintf("r%d", i)
		spec.Requests[i].Exactly.DeviceClassName = driverName
	}
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "claim", UID: "claim"}, Spec: resourceapi.ResourceClaimSpec{Devices: spec}}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}}
	results, err := a.Allocate(m.t.Context(), node, []*resourceapi.ResourceClaim{claim})
	if err != nil {
		m.t.Fatal(err)
	}
	if len(results) == 0 {
		return nil
	}
	var names []string
	for _, r := range results[0].Devices.Results {
		names = append(names, r.Device)
		taken.Insert(structured.MakeDeviceID(r.Driver, r.Pool, r.Device))
	}
	return names
}

// device finds a GPU by the name of its device.
func (m machine) device(name string) GPU {
	m.t.Helper()
	for _, g := range m.gpus {
		if g.WholeName() == name {
			return g
		}
	}
	m.t.Fatalf("device %s is none of the machine's", name)
	return GPU{}
}

// count asks for n devices that satisfy every expression.
func count(n int, expressions ...string) resourceapi.DeviceRequest {
	exactly := &resourceapi.ExactDeviceRequest{AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: int64(n)}
	for _, e := range expressions {
		exactly.Selectors = append(exactly.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: e}})
	}
	return resourceapi.DeviceRequest{Exactly: exactly}
}

func requests(r ...resourceapi.DeviceRequest) resourceapi.DeviceClaim {
	return resourceapi.DeviceClaim{Requests: r}
}

// classes has the one class that the chart installs for whole GPUs.
type classes struct{}

func (classes) List() ([]*resourceapi.DeviceClass, error) {
	return []*resourceapi.DeviceClass{{
		ObjectMeta: metav1.ObjectMeta{Name: driverName},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: `device.driver == "gpu.nvidia.com" && device.attributes["gpu.nvidia.com"].type == "gpu"`,
		}}}},
	}}, nil
}

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	all, err := c.List()
	if err != nil || name != all[0].Name {
		return nil, fmt.Errorf("no class %s: %w", name, err)
	}
	return all[0], nil
}

// simulated reads the machine of a node file, as discovery would find it.
func simulated(t *testing.T, file string, models map[string]*model.GPU) machine {
	t.Helper()
	node, err := model.ReadNode(file, "")
	if err != nil {
		t.Fatal(err)
	}
	var gpus []GPU
	for _, c := range node.GPUs {
		address, err := ParsePCIAddress(c.PCI)
		if err != nil {
			t.Fatal(err)
		}
		g := fromModel(models[c.Model])
		g.PCIAddress, g.UUID, g.PCIeRoot, g.Minor = address, c.UUID, c.PCIRoot, int(*c.Minor)
		if c.NUMANode >= 0 {
			g.NUMANode = ptr.To(int(c.NUMANode))
		}
		gpus = append(gpus, g)
	}
	return newMachine(t, gpus, Driver{Version: node.DriverVersion, CUDAVersion: node.CUDAVersion})
}

func fromModel(m *model.GPU) GPU {
	g := GPU{
		ProductName: m.ProductName.Value, Brand: m.Brand.Value, Architecture: m.Architecture.Value,
		CUDAComputeCapability: m.CUDAComputeCapability.Value, MemoryBytes: m.MemoryTotalMiB.Value << 20,
	}
	if m.MIG.Supported.Value {
		g.Engines = &Engines{Multiprocessors: m.Multiprocessors.Value}
	}
	return g
}

func readModels(t *testing.T) map[string]*model.GPU {
	t.Helper()
	models, err := model.ReadGPUs(filepath.Join(simulator, "models"))
	if err != nil || len(models) == 0 {
		t.Fatal("no models", err)
	}
	return models
}

func TestEveryKnownNodeKeepsTheLimitsAndAllocates(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(simulator, "nodes", "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatal("no nodes", err)
	}
	models := readModels(t)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			m := simulated(t, file, models)
			keepsLimits(t, m)
			allocatesEveryGPUOnce(t, m)
		})
	}
}

func TestEveryKnownModelKeepsTheLimitsAndAllocates(t *testing.T) {
	for key, known := range readModels(t) {
		t.Run(key, func(t *testing.T) {
			g := fromModel(known)
			g.PCIAddress, g.UUID = "0000:01:00.0", "GPU-1"
			m := newMachine(t, []GPU{g}, Driver{Version: known.TypicalDriverVersion.Value, CUDAVersion: known.TypicalCUDAVersion.Value})
			keepsLimits(t, m)
			expression := fmt.Sprintf(`device.attributes["gpu.nvidia.com"].productName == %q && device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("%dMi")) == 0`,
				known.ProductName.Value, known.MemoryTotalMiB.Value)
			if got := m.allocate(sets.New[structured.DeviceID](), requests(count(1, expression))); len(got) != 1 {
				t.Error("it is not found by its name and memory")
			}
		})
	}
}

func TestMachinesWithMoreGPUsThanASliceHolds(t *testing.T) {
	for n, slices := range map[int]int{1: 1, 16: 1, 64: 1, 65: 2, 130: 3} {
		m := newMachine(t, manyGPUs(n), Driver{Version: "580.65.06", CUDAVersion: "13.0"})
		if len(m.slices) != slices {
			t.Errorf("%d GPUs make %d slices, want %d", n, len(m.slices), slices)
		}
		keepsLimits(t, m)
		taken := sets.New[structured.DeviceID]()
		if got := m.allocate(taken, requests(count(min(n, resourceapi.AllocationResultsMaxSize)))); len(got) != min(n, resourceapi.AllocationResultsMaxSize) {
			t.Errorf("of %d GPUs %d were allocated", n, len(got))
		}
	}
}

// keepsLimits holds every slice to the API's limits, with room for what health adds later.
func keepsLimits(t *testing.T, m machine) {
	t.Helper()
	names := sets.New[string]()
	for _, s := range m.slices {
		if n := len(s.Spec.Devices); n == 0 || n > resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures {
			t.Errorf("%s has %d devices", s.Name, n)
		}
		for _, d := range s.Spec.Devices {
			if names.Has(d.Name) {
				t.Errorf("two devices are named %s: the scheduler would drop the pool", d.Name)
			}
			names.Insert(d.Name)
			for _, msg := range validation.IsDNS1123Label(d.Name) {
				t.Errorf("device %q: %s", d.Name, msg)
			}
			if n := len(d.Attributes) + len(d.Capacity); n > resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
				t.Errorf("device %s has %d attributes and capacities", d.Name, n)
			}
			for name, a := range d.Attributes {
				attributeIsValid(t, d.Name, name, a)
			}
			for name := range d.Capacity {
				nameIsValid(t, d.Name, name)
			}
		}
	}
	if len(names) != len(m.gpus) {
		t.Errorf("%d devices for %d GPUs", len(names), len(m.gpus))
	}
}

func attributeIsValid(t *testing.T, device string, name resourceapi.QualifiedName, a resourceapi.DeviceAttribute) {
	t.Helper()
	nameIsValid(t, device, name)
	set := 0
	if a.StringValue != nil {
		set++
		if len(*a.StringValue) > resourceapi.DeviceAttributeMaxValueLength || *a.StringValue == "" {
			t.Errorf("device %s: %s is %q", device, name, *a.StringValue)
		}
	}
	if a.VersionValue != nil {
		set++
		if strict, err := Semver(*a.VersionValue); err != nil || strict != *a.VersionValue {
			t.Errorf("device %s: %s is %q, no strict semver", device, name, *a.VersionValue)
		}
	}
	if a.IntValue != nil {
		set++
	}
	if set != 1 {
		t.Errorf("device %s: %s has %d values", device, name, set)
	}
}

func nameIsValid(t *testing.T, device string, name resourceapi.QualifiedName) {
	t.Helper()
	domain, id, qualified := strings.Cut(string(name), "/")
	if !qualified {
		domain, id = "", string(name)
	}
	if qualified && (len(validation.IsDNS1123Subdomain(domain)) > 0 || len(domain) > resourceapi.DeviceMaxDomainLength) ||
		len(validation.IsCIdentifier(id)) > 0 || len(id) > resourceapi.DeviceMaxIDLength {
		t.Errorf("device %s: %q is no qualified name", device, name)
	}
}

func allocatesEveryGPUOnce(t *testing.T, m machine) {
	t.Helper()
	taken := sets.New[structured.DeviceID]()
	for i := range m.gpus {
		got := m.allocate(taken, requests(count(1)))
		if len(got) != 1 {
			t.Fatalf("claim %d of %d got %v", i+1, len(m.gpus), got)
		}
		m.device(got[0])
	}
	if taken.Len() != len(m.gpus) {
		t.Errorf("%d of %d GPUs were allocated", taken.Len(), len(m.gpus))
	}
	if got := m.allocate(taken, requests(count(1))); got != nil {
		t.Errorf("there was one too many: %v", got)
	}
}

func dgxH100(t *testing.T) machine {
	t.Helper()
	return simulated(t, filepath.Join(simulator, "nodes", "dgx-h100.yaml"), readModels(t))
}

func TestEightOfEightAndNoNinth(t *testing.T) {
	m := dgxH100(t)
	taken := sets.New[structured.DeviceID]()
	if got := m.allocate(taken, requests(count(9))); got != nil {
		t.Errorf("nine of eight: %v", got)
	}
	if got := m.allocate(taken, requests(count(8))); len(got) != 8 {
		t.Errorf("eight of eight: %v", got)
	}
	if got := m.allocate(taken, requests(count(1))); got != nil {
		t.Errorf("a ninth: %v", got)
	}
	admin := count(1)
	admin.Exactly.AdminAccess = ptr.To(true)
	if got := m.allocate(taken, requests(admin)); len(got) != 1 {
		t.Error("admin access does not see GPUs in use")
	}
}

func TestSelectionByCEL(t *testing.T) {
	m := dgxH100(t)
	for expression, want := range map[string]int{
		`device.attributes["gpu.nvidia.com"].productName == "NVIDIA H100 80GB HBM3"`:                 8,
		`device.attributes["gpu.nvidia.com"].productName.matches("A100")`:                            0,
		`device.attributes["gpu.nvidia.com"].architecture == "Hopper"`:                               8,
		`device.attributes["gpu.nvidia.com"].cudaComputeCapability.isGreaterThan(semver("8.9.0"))`:   8,
		`device.attributes["gpu.nvidia.com"].driverVersion.isLessThan(semver("1.0.0"))`:              0,
		`device.attributes["gpu.nvidia.com"].cudaDriverVersion.compareTo(semver("12.0.0")) >= 0`:     8,
		`device.capacity["gpu.nvidia.com"].memory.isGreaterThan(quantity("70Gi"))`:                   8,
		`device.capacity["gpu.nvidia.com"].memory.isGreaterThan(quantity("100Gi"))`:                  0,
		`device.capacity["gpu.nvidia.com"].multiprocessors.compareTo(quantity("132")) == 0`:          8,
		`device.attributes["resource.kubernetes.io"].numaNode == 1`:                                  4,
		`device.attributes["resource.kubernetes.io"].pciBusID == "0000:1b:00.0"`:                     1,
		`device.attributes["gpu.nvidia.com"].uuid == device.attributes["gpu.nvidia.com"].parentUUID`: 8,
	} {
		n := 0
		for taken := sets.New[structured.DeviceID](); m.allocate(taken, requests(count(1, expression))) != nil; n++ {
		}
		if n != want {
			t.Errorf("%s selects %d, want %d", expression, n, want)
		}
	}
}

func TestMatchingAndDistinctPlaces(t *testing.T) {
	m := newMachine(t, manyGPUs(16), Driver{Version: "580.65.06", CUDAVersion: "13.0"}) // four to a PCIe root, even and odd NUMA nodes
	root := resourceapi.FullyQualifiedName(AttrPCIeRoot)
	roots := func(names []string) sets.Set[string] {
		found := sets.New[string]()
		for _, n := range names {
			found.Insert(m.device(n).PCIeRoot)
		}
		return found
	}
	match := requests(count(2), count(2))
	match.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: &root}}
	if got := m.allocate(sets.New[structured.DeviceID](), match); len(got) != 4 || roots(got).Len() != 1 {
		t.Errorf("four at one root: %v", got)
	}
	tooMany := requests(count(5))
	tooMany.Constraints = match.Constraints
	if got := m.allocate(sets.New[structured.DeviceID](), tooMany); got != nil {
		t.Errorf("five at a root that has four: %v", got)
	}
	distinct := requests(count(4))
	distinct.Constraints = []resourceapi.DeviceConstraint{{DistinctAttribute: &root}}
	if got := m.allocate(sets.New[structured.DeviceID](), distinct); len(got) != 4 || roots(got).Len() != 4 {
		t.Errorf("four at different roots: %v", got)
	}
}

func TestFirstFitGoesByPCIAddress(t *testing.T) {
	m := dgxH100(t)
	if got := m.allocate(sets.New[structured.DeviceID](), requests(count(2))); len(got) != 2 || got[0] != "gpu-0000-1b-00-0" || got[1] != "gpu-0000-43-00-0" {
		t.Error(got)
	}
}
