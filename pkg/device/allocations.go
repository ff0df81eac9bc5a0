package device

import "k8s.io/apimachinery/pkg/util/sets"

// Allocations says which devices claims have. Claims with admin access have none, because they take
// nothing from other claims.
type Allocations struct {
	// Exclusive maps each device that one claim has alone to that claim's name or UID.
	Exclusive map[string]string
	// Shared has the names of the devices of which claims have shares. The value is true if MPS limits
	// the memory and compute units of these shares.
	Shared map[string]bool
}

// Names returns the names of all these devices.
func (a Allocations) Names() sets.Set[string] {
	return sets.KeySet(a.Exclusive).Union(sets.KeySet(a.Shared))
}
