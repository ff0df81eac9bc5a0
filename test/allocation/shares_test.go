package allocation

import (
	"fmt"
	"maps"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// shareRules share what is asked for most: the first card in fractions, the second in plain shares, small partitions and halves. The others are held alone.
const shareRules = "fractions,#1=shares:2,*/1g*=shares:3,*/3g*=fractions"

// amounts are of capacities, by their names.
type amounts map[resourceapi.QualifiedName]resource.Quantity

// books are what is held of each share device, beside what is published of it.
type books struct {
	published map[string]map[resourceapi.QualifiedName]resourceapi.DeviceCapacity
	held      map[string]amounts
}

func newBooks(slices []*resourceapi.ResourceSlice) books {
	b := books{map[string]map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{}, map[string]amounts{}}
	for _, s := range slices {
		for _, d := range s.Spec.Devices {
			if d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations {
				b.published[d.Name] = d.Capacity
			}
		}
	}
	return b
}

// reading of a request is what it gets of a share device, by what is published of that; false if it never gets that.
func (b books) reading(name string, asks amounts) (amounts, bool) {
	all := b.published[name]
	for capacity := range asks {
		if _, has := all[capacity]; !has {
			return nil, false
		}
	}
	gets := amounts{}
	for capacity, c := range all {
		q, said := asks[capacity]
		if !said {
			q = *c.RequestPolicy.Default
		}
		step, least := c.RequestPolicy.ValidRange.Step.Value(), c.RequestPolicy.ValidRange.Min.Value()
		n := max(q.Value(), least)
		n = least + (n-least+step-1)/step*step
		gets[capacity] = *resource.NewQuantity(n, resource.BinarySI)
	}
	return gets, true
}

// take is false, and takes nothing, if there is not so much left.
func (b books) take(name string, gets amounts) bool {
	sum := amounts{}
	for capacity, q := range gets {
		n := q.DeepCopy()
		n.Add(b.held[name][capacity])
		if total := b.published[name][capacity].Value; n.Cmp(total) > 0 {
			return false
		}
		sum[capacity] = n
	}
	b.held[name] = sum
	return true
}

func (b books) give(name string, gets amounts) {
	for capacity, q := range gets {
		n := b.held[name][capacity]
		n.Sub(q)
		b.held[name][capacity] = n
	}
}

func same(a, b amounts) bool {
	return maps.EqualFunc(a, b, func(x, y resource.Quantity) bool { return x.Cmp(y) == 0 })
}

// together is a device that claims share: the first makes it, the last takes it away.
type together struct {
	made
	holders int
	filled  bool
}

// makeShare makes the device that a share is of, if nobody has done so. Processes of fractions go through the server of MPS, on whole GPUs through it alone.
func (h *hardware) makeShare(name device.Name) (made, error) {
	t := h.shared[name.String()]
	if t == nil {
		m, err := h.make(name.Unshared())
		if err != nil {
			return made{}, err
		}
		if err := h.computeMode(name, nvml.COMPUTEMODE_EXCLUSIVE_PROCESS); err != nil {
			return made{}, err
		}
		t = &together{made: m}
		h.shared[name.String()] = t
	}
	t.holders++
	return made{name: name, of: t}, nil
}

func (h *hardware) fillShare(t *together) error {
	if t.filled {
		return nil
	}
	t.filled = true
	return h.fill(&t.made)
}

func (h *hardware) leaveShare(name device.Name, t *together) error {
	t.holders--
	if t.holders > 0 {
		return nil
	}
	delete(h.shared, name.String())
	if err := h.computeMode(name, nvml.COMPUTEMODE_DEFAULT); err != nil {
		return err
	}
	return h.destroy(t.made)
}

func (h *hardware) computeMode(name device.Name, mode nvml.ComputeMode) error {
	if name.Partition != nil || !h.fractions[name.String()] {
		return nil
	}
	if ret := h.cards[name.GPU].SetComputeMode(mode); ret != nvml.SUCCESS {
		return fmt.Errorf("set the compute mode of %s to %d: %w", name.GPU, mode, ret)
	}
	return nil
}

// memory is what the hardware itself says that a device has. It must be made.
func (h *hardware) memory(m made) (uint64, error) {
	card := h.cards[m.name.GPU]
	if m.of.compute != nil {
		info, ret := m.of.compute.GetInfo()
		if ret != nvml.SUCCESS {
			return 0, fmt.Errorf("read the compute instance of %s: %w", m.name, ret)
		}
		gpuInstance, ret := m.of.instance.GetInfo()
		if ret != nvml.SUCCESS {
			return 0, fmt.Errorf("read the GPU instance of %s: %w", m.name, ret)
		}
		found := false
		most, ret := card.GetMaxMigDeviceCount()
		if ret != nvml.SUCCESS {
			return 0, fmt.Errorf("count the MIG devices of %s: %w", m.name.GPU, ret)
		}
		for i := range most {
			mig, ret := card.GetMigDeviceHandleByIndex(i)
			if ret != nvml.SUCCESS {
				continue
			}
			gi, giRet := mig.GetGpuInstanceId()
			ci, ciRet := mig.GetComputeInstanceId()
			if giRet == nvml.SUCCESS && ciRet == nvml.SUCCESS && gi == int(gpuInstance.Id) && ci == int(info.Id) {
				card, found = mig, true
				break
			}
		}
		if !found {
			return 0, fmt.Errorf("%s has no MIG device", m.name)
		}
	}
	memory, ret := card.GetMemoryInfo()
	if ret != nvml.SUCCESS {
		return 0, fmt.Errorf("read the memory of %s: %w", m.name, ret)
	}
	return memory.Total, nil
}
