package prepare

import (
	"fmt"
	"reflect"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claim"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// checkSharing refuses a sharing strategy or MPS configuration that does not fit the device.
func checkSharing(r claim.Result, name device.Name, strategy v1beta1.SharingStrategy, config *v1beta1.MPSConfig) error {
	refuse := func(format string, args ...any) error {
		return fmt.Errorf("request %s: device %s: "+format, append([]any{r.Request, r.Device}, args...)...)
	}
	if r.AdminAccess && strategy != v1beta1.SharingNone {
		return refuse("sharing.strategy %s: admin access cannot set up sharing: apply the configuration to the other requests only", strategy)
	}
	if !name.Share || r.AdminAccess {
		return nil
	}
	memory, limited := r.Capacity[device.CapacityMemory]
	_, plain := r.Capacity[device.CapacityShares]
	switch {
	case limited == plain:
		return refuse("the allocation does not say how much of the device the claim has: it needs capacity %s or %s, which the scheduler of "+
			"Kubernetes 1.36 or later writes",
			device.CapacityMemory, device.CapacityShares)
	case plain && strategy == v1beta1.SharingMPS:
		return refuse("sharing.strategy %s: a plain share has no limits for MPS to enforce: ask the administrator for fractions", strategy)
	case plain:
		return nil
	case memory.Cmp(minMemory) < 0:
		return refuse("%s of memory is less than MPS can count: ask for %s or more", memory.String(), minMemory.String())
	case strategy == v1beta1.SharingTimeSlicing:
		return refuse("sharing.strategy %s: MPS enforces the limits of a fraction: remove sharing, or ask for a plain share", strategy)
	case config != nil && !reflect.DeepEqual(*config, v1beta1.MPSConfig{}):
		return refuse("sharing.mpsConfig: the claim's capacity sets the limits of a fraction: remove mpsConfig")
	}
	return nil
}

// minMemory is the smallest memory limit that MPS can set, and the unit of its limits.
var minMemory = resource.MustParse("1Mi")
