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

// Allocation is our part of what a claim got.
type Allocation struct {
	UID       types.UID
	Namespace string
	Name      string
	// Results are in the order in which the scheduler wrote them. There are none if the claim got nothing of ours.
	Results []Result
}

// Result is one allocated device.
type Result struct {
	// Request names the request, or "request/subrequest" where the claim gave alternatives.
	Request string
	Pool    string
	Device  string
	// ShareID tells shares of one device apart. It is nil for a device that is held alone.
	ShareID *types.UID
	// Capacity is how much of each of the device's capacities the claim holds, by the capacity's name. It is nil for a device that is held alone.
	Capacity map[string]resource.Quantity
	// AdminAccess marks a device that is looked at, not held: others may hold it.
	AdminAccess bool
	// Config is the effective configuration. It is nil only if the device's name is none that this driver gives.
	Config v1beta1.Config
	// Group is the same for results that take one and the same configuration as it was written. It is [NoGroup] where none was.
	Group int
}

// NoGroup is the group of a result whose configuration nobody wrote.
const NoGroup = -1

// Read picks the driver's part out of an allocated claim. Errors name the request or configuration, not the claim: the caller does.
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
		config, group, err := effective(configs, r)
		if err != nil {
			return a, fmt.Errorf("request %s: %w", r.Request, err)
		}
		a.Results = append(a.Results, Result{
			Request: r.Request, Pool: r.Pool, Device: r.Device, ShareID: r.ShareID,
			AdminAccess: ptr.Deref(r.AdminAccess, false),
			Capacity:    consumed(r.ConsumedCapacity),
			Config:      config,
			Group:       group,
		})
	}
	return a, nil
}

// consumed has the names as slices have them, without a domain: the scheduler repeats those.
func consumed(all map[resourceapi.QualifiedName]resource.Quantity) map[string]resource.Quantity {
	if len(all) == 0 {
		return nil
	}
	by := make(map[string]resource.Quantity, len(all))
	for name, q := range all {
		by[string(name)] = q
	}
	return by
}
