package predecessor

import (
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// MayUse reports whether the claim may use the GPU g or a part of it. all has the node's GPUs. If a
// device of the claim matches none of them, it could be on any GPU, so the answer is true.
func (c Claim) MayUse(g device.GPU, all []nvidia.GPU) bool {
	return slices.ContainsFunc(c.Devices, func(d Device) bool {
		card, known := d.FindGPU(all)
		return !known || card.PCIAddress == g.PCIAddress
	})
}

// DeviceNames returns the names that NVIDIA's DRA driver gave to the claim's devices.
func (c Claim) DeviceNames() []string {
	names := make([]string, len(c.Devices))
	for i, d := range c.Devices {
		names[i] = d.Name
	}
	return names
}

var byMinor = regexp.MustCompile(`^gpu-([0-9]+)(-mig-.*)?$`)

// FindGPU returns the GPU in all that the device belongs to, by GPU UUID, PCI address or MIG UUID.
// A device of an unfinished Prepare has none of these, so the minor number in its name decides. The
// second result is false if no GPU matches.
func (d Device) FindGPU(all []nvidia.GPU) (device.GPU, bool) {
	number := -1
	if m := byMinor.FindStringSubmatch(d.Name); m != nil {
		number, _ = strconv.Atoi(m[1]) // a number that does not fit into an int matches no GPU
	}
	for _, is := range []func(g device.GPU) bool{
		func(g device.GPU) bool { return d.GPUUUID != "" && g.UUID == d.GPUUUID },
		func(g device.GPU) bool { return d.PCIBusID != "" && samePCIAddress(g.PCIAddress, d.PCIBusID) },
		func(g device.GPU) bool { return d.MIG != nil && hasPartition(g, d.MIG.UUID) },
		func(g device.GPU) bool {
			return d.GPUUUID == "" && d.PCIBusID == "" && d.MIG == nil && g.Minor == number && !g.PassthroughOnly()
		},
	} {
		if i := slices.IndexFunc(all, func(g nvidia.GPU) bool { return is(g.GPU) }); i >= 0 {
			return all[i].GPU, true
		}
	}
	return device.GPU{}, false
}

func samePCIAddress(a device.PCIAddress, other string) bool {
	b, err := device.ParsePCIAddress(strings.ToLower(other))
	return err == nil && a == b
}

func hasPartition(g device.GPU, uuid string) bool {
	return uuid != "" && g.MIG != nil && slices.ContainsFunc(g.MIG.Instances, func(in device.Instance) bool {
		return slices.ContainsFunc(in.Compute, func(c device.ComputeInstance) bool { return c.UUID == uuid })
	})
}
