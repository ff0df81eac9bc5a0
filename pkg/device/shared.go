package device

import (
	"math"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"
)

// Capacities of devices that several claims may hold.
const (
	// CapacityMemory is in bytes.
	CapacityMemory = "memory"
	// CapacityCores is a percentage of the compute units. None asked for is none reserved, and no limit.
	CapacityCores = "cores"
	// CapacityShares counts plain shares.
	CapacityShares = "shares"
)

const (
	// reserveOfWhole and reserveOfPartition are what no claim can get of a device whose memory is shared. NVML counts into a GPU's memory what the driver
	// keeps for itself (nvmlMemory_v2_t has it as "reserved": some hundred MiB of a GPU, next to nothing of an instance), and the server of MPS has a context
	// of its own on the device.
	reserveOfWhole     = 1 << 30
	reserveOfPartition = 256 << 20

	// leastFraction is what a claim gets that asks for no memory, and the least that one can get: the context of a process and the code of its libraries take
	// some hundred MiB before it allocates anything, so that less would start nothing. It is the same on every model, so that a claim means the same.
	leastFraction = 1 << 30
	// fractionStep is in whole MiB, as MPS takes its limits, and whole pages of device memory (2 MiB). It rounds up what is asked for: smaller steps waste
	// less, but make limits that nobody reads at a glance.
	fractionStep = 64 << 20

	// allCores is how many percent a device has. They are limits of what each claim may use at once and do not take turns: so they are not given out twice.
	allCores = 100
)

// Shared is a device that several claims may hold at once, beside the [Whole] or the [Partition] that it is made of. They exclude each other: both take their
// parts of the same counters, the shares once for as long as there is any.
type Shared struct {
	shareable
	share Share
}

// shareable is a shape of which there can be shares.
type shareable interface {
	Shape
	name() Name
	// memoryToShare is 0 where it is not known.
	memoryToShare() uint64
	// exclusive says whether counters keep the shape apart from what takes the same, as its shares
	// do together.
	exclusive() bool
}

var _ Shape = Shared{}

// Ending says whether nobody gets another share, because the device is not offered so any more.
func (s Shared) Ending() bool { return s.share.ending }

// InFractions says whether what claims hold of it is kept by MPS.
func (s Shared) InFractions() bool { return s.share.Fractions }

// possible is false where the shape is not shared, or cannot be.
func (s Shared) possible() bool {
	return s.share.Offered() && s.exclusive() && len(s.Name()) <= validation.DNS1123LabelMaxLength && (!s.share.Fractions || s.share.ending || s.memory() > 0)
}

func (s Shared) Name() string {
	n := s.name()
	n.Share = true
	return n.String()
}

// memory is what claims can get. It is 0 if there is not room for two, since the API wants a step to be possible.
func (s Shared) memory() int64 {
	reserve := int64(reserveOfWhole)
	if s.name().Partition != nil {
		reserve = reserveOfPartition
	}
	total := int64(min(s.memoryToShare(), math.MaxInt64))
	if total < reserve+2*leastFraction {
		return 0
	}
	return (total - reserve) / fractionStep * fractionStep
}

// Device has the attributes of the shape that it is made of, and other capacities: all that a shared device has is given out in parts.
func (s Shared) Device(d Driver) resourceapi.Device {
	device := s.shareable.Device(d)
	device.Name = s.Name()
	device.AllowMultipleAllocations = ptr.To(true)
	device.Attributes["type"] = text(*device.Attributes["type"].StringValue + "-share")
	device.Attributes["sharing"], device.Attributes["memoryLimit"] = text("TimeSlicing"), text("none")
	if s.share.Fractions {
		device.Attributes["sharing"], device.Attributes["memoryLimit"] = text("MPS"), text("process")
		if ContainerLimits(s.GPU(), s.name()) {
			device.Attributes["memoryLimit"] = text("container")
		}
	}
	device.Capacity = s.capacities()
	return device
}

func (s Shared) capacities() map[resourceapi.QualifiedName]resourceapi.DeviceCapacity {
	switch {
	case s.share.ending && s.share.Fractions:
		return map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{CapacityMemory: taken(bytesOf(leastFraction))}
	case s.share.ending:
		return map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{CapacityShares: taken(numberOf(1))}
	case s.share.Fractions:
		return map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			CapacityMemory: inParts(bytesOf(s.memory()), bytesOf(leastFraction), bytesOf(leastFraction), bytesOf(fractionStep)),
			CapacityCores:  inParts(numberOf(allCores), numberOf(0), numberOf(0), numberOf(1)),
		}
	default:
		return map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			CapacityShares: inParts(numberOf(s.share.Count), numberOf(1), numberOf(1), numberOf(1)),
		}
	}
}

func (s Shared) partitionType() string { return "share of " + s.shareable.partitionType() }

// inParts is a capacity of which a claim gets at least so much, or so much if it does not say, and more in steps. Without a policy the first claim that does
// not say would get all of it.
func inParts(total, least, unasked, step resource.Quantity) resourceapi.DeviceCapacity {
	return resourceapi.DeviceCapacity{Value: total, RequestPolicy: &resourceapi.CapacityRequestPolicy{
		Default: &unasked, ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: &least, Max: ptr.To(total.DeepCopy()), Step: &step},
	}}
}

// taken is a capacity of which no less than all can be asked for, so that nothing is left where anybody holds any.
func taken(least resource.Quantity) resourceapi.DeviceCapacity {
	return resourceapi.DeviceCapacity{Value: least, RequestPolicy: &resourceapi.CapacityRequestPolicy{
		Default: ptr.To(least.DeepCopy()), ValidValues: []resource.Quantity{least.DeepCopy()},
	}}
}

func bytesOf(n int64) resource.Quantity { return *resource.NewQuantity(n, resource.BinarySI) }
func numberOf(n int) resource.Quantity  { return *resource.NewQuantity(int64(n), resource.DecimalSI) }
