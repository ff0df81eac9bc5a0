package allocation

import (
	"fmt"
	"maps"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// shareRules are sharing rules. Claims share the first GPU and all partitions 3g through MPS with
// limited parts of memory and compute, and the second GPU and all partitions 1g without limits.
// Each other device is for one claim alone.
const shareRules = "[{kind: fractions}, {index: 1, kind: shares, count: 2}, " +
	"{profile: '1g*', kind: shares, count: 3}, {profile: '3g*', kind: fractions}]"

// amounts maps the name of a capacity, such as memory, to a quantity of it.
type amounts map[resourceapi.QualifiedName]resource.Quantity

// accounts has, for each shared device, the capacity in the published slices and the sum of what
// its claims hold.
type accounts struct {
	published map[string]map[resourceapi.QualifiedName]resourceapi.DeviceCapacity
	held      map[string]amounts
}

func newBooks(slices []*resourceapi.ResourceSlice) accounts {
	b := accounts{map[string]map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{}, map[string]amounts{}}
	for _, s := range slices {
		for _, d := range s.Spec.Devices {
			if d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations {
				b.published[d.Name] = d.Capacity
			}
		}
	}
	return b
}

// consumes returns how much of each capacity a request takes from the shared device with this name:
// the requested or default quantity, rounded up by the request policy. It returns false if the
// device lacks a requested capacity.
func (b accounts) consumes(name string, asked amounts) (amounts, bool) {
	all := b.published[name]
	for capacity := range asked {
		if _, has := all[capacity]; !has {
			return nil, false
		}
	}
	gets := amounts{}
	for capacity, c := range all {
		q, requested := asked[capacity]
		if !requested {
			q = *c.RequestPolicy.Default
		}
		step, least := c.RequestPolicy.ValidRange.Step.Value(), c.RequestPolicy.ValidRange.Min.Value()
		n := max(q.Value(), least)
		n = least + (n-least+step-1)/step*step
		gets[capacity] = *resource.NewQuantity(n, resource.BinarySI)
	}
	return gets, true
}

// take adds the quantities in gets to the sum that claims hold of the shared device with this name.
// If the device has too little left, take changes nothing and returns false.
func (b accounts) take(name string, gets amounts) bool {
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

func (b accounts) release(name string, gets amounts) {
	for capacity, q := range gets {
		n := b.held[name][capacity]
		n.Sub(q)
		b.held[name][capacity] = n
	}
}

func same(a, b amounts) bool {
	return maps.EqualFunc(a, b, func(x, y resource.Quantity) bool { return x.Cmp(y) == 0 })
}

// sharedDevice is a device that claims share. The first claim creates the device and the last claim
// destroys it.
type sharedDevice struct {
	made
	holders int
	filled  bool
}

// createShare counts one more claim of a shared device, and creates the device for the first one. A
// whole GPU that claims share through MPS gets the exclusive compute mode, because the driver sets
// it for MPS too.
func (h *hardware) createShare(name device.Name) (made, error) {
	t := h.shared[name.String()]
	if t == nil {
		m, err := h.create(name.Unshared())
		if err != nil {
			return made{}, err
		}
		if err := h.computeMode(name, nvml.COMPUTEMODE_EXCLUSIVE_PROCESS); err != nil {
			return made{}, err
		}
		t = &sharedDevice{made: m}
		h.shared[name.String()] = t
	}
	t.holders++
	return made{name: name, of: t}, nil
}

func (h *hardware) fillShare(t *sharedDevice) error {
	if t.filled {
		return nil
	}
	t.filled = true
	return h.fill(&t.made)
}

func (h *hardware) leaveShare(name device.Name, t *sharedDevice) error {
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

// memory returns the memory of the shared device to which a share belongs, as the simulated library
// reports it.
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
