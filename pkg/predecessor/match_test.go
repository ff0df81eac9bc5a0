package predecessor

import (
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

func TestClaimMayUseGPU(t *testing.T) {
	all := []nvidia.GPU{
		{GPU: device.GPU{PCIAddress: "0000:1b:00.0", UUID: "GPU-first"}},
		{GPU: device.GPU{PCIAddress: "0000:43:00.0", UUID: "GPU-second", Minor: 1, MIG: &device.MIG{
			Instances: []device.Instance{{Compute: []device.ComputeInstance{{UUID: "MIG-1"}}}},
		}}},
	}
	for name, c := range map[string]struct {
		d    Device
		want int // index of the GPU; -1 means that any GPU may be used
	}{
		"by UUID":                  {Device{Name: "gpu-1", GPUUUID: all[0].UUID}, 0},
		"by PCI address":           {Device{Name: "gpu-vfio-0", PCIBusID: "0000:43:00.0"}, 1},
		"by its partition":         {Device{Name: "x", MIG: &MIG{UUID: "MIG-1"}}, 1},
		"by number, if unfinished": {Device{Name: "gpu-1-mig-1g10gb-19-0"}, 1},
		"a card that is gone":      {Device{Name: "gpu-1", GPUUUID: "GPU-gone"}, -1},
		"a partition that is gone": {Device{Name: "gpu-1-mig-1g10gb-19-0", MIG: &MIG{UUID: "MIG-gone"}}, -1},
		"of an unknown kind":       {Device{}, -1},
	} {
		for i, g := range all {
			want := c.want == i || c.want < 0
			if got := (Claim{Devices: []Device{c.d}}).MayUse(g.GPU, all); got != want {
				t.Errorf("%s: may be on card %d: %v", name, i, got)
			}
		}
	}
}

// A GPU that NVML does not list has no minor number, so a number in a name can be that of any GPU.
func TestUnlistedGPUIsNotMatchedByNumber(t *testing.T) {
	unlisted := []nvidia.GPU{
		{GPU: device.GPU{PCIAddress: "0000:1b:00.0", Passthrough: &device.Passthrough{}}},
		{GPU: device.GPU{PCIAddress: "0000:43:00.0", Passthrough: &device.Passthrough{}}},
	}
	for _, g := range unlisted {
		if !(Claim{Devices: []Device{{Name: "gpu-0"}}}).MayUse(g.GPU, unlisted) {
			t.Errorf("an unfinished claim cannot be on %s", g.PCIAddress)
		}
	}
}
