package device

import (
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

const (
	driverName = "gpu.nvidia.com"
	simulator  = "../../test/nvmlsim"
)

// machine is a simulated node: the devices that it offers, and a scheduler that sees its published
// slices.
type machine struct {
	t         *testing.T
	offerings []Offering
	*scheduler.Scheduler
}

func newMachine(t *testing.T, gpus []GPU, d Driver) machine {
	t.Helper()
	return offered(t, dynamic(gpus...), d)
}

// offered returns a machine that publishes these offerings.
func offered(t *testing.T, offerings []Offering, d Driver) machine {
	t.Helper()
	return machine{t, offerings, scheduler.New(driverName, Slices(Offer(offerings), d, false), chartClasses())}
}

// dynamic returns offerings of the GPUs under the policy dynamic: whole and in every partition.
func dynamic(gpus ...GPU) []Offering { return offerUnder(Policy{Mode: PolicyDynamic}, gpus...) }

// offerUnder returns offerings of the GPUs under this policy.
func offerUnder(policy Policy, gpus ...GPU) []Offering {
	offerings := make([]Offering, len(gpus))
	for i, g := range gpus {
		layout, _ := Decide(g, nil, policy, true)
		offerings[i] = Offering{GPU: g, Layout: layout}
	}
	return offerings
}

// allocate runs the scheduler's own allocator for one claim. It returns the names of the allocated
// devices, or nil if the claim cannot be allocated. taken has the devices in use, and also gets the
// newly allocated devices.
func (m machine) allocate(taken *scheduler.Taken, spec resourceapi.DeviceClaim) []string {
	m.t.Helper()
	var names []string
	for _, r := range m.results(taken, spec) {
		names = append(names, r.Device)
	}
	return names
}

// results is like allocate, but returns the whole results, with the consumed capacity of each
// device.
func (m machine) results(taken *scheduler.Taken, spec resourceapi.DeviceClaim) []resourceapi.DeviceRequestAllocationResult {
	m.t.Helper()
	for i := range spec.Requests {
		spec.Requests[i].Name = fmt.Sprintf("r%d", i)
		if spec.Requests[i].Exactly.DeviceClassName == "" {
			spec.Requests[i].Exactly.DeviceClassName = driverName
		}
	}
	results, err := m.Allocate(m.t.Context(), taken, spec)
	if err != nil {
		m.t.Fatal(err)
	}
	return results
}

// device returns the GPU whose device for the whole GPU has this name. It ends the test if the
// machine has none.
func (m machine) device(name string) GPU {
	m.t.Helper()
	for _, o := range m.offerings {
		if o.WholeName() == name {
			return o.GPU
		}
	}
	m.t.Fatalf("device %s is not on the machine", name)
	return GPU{}
}

// count returns a request for n devices for which all expressions are true.
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

// partitions returns a request for n MIG devices for which all expressions are true.
func partitions(n int, expressions ...string) resourceapi.DeviceRequest {
	r := count(n, expressions...)
	r.Exactly.DeviceClassName = migClass
	return r
}

// profile returns an expression that selects partitions of the profile with this name.
func profile(name string) string {
	return fmt.Sprintf(`device.attributes["gpu.nvidia.com"].profile == %q`, name)
}

const (
	migClass    = "mig.nvidia.com"
	sharedClass = "shared.gpu.nvidia.com"
	vfioClass   = "vfio.gpu.nvidia.com"
)

// chartClasses returns the device classes that the Helm chart installs: for whole GPUs, partitions,
// shares and virtual machines.
func chartClasses() scheduler.Classes {
	const isType = `device.driver == "gpu.nvidia.com" && device.attributes["gpu.nvidia.com"].type == %q`
	return scheduler.Classes{
		driverName: fmt.Sprintf(isType, "gpu"), migClass: fmt.Sprintf(isType, "mig"), vfioClass: fmt.Sprintf(isType, "vfio"),
		sharedClass: `device.driver == "gpu.nvidia.com" && device.attributes["gpu.nvidia.com"].type in ["gpu-share", "mig-share"]`,
	}
}

// simulated returns a machine with the GPUs that a node file of the simulator describes.
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
	if m.AddressingMode.Value != "NotSupported" {
		g.AddressingMode = m.AddressingMode.Value
	}
	if !m.MIG.Supported.Value {
		return g
	}
	g.Engines = &Engines{Multiprocessors: m.Multiprocessors.Value}
	major, _, err := m.ComputeCapability()
	g.MIG = &MIG{ModeFixed: err != nil || major < 9}
	for _, p := range m.MIG.Profiles {
		g.MIG.Profiles = append(g.MIG.Profiles, Profile{
			ID: p.ID, Name: strings.TrimPrefix(p.Name, "MIG "), Slices: p.Slices, MaxInstances: p.InstancesMax, MemoryBytes: p.MemoryMiB << 20,
			Engines: Engines{
				Multiprocessors: p.SM, CopyEngines: p.CopyEngines, Decoders: p.Decoders, Encoders: p.Encoders,
				JPEGEngines: p.JPEGEngines, OFAEngines: p.OFAEngines,
			},
			Size: p.Placements.Size, Starts: p.Placements.Starts,
		})
	}
	slices.SortFunc(g.MIG.Profiles, func(a, b Profile) int { return cmp.Compare(a.ID, b.ID) })
	return g
}

// migCapable returns n GPUs of a model that can be partitioned now. If the model needs a reset to
// enter MIG mode, MIG mode is already on.
func migCapable(m *model.GPU, n int) []GPU {
	gpus := make([]GPU, n)
	for i := range gpus {
		gpus[i] = fromModel(m)
		gpus[i].PCIAddress, gpus[i].UUID, gpus[i].Minor = PCIAddress(fmt.Sprintf("%04x:%02x:00.0", i/32, i%32)), fmt.Sprintf("GPU-%d", i), i
		gpus[i].MIG.Enabled = gpus[i].MIG.ModeFixed
		gpus[i].MIG.Pending = gpus[i].MIG.Enabled
	}
	return gpus
}

// forEachMIGModel runs test as a subtest for every known GPU model with MIG.
func forEachMIGModel(t *testing.T, test func(t *testing.T, known *model.GPU)) {
	t.Helper()
	models := readModels(t)
	for _, key := range slices.Sorted(maps.Keys(models)) {
		if models[key].MIG.Supported.Value {
			t.Run(key, func(t *testing.T) { test(t, models[key]) })
		}
	}
}

func readModels(tb testing.TB) map[string]*model.GPU {
	tb.Helper()
	models, err := model.ReadGPUs(filepath.Join(simulator, "models"))
	if err != nil || len(models) == 0 {
		tb.Fatal("no models", err)
	}
	return models
}

func TestKnownNodesPublishValidSlicesAndAllocate(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(simulator, "nodes", "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatal("no nodes", err)
	}
	models := readModels(t)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			m := simulated(t, file, models)
			checkAPILimits(t, m)
			allocatesEveryGPUOnce(t, m)
		})
	}
}

func TestKnownModelsPublishValidSlicesAndAllocate(t *testing.T) {
	for key, known := range readModels(t) {
		t.Run(key, func(t *testing.T) {
			g := fromModel(known)
			g.PCIAddress, g.UUID = "0000:01:00.0", "GPU-1"
			m := newMachine(t, []GPU{g}, Driver{Version: known.TypicalDriverVersion.Value, CUDAVersion: known.TypicalCUDAVersion.Value})
			checkAPILimits(t, m)
			expression := fmt.Sprintf(`device.attributes["gpu.nvidia.com"].productName == %q && `+
				`device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("%dMi")) == 0`,
				known.ProductName.Value, known.MemoryTotalMiB.Value)
			if got := m.allocate(scheduler.NewTaken(), requests(count(1, expression))); len(got) != 1 {
				t.Error("no device matches its product name and memory")
			}
		})
	}
}

func TestManyGPUsSpanSeveralSlices(t *testing.T) {
	for n, slices := range map[int]int{1: 1, 16: 1, 64: 1, 65: 2, 130: 3} {
		m := newMachine(t, manyGPUs(n), Driver{Version: "580.65.06", CUDAVersion: "13.0"})
		if len(m.Slices) != slices {
			t.Errorf("%d GPUs are published in %d slices, want %d", n, len(m.Slices), slices)
		}
		checkAPILimits(t, m)
		taken := scheduler.NewTaken()
		if got := m.allocate(taken,
			requests(count(min(n, resourceapi.AllocationResultsMaxSize)))); len(got) != min(n, resourceapi.AllocationResultsMaxSize) {
			t.Errorf("%[2]d of %[1]d GPUs were allocated", n, len(got))
		}
	}
}

func allocatesEveryGPUOnce(t *testing.T, m machine) {
	t.Helper()
	taken := scheduler.NewTaken()
	for i := range m.offerings {
		got := m.allocate(taken, requests(count(1)))
		if len(got) != 1 {
			t.Fatalf("claim %d of %d got %v", i+1, len(m.offerings), got)
		}
		m.device(got[0])
	}
	if taken.Len() != len(m.offerings) {
		t.Errorf("%d of %d GPUs were allocated", taken.Len(), len(m.offerings))
	}
	if got := m.allocate(taken, requests(count(1))); got != nil {
		t.Errorf("one device too many: %v", got)
	}
}

func dgxH100(t *testing.T) machine {
	t.Helper()
	return simulated(t, filepath.Join(simulator, "nodes", "dgx-h100.yaml"), readModels(t))
}

func TestNodeAllocatesEachGPUOnce(t *testing.T) {
	m := dgxH100(t)
	taken := scheduler.NewTaken()
	if got := m.allocate(taken, requests(count(9))); got != nil {
		t.Errorf("nine of eight GPUs were allocated: %v", got)
	}
	if got := m.allocate(taken, requests(count(8))); len(got) != 8 {
		t.Errorf("eight of eight: %v", got)
	}
	if got := m.allocate(taken, requests(count(1))); got != nil {
		t.Errorf("a ninth GPU was allocated: %v", got)
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
		for taken := scheduler.NewTaken(); m.allocate(taken, requests(count(1, expression))) != nil; n++ {
		}
		if n != want {
			t.Errorf("%s selects %d, want %d", expression, n, want)
		}
	}
}

func TestMatchAndDistinctAttributes(t *testing.T) {
	// The machine has four GPUs on each PCIe root, on even and odd NUMA nodes.
	m := newMachine(t, manyGPUs(16), Driver{Version: "580.65.06", CUDAVersion: "13.0"})
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
	if got := m.allocate(scheduler.NewTaken(), match); len(got) != 4 || roots(got).Len() != 1 {
		t.Errorf("four at one root: %v", got)
	}
	tooMany := requests(count(5))
	tooMany.Constraints = match.Constraints
	if got := m.allocate(scheduler.NewTaken(), tooMany); got != nil {
		t.Errorf("five at a root with four: %v", got)
	}
	distinct := requests(count(4))
	distinct.Constraints = []resourceapi.DeviceConstraint{{DistinctAttribute: &root}}
	if got := m.allocate(scheduler.NewTaken(), distinct); len(got) != 4 || roots(got).Len() != 4 {
		t.Errorf("four at different roots: %v", got)
	}
}

func TestAllocationFollowsPCIAddresses(t *testing.T) {
	m := dgxH100(t)
	if got := m.allocate(scheduler.NewTaken(), requests(count(2))); len(got) != 2 || got[0] != "gpu-0000-1b-00-0" ||
		got[1] != "gpu-0000-43-00-0" {
		t.Error(got)
	}
}
