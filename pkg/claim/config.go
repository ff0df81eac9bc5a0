package claim

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
)

// entry is one configuration with where it came from.
type entry struct {
	v1beta1.Config
	requests  []string
	fromClaim bool
	origin    string // for messages
	group     int
}

// decode reads every configuration that is meant for the driver, whether or not it will apply: a mistake is best found at the first Pod.
func decode(configs []resourceapi.DeviceAllocationConfiguration, driver string) ([]entry, error) {
	var entries []entry
	for i := range configs {
		c := &configs[i]
		if c.Opaque == nil || c.Opaque.Driver != driver {
			continue
		}
		e := entry{
			requests:  c.Requests,
			fromClaim: c.Source == resourceapi.AllocationConfigSourceClaim,
			origin:    origin(c),
			group:     group(configs[:i+1], driver),
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

// group is the number of the last of the configurations. One of a class may stand in the claim for each request anew: these are one that was written.
func group(configs []resourceapi.DeviceAllocationConfiguration, driver string) int {
	last := len(configs) - 1
	c := configs[last]
	if c.Source != resourceapi.AllocationConfigSourceClass {
		return last
	}
	return slices.IndexFunc(configs, func(o resourceapi.DeviceAllocationConfiguration) bool {
		return o.Source == c.Source && o.Opaque != nil && o.Opaque.Driver == driver && bytes.Equal(o.Opaque.Parameters.Raw, c.Opaque.Parameters.Raw)
	})
}

// origin says where a user finds a configuration. The API server's list of an allocation has no place in what users write, so requests identify it.
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

// effective settles a result's configuration and its group.
func effective(entries []entry, r *resourceapi.DeviceRequestAllocationResult) (v1beta1.Config, int, error) {
	kind, ok := kindFor(r.Device)
	if !ok {
		return nil, NoGroup, nil
	}
	var chosen *entry
	for i := range entries {
		e := &entries[i]
		if !e.holdsFor(r.Request) {
			continue
		}
		if e.Kind() != kind {
			if len(e.requests) == 0 || !e.fromClaim {
				// Said of all devices, it is for those of its kind. A class is written without knowing the requests: the scheduler puts
				// their names into its entries, so the names say nothing about what the author meant.
				continue
			}
			return nil, NoGroup, fmt.Errorf("%s is a %s, but device %s takes a %s: change its kind, or name another request", e.origin, e.Kind(), r.Device, kind)
		}
		if chosen == nil || e.fromClaim || !chosen.fromClaim {
			chosen = e
		}
	}
	if chosen != nil {
		return chosen.Config, chosen.group, nil
	}
	config, err := v1beta1.New(kind)
	if err != nil {
		return nil, NoGroup, err
	}
	config.Default()
	return config, NoGroup, nil
}

// holdsFor says whether the configuration is meant for a request. "a" holds for "a/b".
func (e *entry) holdsFor(request string) bool {
	if len(e.requests) == 0 || slices.Contains(e.requests, request) {
		return true
	}
	parent, _, isSub := strings.Cut(request, "/")
	return isSub && slices.Contains(e.requests, parent)
}
