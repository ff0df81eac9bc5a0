package claim

import (
	"errors"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
)

// Allocation is the part of a claim's allocation that belongs to this driver.
type Allocation struct {
	UID       types.UID
	Namespace string
	Name      string
	// Results are in the order that the scheduler wrote. Results is empty if the claim has no device
	// of this driver.
	Results []Result
}

// Result is one device that was allocated to the claim.
type Result struct {
	// Request is the request's name. It is "request/subrequest" if the request lists alternatives
	// (firstAvailable).
	Request string
	Pool    string
	Device  string
	// ShareID tells several shares of one device apart. It is nil for an exclusive device.
	ShareID *types.UID
	// Capacity is how much of each capacity of the device was allocated to the claim. It is nil for an
	// exclusive device.
	Capacity map[string]resource.Quantity
	// AdminAccess means that the claim only observes the device, which other claims may use at the
	// same time.
	AdminAccess bool
	// Config is the configuration that applies to the device, with defaults filled in. It is nil only
	// if this driver does not know the form of the device's name.
	Config v1beta1.Config
	// Group is equal for all results that use the same configuration entry of the claim or
	// DeviceClass. It is [NoGroup] if no entry applies.
	Group int
}

// NoGroup is the group of a result to which no configuration entry applies.
const NoGroup = -1

// Read returns the part of the allocated claim c that belongs to driver. Its errors name the
// request or the configuration but not the claim, which the caller adds.
func Read(c *resourceapi.ResourceClaim, driver string) (Allocation, error) {
	a := Allocation{UID: c.UID, Namespace: c.Namespace, Name: c.Name}
	if c.Status.Allocation == nil {
		return a, errors.New("the claim is not allocated")
	}
	devices := &c.Status.Allocation.Devices
	configs, err := decode(devices.Config, driver)
	if err != nil {
		return a, err
	}
	for i := range devices.Results {
		r := &devices.Results[i]
		if r.Driver != driver {
			continue
		}
		config, group, err := effectiveConfig(configs, r)
		if err != nil {
			return a, fmt.Errorf("request %s: %w", r.Request, err)
		}
		a.Results = append(a.Results, Result{
			Request: r.Request, Pool: r.Pool, Device: r.Device, ShareID: r.ShareID,
			AdminAccess: ptr.Deref(r.AdminAccess, false),
			Capacity:    capacities(r.ConsumedCapacity),
			Config:      config,
			Group:       group,
		})
	}
	return a, nil
}

// capacities converts the capacity names to strings. They have no domain prefix, because the
// scheduler copies the names from the ResourceSlice and this driver writes none there.
func capacities(all map[resourceapi.QualifiedName]resource.Quantity) map[string]resource.Quantity {
	if len(all) == 0 {
		return nil
	}
	by := make(map[string]resource.Quantity, len(all))
	for name, q := range all {
		by[string(name)] = q
	}
	return by
}
