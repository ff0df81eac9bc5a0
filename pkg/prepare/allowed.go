package prepare

import (
	"fmt"
	"reflect"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claim"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// isFraction says whether the result is a share with limits: MPS holds it to its part of the memory. One that counts shares is promised nothing.
func isFraction(r claim.Result, name device.Name) bool {
	_, memory := r.Capacity[device.CapacityMemory]
	return name.Share && memory && !r.AdminAccess
}

// ofKind refuses configuration of another kind than the device's.
func ofKind(r claim.Result, name device.Name) error {
	switch r.Config.(type) {
	case nil:
		return fmt.Errorf("request %s: no configuration is known for device %s", r.Request, r.Device)
	case *v1beta1.GpuConfig:
		if name.Partition == nil {
			return nil
		}
	case *v1beta1.MigDeviceConfig:
		if name.Partition != nil {
			return nil
		}
	}
	if name.Partition != nil {
		return fmt.Errorf("request %s: device %s is a MIG device, which takes a MigDeviceConfig, not a %s", r.Request, r.Device, r.Config.Kind())
	}
	return fmt.Errorf("request %s: device %s is a whole GPU, which takes a GpuConfig, not a %s", r.Request, r.Device, r.Config.Kind())
}

// allowed refuses ways of sharing that the device is not for.
func allowed(r claim.Result, name device.Name, strategy v1beta1.SharingStrategy, config *v1beta1.MPSConfig) error {
	refuse := func(format string, args ...any) error {
		return fmt.Errorf("request %s: device %s: "+format, append([]any{r.Request, r.Device}, args...)...)
	}
	if r.AdminAccess && strategy != v1beta1.SharingNone {
		return refuse("sharing.strategy %s: admin access holds nothing, so nothing is set up for it: write the configuration for the other requests", strategy)
	}
	if !name.Share || r.AdminAccess {
		return nil
	}
	memory, limited := r.Capacity[device.CapacityMemory]
	_, plain := r.Capacity[device.CapacityShares]
	switch {
	case limited == plain:
		return refuse("the allocation does not say how much of it the claim holds: it needs the capacity %s or %s, which the scheduler of Kubernetes 1.36 or later writes", device.CapacityMemory, device.CapacityShares)
	case plain && strategy == v1beta1.SharingMPS:
		return refuse("sharing.strategy %s: a plain share has no limits that MPS could keep: ask the administrator for fractions", strategy)
	case plain:
		return nil
	case memory.Cmp(leastMemory) < 0:
		return refuse("%s of memory are less than MPS can count: ask for %s or more", memory.String(), leastMemory.String())
	case strategy == v1beta1.SharingTimeSlicing:
		return refuse("sharing.strategy %s: a fraction is kept to its limits by MPS: remove sharing, or ask for a plain share", strategy)
	case config != nil && !reflect.DeepEqual(*config, v1beta1.MPSConfig{}):
		return refuse("sharing.mpsConfig: the limits of a fraction are what the claim's capacity asks for: remove mpsConfig")
	}
	return nil
}

// leastMemory is what MPS counts in.
var leastMemory = resource.MustParse("1Mi")
