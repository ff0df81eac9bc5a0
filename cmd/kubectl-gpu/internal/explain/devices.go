package explain

import (
	"context"
	"errors"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
)

// poolOnNode is a pool as a node sees it: its newest generation.
type poolOnNode struct {
	id      pool
	devices []*resourceapi.Device
	// free has what is left of each counter, by counter set. users has the claims that use a counter.
	free  map[string]map[string]resource.Quantity
	users map[string]map[string][]*resourceapi.ResourceClaim
	// have and want are the numbers of slices that are there, and that the pool has.
	have, want int64
	holders    map[string][]fleet.Holder
}

// poolsOn returns the pools that have devices for the node.
func (e *Explainer) poolsOn(node *corev1.Node) []*poolOnNode {
	slicesOf := map[pool][]*resourceapi.ResourceSlice{}
	var order []pool
	for _, slice := range e.slicesFor(node.Name) {
		spec := &slice.Spec
		if !ptr.Deref(spec.PerDeviceNodeSelection, false) {
			ok, err := structured.NodeMatches(e.features, node, ptr.Deref(spec.NodeName, ""), ptr.Deref(spec.AllNodes, false), spec.NodeSelector)
			if err != nil || !ok {
				continue
			}
		}
		if !e.features.PartitionableDevices && len(spec.SharedCounters) > 0 {
			continue
		}
		p := pool{spec.Driver, spec.Pool.Name}
		if slicesOf[p] == nil {
			order = append(order, p)
		}
		slicesOf[p] = append(slicesOf[p], slice)
	}
	var all []*poolOnNode
	for _, id := range order {
		all = append(all, e.poolOf(id, fleet.Newest(slicesOf[id]), node))
	}
	return all
}

func (e *Explainer) poolOf(id pool, all []*resourceapi.ResourceSlice, node *corev1.Node) *poolOnNode {
	p := &poolOnNode{
		id: id, free: map[string]map[string]resource.Quantity{}, users: map[string]map[string][]*resourceapi.ResourceClaim{},
		have: int64(len(all)), want: all[0].Spec.Pool.ResourceSliceCount, holders: e.holders[id],
	}
	var devices []*resourceapi.Device
	for _, slice := range all {
		for _, set := range slice.Spec.SharedCounters {
			p.free[set.Name], p.users[set.Name] = map[string]resource.Quantity{}, map[string][]*resourceapi.ResourceClaim{}
			for name, c := range set.Counters {
				p.free[set.Name][name] = c.Value.DeepCopy()
			}
		}
		for i := range slice.Spec.Devices {
			d := &slice.Spec.Devices[i]
			devices = append(devices, d)
			if ptr.Deref(slice.Spec.PerDeviceNodeSelection, false) {
				ok, err := structured.NodeMatches(e.features, node, ptr.Deref(d.NodeName, ""), ptr.Deref(d.AllNodes, false), d.NodeSelector)
				if err != nil || !ok {
					continue
				}
			}
			p.devices = append(p.devices, d)
		}
	}
	for _, d := range devices {
		holders := p.holders[d.Name]
		if len(holders) == 0 {
			continue
		}
		for _, consumed := range d.ConsumesCounters {
			for name, c := range consumed.Counters {
				if left, ok := p.free[consumed.CounterSet][name]; ok {
					left.Sub(c.Value)
					p.free[consumed.CounterSet][name] = left
					for _, h := range holders {
						p.users[consumed.CounterSet][name] = append(p.users[consumed.CounterSet][name], h.Claim)
					}
				}
			}
		}
	}
	return p
}

// fate is why one device does not serve a request, or that it does.
type fate struct {
	pool   *poolOnNode
	device *resourceapi.Device
	// selector is the first selector that the device fails, and failure an error of that selector.
	selector, class string
	failure         error
	// holders hold the device itself, counters are those that are short, users hold these.
	holders  []*resourceapi.ResourceClaim
	counters []string
	users    []*resourceapi.ResourceClaim
	taints   []resourceapi.DeviceTaint
	// capacity is the capacity that is short: wanted and left.
	capacity     string
	wanted, left resource.Quantity
	gateOff      string
}

func (f fate) matches() bool { return f.selector == "" }

func (f fate) free() bool {
	return f.matches() && len(f.holders) == 0 && len(f.counters) == 0 && len(f.taints) == 0 && f.capacity == "" && f.gateOff == ""
}

// fates looks at each device of the node for one request.
func (e *Explainer) fates(ctx context.Context, pools []*poolOnNode, r request) []fate {
	n := 0
	for _, p := range pools {
		n += len(p.devices)
	}
	all := make([]fate, 0, n)
	f := r.fields()
	var classSelectors []resourceapi.DeviceSelector
	if class := e.s.Class(*f.class); class != nil {
		classSelectors = class.Spec.Selectors
	}
	for _, p := range pools {
		for _, d := range p.devices {
			one := fate{pool: p, device: d}
			if one.selector, one.failure = e.failing(ctx, p.id, d, classSelectors); one.selector != "" {
				one.class = *f.class
			} else {
				one.selector, one.failure = e.failing(ctx, p.id, d, *f.selectors)
			}
			if one.matches() {
				e.judge(&one, f)
			}
			all = append(all, one)
		}
	}
	return all
}

// failing returns the first selector that the device does not match, and the selector's error.
func (e *Explainer) failing(ctx context.Context, p pool, d *resourceapi.Device, all []resourceapi.DeviceSelector) (string, error) {
	for _, s := range all {
		if s.CEL == nil {
			return "(unknown)", errors.New("the selector has a form that this program does not know")
		}
		compiled := e.cache.GetOrCompile(s.CEL.Expression)
		if compiled.Error != nil {
			return s.CEL.Expression, compiled.Error
		}
		ok, _, err := compiled.DeviceMatches(ctx, cel.Device{
			Driver: p.driver, AllowMultipleAllocations: d.AllowMultipleAllocations, Attributes: d.Attributes, Capacity: d.Capacity,
		})
		if err != nil || !ok {
			return s.CEL.Expression, err
		}
	}
	return "", nil
}

// judge finds out why a device that matches the request's selectors is not free for it.
func (e *Explainer) judge(f *fate, r fields) {
	d := f.device
	shared := ptr.Deref(d.AllowMultipleAllocations, false) && e.features.ConsumableCapacity
	holders := f.pool.holders[d.Name]
	if !shared && !r.adminAccess {
		for _, h := range holders {
			f.holders = append(f.holders, h.Claim)
		}
	}
	if len(d.ConsumesCounters) > 0 && !e.features.PartitionableDevices {
		f.gateOff = fleet.GatePartitions
	}
	if len(d.BindingConditions) > 0 && !e.features.DeviceBindingAndStatus {
		f.gateOff = fleet.GateBindingConditions
	}
	if e.features.DeviceTaints {
		for _, t := range d.Taints {
			if t.Effect != resourceapi.DeviceTaintEffectNone && !tolerated(t, *r.tolerations) {
				f.taints = append(f.taints, t)
			}
		}
	}
	// A share of a device that is already shared takes no more counters.
	if !shared || len(holders) == 0 {
		f.shortCounters()
	}
	f.shortCapacity(r, shared)
}

func tolerated(t resourceapi.DeviceTaint, all []resourceapi.DeviceToleration) bool {
	return slices.ContainsFunc(all, func(o resourceapi.DeviceToleration) bool { return resourceclaim.ToleratesTaint(o, t) })
}

// shortCounters finds the counters that are short, and who uses them. The driver's counter for
// memory is left out if another one is short: with memory slices it never limits alone.
func (f *fate) shortCounters() {
	for _, consumed := range f.device.ConsumesCounters {
		for name, c := range consumed.Counters {
			left, known := f.pool.free[consumed.CounterSet][name]
			if known && c.Value.Cmp(left) > 0 {
				f.counters = append(f.counters, name)
			}
		}
	}
	if len(f.counters) > 1 {
		f.counters = slices.DeleteFunc(f.counters, func(name string) bool { return name == "memory" })
	}
	slices.Sort(f.counters)
	for _, consumed := range f.device.ConsumesCounters {
		for _, name := range f.counters {
			f.users = append(f.users, f.pool.users[consumed.CounterSet][name]...)
		}
	}
}

// shortCapacity compares the requested capacity with what the device has left. The allocator rounds
// requests up by the device's policy, and so does this function.
func (f *fate) shortCapacity(r fields, shared bool) {
	requested := map[resourceapi.QualifiedName]resource.Quantity{}
	if *r.capacity != nil {
		requested = (*r.capacity).Requests
	}
	for name := range requested {
		if _, has := f.device.Capacity[name]; !has {
			f.capacity, f.wanted = string(name), requested[name]
			return
		}
	}
	names := make([]string, 0, len(f.device.Capacity))
	for name := range f.device.Capacity {
		names = append(names, string(name))
	}
	slices.Sort(names)
	for _, name := range names {
		c := f.device.Capacity[resourceapi.QualifiedName(name)]
		want, asked := requested[resourceapi.QualifiedName(name)]
		left := c.Value.DeepCopy()
		if shared {
			if !asked {
				want = c.Value
				if c.RequestPolicy != nil && c.RequestPolicy.Default != nil {
					want = *c.RequestPolicy.Default
				}
			}
			want = roundUp(want, c.RequestPolicy)
			for _, h := range f.pool.holders[f.device.Name] {
				left.Sub(h.Result.ConsumedCapacity[resourceapi.QualifiedName(name)])
			}
		} else if !asked {
			continue
		}
		if want.Cmp(left) > 0 {
			f.capacity, f.wanted, f.left = name, want, left
			if shared {
				for _, h := range f.pool.holders[f.device.Name] {
					f.users = append(f.users, h.Claim)
				}
			}
			return
		}
	}
}

// roundUp returns what the allocator gives to a claim that asks for q.
func roundUp(q resource.Quantity, p *resourceapi.CapacityRequestPolicy) resource.Quantity {
	if p == nil || p.ValidRange == nil {
		return q
	}
	least := ptr.Deref(p.ValidRange.Min, resource.Quantity{})
	if q.Cmp(least) <= 0 {
		return least
	}
	step := ptr.Deref(p.ValidRange.Step, resource.Quantity{})
	if n := step.Value(); n > 0 {
		if over := (q.Value() - least.Value()) % n; over > 0 {
			return *resource.NewQuantity(q.Value()+n-over, q.Format)
		}
	}
	return q
}

// attribute returns a device's attribute as text.
func attribute(p pool, d *resourceapi.Device, name resourceapi.FullyQualifiedName) (string, bool) {
	a, ok := d.Attributes[resourceapi.QualifiedName(name)]
	if !ok {
		domain, rest, _ := strings.Cut(string(name), "/")
		if domain != p.driver {
			return "", false
		}
		if a, ok = d.Attributes[resourceapi.QualifiedName(rest)]; !ok {
			return "", false
		}
	}
	return attributeText(a), true
}
