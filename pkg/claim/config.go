package claim

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
)

// entry is one configuration entry of the allocation, decoded.
type entry struct {
	v1beta1.Config
	requests  []string
	fromClaim bool
	origin    string // where a user finds the entry, for error messages
	group     int
}

// decode reads every configuration entry for the driver. It also reads entries that apply to no
// result, so that the first Pod with the claim already shows a mistake in them.
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

// effectiveConfig returns the configuration that applies to the result r, and its group.
func effectiveConfig(entries []entry, r *resourceapi.DeviceRequestAllocationResult) (v1beta1.Config, int, error) {
	kind, ok := configKindFor(r.Device)
	if !ok {
		return nil, NoGroup, nil
	}
	var chosen *entry
	for i := range entries {
		e := &entries[i]
		if !e.appliesTo(r.Request) {
			continue
		}
		if e.Kind() != kind {
			if len(e.requests) == 0 || !e.fromClaim {
				// Without requests, a configuration applies only to devices of its kind and is skipped for
				// others. The same holds for a DeviceClass's configuration, because the scheduler filled in its
				// requests.
				continue
			}
			return nil, NoGroup, fmt.Errorf("%s is a %s, but device %s needs a %s: change its kind, or name another request", e.origin, e.Kind(),
				r.Device, kind)
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

// appliesTo reports whether the entry applies to a request. An entry for request "a" also applies
// to its subrequest "a/b".
func (e *entry) appliesTo(request string) bool {
	if len(e.requests) == 0 || slices.Contains(e.requests, request) {
		return true
	}
	parent, _, isSub := strings.Cut(request, "/")
	return isSub && slices.Contains(e.requests, parent)
}
