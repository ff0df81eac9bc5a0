package claim

import (
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
		}
		config, err := v1beta1.Decode(c.Opaque.Parameters.Raw)
		if err != nil {
			return nil, fmt.Errorf("%s cannot be read: %w", e.origin, err)
		}
		config.Default()
		if err := config.Validate(); err != nil {
			return nil, fmt.Errorf("%s is not valid: %s: %w", e.origin, config.Kind(), err)
		}
		e.Config = config
		entries = append(entries, e)
	}
	return entries, nil
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

// effective settles a result's configuration.
func effective(entries []entry, r *resourceapi.DeviceRequestAllocationResult) (v1beta1.Config, error) {
	kind, ok := kindFor(r.Device)
	if !ok {
		return nil, nil
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
			return nil, fmt.Errorf("%s is a %s, but device %s takes a %s: change its kind, or name another request", e.origin, e.Kind(), r.Device, kind)
		}
		if chosen == nil || e.fromClaim || !chosen.fromClaim {
			chosen = e
		}
	}
	if chosen != nil {
		return chosen.Config, nil
	}
	config, err := v1beta1.New(kind)
	if err != nil {
		return nil, err
	}
	config.Default()
	return config, nil
}

// holdsFor says whether the configuration is meant for a request. "a" holds for "a/b".
func (e *entry) holdsFor(request string) bool {
	if len(e.requests) == 0 || slices.Contains(e.requests, request) {
		return true
	}
	parent, _, isSub := strings.Cut(request, "/")
	return isSub && slices.Contains(e.requests, parent)
}
