// Package claim reads from an allocated ResourceClaim which of the driver's devices it has, for
// which requests, and with which configuration.
//
// It skips results and configurations of other drivers. It decides which configuration applies to
// a result:
//   - The claim's configuration overrides the DeviceClass's.
//   - A later configuration overrides an earlier one.
//   - A configuration that names a request also applies to the request's subrequests.
//
// The package decodes configurations, fills in their defaults and validates them. Results that use
// the same configuration entry form a group.
//
// [Oversized] finds a request that asked for a part of a GPU but got all of it.
//
// The package needs only the claim. It does not know which devices the node has, nor what they
// support.
package claim

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

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

// Read returns the devices of driver that the allocated claim c has, as the scheduler ordered them.
// Its errors name the request or the configuration but not the claim, which the caller adds.
func Read(c *resourceapi.ResourceClaim, driver string) (results []Result, _ error) {
	if c.Status.Allocation == nil {
		return nil, errors.New("the claim is not allocated")
	}
	devices := &c.Status.Allocation.Devices
	configs, err := decode(devices.Config, c.Spec.Devices.Config, driver)
	if err != nil {
		return nil, err
	}
	for i := range devices.Results {
		r := &devices.Results[i]
		if r.Driver != driver {
			continue
		}
		result := Result{
			Request: r.Request, Pool: r.Pool, Device: r.Device, ShareID: r.ShareID,
			AdminAccess: ptr.Deref(r.AdminAccess, false),
		}
		if result.Config, result.Group, err = effectiveConfig(configs, r); err != nil {
			return results, fmt.Errorf("request %s: %w", r.Request, err)
		}
		if len(r.ConsumedCapacity) > 0 {
			result.Capacity = make(map[string]resource.Quantity, len(r.ConsumedCapacity))
		}
		for name, amount := range r.ConsumedCapacity {
			// The name has no domain: the scheduler copies it from this driver's ResourceSlice.
			result.Capacity[string(name)] = amount
		}
		results = append(results, result)
	}
	return results, nil
}

// entry is one configuration entry of the allocation, decoded.
type entry struct {
	v1beta1.Config
	requests  []string
	fromClaim bool
	origin    string // where a user finds the entry, for error messages
	group     int
}

// decode reads every configuration entry for the driver. It also reads entries that apply to no
// result, so that the first Pod with the claim already shows a mistake in them. wanted are the
// entries of the claim's spec.
func decode(
	configs []resourceapi.DeviceAllocationConfiguration, wanted []resourceapi.DeviceClaimConfiguration, driver string,
) ([]entry, error) {
	var entries []entry
	for i := range configs {
		c := configs[i]
		if c.Opaque == nil || c.Opaque.Driver != driver {
			continue
		}
		if len(c.Requests) == 0 && c.Source == resourceapi.AllocationConfigSourceClaim {
			c.Requests = namedRequests(wanted, c.Opaque)
		}
		e := entry{
			requests:  c.Requests,
			fromClaim: c.Source == resourceapi.AllocationConfigSourceClaim,
			origin:    origin(&c),
			group:     groupOf(configs[:i+1], driver),
		}
		config, err := v1beta1.Decode(c.Opaque.Parameters.Raw)
		if err != nil {
			return nil, fmt.Errorf("%s cannot be read: %w", e.origin, err)
		}
		config.Default()
		if err := config.Validate(); err != nil {
			return nil, fmt.Errorf("%s is not valid: %w", e.origin, err)
		}
		e.Config = config
		entries = append(entries, e)
	}
	return entries, nil
}

// namedRequests returns the requests for which the claim's author wrote a configuration that the
// allocation has for all. From Kubernetes 1.37 on, the scheduler clears the names if they are all
// of the claim's.
func namedRequests(wanted []resourceapi.DeviceClaimConfiguration, opaque *resourceapi.OpaqueDeviceConfiguration) (names []string) {
	for _, w := range wanted {
		if w.Opaque == nil || w.Opaque.Driver != opaque.Driver || !bytes.Equal(w.Opaque.Parameters.Raw, opaque.Parameters.Raw) {
			continue
		}
		if len(w.Requests) == 0 {
			return nil
		}
		names = w.Requests
	}
	return names
}

// groupOf returns the group of the last entry in configs, which is normally the entry's index. But
// the scheduler may copy an entry of a DeviceClass once for each request: all copies get the index
// of the first one.
func groupOf(configs []resourceapi.DeviceAllocationConfiguration, driver string) int {
	last := len(configs) - 1
	c := configs[last]
	if c.Source != resourceapi.AllocationConfigSourceClass {
		return last
	}
	return slices.IndexFunc(configs, func(o resourceapi.DeviceAllocationConfiguration) bool {
		return o.Source == c.Source && o.Opaque != nil && o.Opaque.Driver == driver &&
			bytes.Equal(o.Opaque.Parameters.Raw, c.Opaque.Parameters.Raw)
	})
}

// origin describes in words where a user finds the configuration c: in the claim or in the
// DeviceClass, and for which requests.
func origin(c *resourceapi.DeviceAllocationConfiguration) string {
	from := "the claim's configuration"
	if c.Source == resourceapi.AllocationConfigSourceClass {
		from = "the DeviceClass's configuration"
	}
	if len(c.Requests) == 0 {
		return from
	}
	return fmt.Sprintf("%s for request %s", from, strings.Join(c.Requests, ", "))
}

// effectiveConfig returns the configuration that applies to the result r, and its group. Without an
// entry for r that is the default configuration of the device's kind.
func effectiveConfig(entries []entry, r *resourceapi.DeviceRequestAllocationResult) (v1beta1.Config, int, error) {
	name, ok := device.ParseName(r.Device)
	if !ok {
		return nil, NoGroup, nil
	}
	var config v1beta1.Config = &v1beta1.GpuConfig{}
	switch {
	case name.Passthrough:
		config = &v1beta1.VfioDeviceConfig{}
	case name.Partition != nil:
		config = &v1beta1.MigDeviceConfig{}
	}
	var chosen *entry
	for i := range entries {
		e := &entries[i]
		if !e.appliesTo(r.Request) {
			continue
		}
		if e.Kind() != config.Kind() {
			if len(e.requests) == 0 || !e.fromClaim {
				// Without requests, a configuration applies only to devices of its kind and is skipped for
				// others. The same holds for a DeviceClass's configuration, because the scheduler filled in its
				// requests.
				continue
			}
			return nil, NoGroup, fmt.Errorf("%s is a %s, but device %s needs a %s: change its kind, or name another request",
				e.origin, e.Kind(), r.Device, config.Kind())
		}
		if chosen == nil || e.fromClaim || !chosen.fromClaim {
			chosen = e
		}
	}
	if chosen != nil {
		return chosen.Config, chosen.group, nil
	}
	config.Default()
	return config, NoGroup, nil
}

// appliesTo reports whether the entry applies to a request. An entry for request "a" also applies
// to its subrequest "a/b".
func (e *entry) appliesTo(request string) bool {
	if len(e.requests) == 0 || slices.Contains(e.requests, request) {
		return true
	}
	parent, _, isSub := strings.Cut(request, "/")
	return isSub && slices.Contains(e.requests, parent)
}

// memoryRequest is a claim's request for an amount of memory.
type memoryRequest struct {
	class  string
	memory resource.Quantity
}

// Oversized describes the claim's first request for at most half of a GPU's memory that was
// allocated the whole GPU, or returns "". Manifests for NVIDIA's DRA driver with its gate
// consumableShares expect a share for such a request. wholeMemory returns the memory in bytes of
// the GPU that is offered under this name as a whole, or 0 if it is unknown or the device is
// another.
func Oversized(c *resourceapi.ResourceClaim, driver string, wholeMemory func(device string) uint64) string {
	asked := map[string]memoryRequest{} // by the request's name in an allocation result
	add := func(name, class string, capacity *resourceapi.CapacityRequirements) {
		if capacity == nil {
			return
		}
		if memory, ok := capacity.Requests["memory"]; ok {
			asked[name] = memoryRequest{class, memory}
		}
	}
	for _, request := range c.Spec.Devices.Requests {
		if request.Exactly != nil {
			add(request.Name, request.Exactly.DeviceClassName, request.Exactly.Capacity)
		}
		for _, sub := range request.FirstAvailable {
			add(request.Name+"/"+sub.Name, sub.DeviceClassName, sub.Capacity)
		}
	}
	if len(asked) == 0 || c.Status.Allocation == nil {
		return ""
	}
	hint, class, more := "", "", 0
	for _, result := range c.Status.Allocation.Devices.Results {
		request, ok := asked[result.Request]
		if !ok || result.Driver != driver || ptr.Deref(result.AdminAccess, false) {
			continue
		}
		memory := int64(min(wholeMemory(result.Device), math.MaxInt64))
		switch {
		case memory == 0 || request.memory.CmpInt64(memory/2) > 0:
		case hint != "":
			more++
		default:
			class = request.class
			hint = fmt.Sprintf("Request %s asks for %s of memory but got the whole GPU %s with %s",
				result.Request, &request.memory, result.Device, resource.NewQuantity(memory, resource.BinarySI))
		}
	}
	if hint == "" {
		return ""
	}
	if more > 0 {
		hint += fmt.Sprintf(" (the same applies to %d more GPUs of the claim)", more)
	}
	return fmt.Sprintf("%s: class %s gives whole GPUs", hint, class)
}
