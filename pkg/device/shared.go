package device

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"
)

// These are the capacities of devices that several claims may use.
const (
	// CapacityMemory is an amount of memory in bytes.
	CapacityMemory = "memory"
	// CapacityCores is a percentage of the compute units. A claim that does not request it reserves no
	// compute units and has no limit on them.
	CapacityCores = "cores"
	// CapacityShares is a number of plain shares.
	CapacityShares = "shares"
)

const (
	// Claims that share a device cannot get this much of its memory. NVML's total memory includes what
	// the driver reserves (nvmlMemory_v2_t.reserved): 616 MiB of an H200, very little of a MIG
	// instance. The MPS server needs memory, too: a CUDA process took 520 MiB (docs/hardware.md).
	reserveOfWhole     = 1280 << 20
	reserveOfPartition = 256 << 20

	// minFraction is the least memory that a claim on a shared device gets, and what it gets if it
	// requests none. A process takes some hundred MiB before it allocates any memory itself. The value
	// does not depend on the GPU model, so that one claim fits all models.
	minFraction = 1 << 30
	// Memory requests on a shared device are rounded up to a multiple of fractionStep, which is itself
	// a multiple of MPS's unit (1 MiB) and of a device memory page (2 MiB). A smaller value would
	// waste less memory, but give limits that are hard to read.
	fractionStep = 64 << 20

	// allCores is all compute units of a device, in percent. MPS applies the limits of all claims at
	// the same time, so their sum must not exceed allCores.
	allCores = 100
)

// Shared is a device that several claims may use at once. It is offered in addition to its [Whole]
// or [Partition], and takes the same counters, so each excludes the other. All shares together take
// these counters once, as long as a claim has a share.
type Shared struct {
	shareable
	share Share
}

// shareable is a device that can also be offered in shares: [Whole] or [Partition].
type shareable interface {
	Shape
	name() Name
	// memoryToShare returns the device's memory in bytes, or 0 if the memory is unknown.
	memoryToShare() uint64
	// exclusive reports whether counters keep the scheduler from allocating both the device and its
	// shares.
	exclusive() bool
}

var _ Shape = Shared{}

// Withdrawn reports whether these shares of the device are no longer offered. The device stays
// published for the claims that have shares, but no further share can be allocated.
func (s Shared) Withdrawn() bool { return s.share.withdrawn }

// InFractions reports whether each claim gets a limited part of the memory and compute units, which
// MPS enforces. Otherwise the shares are plain shares without limits.
func (s Shared) InFractions() bool { return s.share.Fractions }

// possible reports whether the device can be published in shares of this kind. It must have
// counters that exclude its shares, a name that is a DNS label, and enough memory if MPS divides
// it.
func (s Shared) possible() bool {
	return s.share.Offered() && s.exclusive() && len(s.Name()) <= validation.DNS1123LabelMaxLength &&
		(!s.share.Fractions || s.share.withdrawn || s.memory() > 0)
}

func (s Shared) Name() string {
	n := s.name()
	n.Share = true
	return n.String()
}

// memory returns how many bytes of the device's memory its claims can have in total. It is 0 if
// that is not enough for two claims of minFraction each.
func (s Shared) memory() int64 {
	reserve := int64(reserveOfWhole)
	if s.name().Partition != nil {
		reserve = reserveOfPartition
	}
	total := int64(min(s.memoryToShare(), math.MaxInt64))
	if total < reserve+2*minFraction {
		return 0
	}
	return (total - reserve) / fractionStep * fractionStep
}

// Attributes returns the attributes of the unshared device, and how it is shared.
func (s Shared) Attributes(d Driver) Attributes {
	a := s.shareable.Attributes(d)
	a["type"] = text(*a["type"].StringValue + "-share")
	a["sharing"], a["memoryLimit"] = text("TimeSlicing"), text("none")
	if s.share.Fractions {
		a["sharing"], a["memoryLimit"] = text("MPS"), text("process")
		if ContainerLimits(s.GPU(), s.name()) {
			a["memoryLimit"] = text("container")
		}
	}
	return a
}

// Device returns the device with only the capacities that shares consume.
func (s Shared) Device(d Driver) resourceapi.Device {
	device := s.shareable.Device(d)
	device.Name, device.Attributes, device.Capacity = s.Name(), s.Attributes(d), s.capacities()
	device.AllowMultipleAllocations = ptr.To(true)
	return device
}

func (s Shared) capacities() map[resourceapi.QualifiedName]resourceapi.DeviceCapacity {
	switch {
	case s.share.withdrawn && s.share.Fractions:
		return map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{CapacityMemory: exhaustedCapacity(bytesOf(minFraction))}
	case s.share.withdrawn:
		return map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{CapacityShares: exhaustedCapacity(numberOf(1))}
	case s.share.Fractions:
		return map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			CapacityMemory: steppedCapacity(bytesOf(s.memory()), bytesOf(minFraction), bytesOf(minFraction), bytesOf(fractionStep)),
			CapacityCores:  steppedCapacity(numberOf(allCores), numberOf(0), numberOf(0), numberOf(1)),
		}
	default:
		return map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			CapacityShares: steppedCapacity(numberOf(s.share.Count), numberOf(1), numberOf(1), numberOf(1)),
		}
	}
}

// FractionTotals returns how much of each capacity all claims with fractions of the device n divide
// among them. It has no memory if the driver does not report it, and nothing if the GPU g cannot
// have n.
func FractionTotals(g GPU, n Name) map[string]resource.Quantity {
	totals := map[string]resource.Quantity{}
	if of, known := g.shareable(n); known {
		for name, c := range (Shared{of, Share{Fractions: true}}).capacities() {
			if !c.Value.IsZero() {
				totals[string(name)] = c.Value
			}
		}
	}
	return totals
}

func (s Shared) partitionType() string { return "share of " + s.shareable.partitionType() }

// steppedCapacity returns a capacity of which each claim gets at least the minimum, rounded up to a
// multiple of step. A claim that does not request the capacity gets byDefault. Without this default
// it would get the total.
func steppedCapacity(total, least, byDefault, step resource.Quantity) resourceapi.DeviceCapacity {
	return resourceapi.DeviceCapacity{Value: total, RequestPolicy: &resourceapi.CapacityRequestPolicy{
		Default: &byDefault, ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: &least, Max: ptr.To(total.DeepCopy()), Step: &step},
	}}
}

// exhaustedCapacity returns a capacity of which a claim can only request all. So if a claim already
// has some of it, no further claim can be allocated.
func exhaustedCapacity(least resource.Quantity) resourceapi.DeviceCapacity {
	return resourceapi.DeviceCapacity{Value: least, RequestPolicy: &resourceapi.CapacityRequestPolicy{
		Default: ptr.To(least.DeepCopy()), ValidValues: []resource.Quantity{least.DeepCopy()},
	}}
}

func bytesOf(n int64) resource.Quantity { return *resource.NewQuantity(n, resource.BinarySI) }
func numberOf(n int) resource.Quantity  { return *resource.NewQuantity(int64(n), resource.DecimalSI) }

const (
	// voltaComputeCapability is the first CUDA compute capability with which each MPS client has its
	// own address space, and limits for memory and threads.
	voltaComputeCapability = 7
	// multiUserDriver is the first version of NVIDIA's driver whose MPS daemon serves processes of
	// several users at once, as MPS claims on one GPU need.
	multiUserDriver = 555
)

// FractionsUnsupportedReason explains why MPS cannot limit the memory and compute units of several
// claims on the GPU g. It returns "" if MPS can, and also a reason if it cannot tell.
func FractionsUnsupportedReason(g GPU, d Driver) string {
	if g.MemoryBytes == 0 {
		return "NVML does not report how much memory this GPU has"
	}
	switch n, err := major(g.CUDAComputeCapability); {
	case err != nil:
		return fmt.Sprintf("cannot determine whether MPS limits memory: CUDA compute capability %q is invalid", g.CUDAComputeCapability)
	case n < voltaComputeCapability:
		return fmt.Sprintf("MPS cannot limit memory on GPUs before Volta, and this one has CUDA compute capability %s",
			g.CUDAComputeCapability)
	}
	switch n, err := major(d.Version); {
	case err != nil:
		return fmt.Sprintf("cannot determine whether MPS serves several users: NVIDIA driver version %q is invalid", d.Version)
	case n < multiUserDriver:
		return fmt.Sprintf("MPS serves several users at once only from NVIDIA driver %d on, and this node has %s", multiUserDriver, d.Version)
	}
	return ""
}

// ContainerLimits reports whether a memory limit on the device n of the GPU g applies to a whole
// container. If not, it applies to each process. On a GPU in MIG mode it is always false, because
// NVIDIA's driver does not count a container's memory there.
func ContainerLimits(g GPU, n Name) bool {
	return g.ContainerLimits && n.Partition == nil && (g.MIG == nil || !g.MIG.Enabled)
}

// major returns the first number of a version such as "580.65.06".
func major(version string) (uint64, error) {
	first, _, _ := strings.Cut(version, ".")
	return strconv.ParseUint(first, 10, 16)
}
