package explain

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// Kind is the kind of a change.
type Kind string

const (
	// Free ends a claim that holds devices.
	Free Kind = "free"
	// Tolerate adds a toleration for a device's taint to a request.
	Tolerate Kind = "tolerate"
	// RepairNode makes a node ready that is not. The taint of such a node counts as tolerated.
	RepairNode Kind = "repair-node"
	// AskLess lowers the number of devices of a request.
	AskLess Kind = "ask-less"
	// AskOther asks for another kind of device.
	AskOther Kind = "ask-other"
	// AskCapacity lowers the capacity that a request asks of a shared device.
	AskCapacity Kind = "ask-capacity"
	// DropSelector removes a selector of a request.
	DropSelector Kind = "drop-selector"
	// DropConstraint removes a constraint of a claim.
	DropConstraint Kind = "drop-constraint"
	// OpenNode removes what keeps the Pod from the node, such as a cordon.
	OpenNode Kind = "open-node"
)

// Change is one part of a remedy. Which fields are set depends on its kind.
type Change struct {
	Kind     Kind   `json:"kind"`
	Sentence string `json:"sentence"`
	// Claim is the claim to end, or the claim to change, as "namespace/name".
	Claim string `json:"claim,omitempty"`
	// Request is "request" or "request/subrequest" of the claim to change.
	Request  string                   `json:"request,omitempty"`
	Taint    *resourceapi.DeviceTaint `json:"taint,omitempty"`
	Count    int64                    `json:"count,omitempty"`
	Class    string                   `json:"class,omitempty"`
	Selector string                   `json:"selector,omitempty"`
	// Constraint is the index of the constraint to remove.
	Constraint int                `json:"constraint,omitempty"`
	Capacity   string             `json:"capacity,omitempty"`
	Amount     *resource.Quantity `json:"amount,omitempty"`
	// NodeReason is the code of the reason that keeps the Pod from the node.
	NodeReason string `json:"nodeReason,omitempty"`

	uid types.UID // of the claim to end
}

// scenario is a question to the allocator for one node: the claims to allocate, and what is
// different from the snapshot.
type scenario struct {
	claims []*resourceapi.ResourceClaim
	freed  map[types.UID]bool
	opened map[string]bool
}

// with returns a scenario with the changes. The scenario s stays as it is.
func (s scenario) with(changes ...Change) scenario {
	n := scenario{claims: slices.Clone(s.claims), freed: map[types.UID]bool{}, opened: map[string]bool{}}
	for uid := range s.freed {
		n.freed[uid] = true
	}
	for code := range s.opened {
		n.opened[code] = true
	}
	for _, c := range changes {
		switch c.Kind {
		case Free:
			n.freed[c.uid] = true
		case OpenNode:
			n.opened[c.NodeReason] = true
		default:
			for i, claim := range n.claims {
				if key(claim) == c.Claim {
					changed := claim.DeepCopy()
					c.ApplyTo(&changed.Spec.Devices)
					n.claims[i] = changed
				}
			}
		}
	}
	return n
}

// ApplyTo makes a change of a claim's specification. Changes of kind Free and OpenNode are not
// changes of a specification, and do nothing.
func (c Change) ApplyTo(spec *resourceapi.DeviceClaim) {
	if c.Kind == DropConstraint {
		if c.Constraint < len(spec.Constraints) {
			// An empty list of requests would mean all requests. So the constraint gets a request that does
			// not exist, and the indexes of the others stay.
			spec.Constraints[c.Constraint].Requests = []string{"-"}
		}
		return
	}
	for i := range spec.Requests {
		r := request{of: &spec.Requests[i]}
		if len(r.of.FirstAvailable) == 0 {
			if r.name() == c.Request {
				c.applyTo(r)
			}
			continue
		}
		for j := range r.of.FirstAvailable {
			sub := request{of: r.of, sub: &r.of.FirstAvailable[j]}
			if sub.name() == c.Request {
				c.applyTo(sub)
			}
		}
	}
}

func (c Change) applyTo(r request) {
	f := r.fields()
	switch c.Kind {
	case Tolerate, RepairNode:
		*f.tolerations = append(*f.tolerations, resourceapi.DeviceToleration{
			Key: c.Taint.Key, Operator: resourceapi.DeviceTolerationOpEqual, Value: c.Taint.Value, Effect: c.Taint.Effect,
		})
	case AskLess:
		*f.mode, *f.count = resourceapi.DeviceAllocationModeExactCount, c.Count
	case AskOther:
		*f.class = c.Class
		*f.selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: c.Selector}}}
	case AskCapacity:
		(*f.capacity).Requests[resourceapi.QualifiedName(c.Capacity)] = *c.Amount
	case DropSelector:
		*f.selectors = slices.DeleteFunc(*f.selectors, func(s resourceapi.DeviceSelector) bool {
			return s.CEL != nil && s.CEL.Expression == c.Selector
		})
	}
}

// request is a request, or one alternative of a prioritized list.
type request struct {
	of  *resourceapi.DeviceRequest
	sub *resourceapi.DeviceSubRequest
}

// fields are the fields that both kinds of request have.
type fields struct {
	class       *string
	selectors   *[]resourceapi.DeviceSelector
	mode        *resourceapi.DeviceAllocationMode
	count       *int64
	tolerations *[]resourceapi.DeviceToleration
	capacity    **resourceapi.CapacityRequirements
	adminAccess bool
}

func (r request) fields() fields {
	if s := r.sub; s != nil {
		return fields{&s.DeviceClassName, &s.Selectors, &s.AllocationMode, &s.Count, &s.Tolerations, &s.Capacity, false}
	}
	e := r.of.Exactly
	return fields{&e.DeviceClassName, &e.Selectors, &e.AllocationMode, &e.Count, &e.Tolerations, &e.Capacity, ptr.Deref(e.AdminAccess, false)}
}

func (r request) name() string {
	if r.sub != nil {
		return r.of.Name + "/" + r.sub.Name
	}
	return r.of.Name
}

// requestsOf returns the claim's requests. A prioritized list gives one for each alternative. A
// request of an unknown form is an error.
func requestsOf(c *resourceapi.ResourceClaim) ([]request, error) {
	var all []request
	for i := range c.Spec.Devices.Requests {
		of := &c.Spec.Devices.Requests[i]
		if of.Exactly == nil && len(of.FirstAvailable) == 0 {
			return nil, fmt.Errorf("claim %s: request %s has a form that this program does not know", key(c), of.Name)
		}
		if of.Exactly != nil {
			all = append(all, request{of: of})
		}
		for j := range of.FirstAvailable {
			all = append(all, request{of: of, sub: &of.FirstAvailable[j]})
		}
	}
	return all, nil
}
