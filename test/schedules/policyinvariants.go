package schedules

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// check adds a violation for each broken invariant of a policy run. Callers call it after each
// event and each publication.
func (s *policyRun) check() {
	s.checkStaysPublished()
	s.checkExclusion()
	s.checkCounters()
}

// counters returns the counters that each published device consumes, as text by the device's name.
func (s *policyRun) counters() map[string]string {
	counters := map[string]string{}
	if s.scheduler == nil {
		return counters
	}
	for _, slice := range s.scheduler.Slices {
		for _, d := range slice.Spec.Devices {
			var all []string
			for _, c := range d.ConsumesCounters {
				for _, counter := range slices.Sorted(maps.Keys(c.Counters)) {
					amount := c.Counters[counter].Value
					all = append(all, fmt.Sprintf("%s/%s=%s", c.CounterSet, counter, amount.String()))
				}
			}
			counters[d.Name] = strings.Join(all, " ")
		}
	}
	return counters
}

// names lists the names of the published devices. An asterisk follows the name of a device that
// consumes counters.
func (s *policyRun) names() []string {
	counters := s.counters()
	var names []string
	for _, name := range slices.Sorted(maps.Keys(counters)) {
		if counters[name] != "" {
			name += "*"
		}
		names = append(names, name)
	}
	return names
}

// checkStaysPublished adds a violation if an allocated device is no longer published with the
// counters that it had at its allocation. It does nothing while no slices are published, because
// the scheduler cannot allocate then.
func (s *policyRun) checkStaysPublished() {
	if s.scheduler == nil {
		return
	}
	counters := s.counters()
	for _, t := range s.tenants {
		for _, r := range t.held() {
			form, published := counters[r.Device]
			switch {
			case !published:
				s.violates("%s, which claim %s holds, is not published", r.Device, t.Name)
			case form != t.counters[r.Device]:
				s.violates("%s consumes other counters since its allocation to claim %s: %q, and %q before",
					r.Device, t.Name, form, t.counters[r.Device])
			}
		}
	}
}

// checkExclusion adds a violation if two claims hold devices that cannot be in use at the same
// time.
func (s *policyRun) checkExclusion() {
	for i, t := range s.tenants {
		for _, other := range s.tenants[:i] {
			for _, a := range t.held() {
				for _, b := range other.held() {
					if s.excludes(a.Device, b.Device) {
						s.violates("claim %s holds %s, which excludes what claim %s holds: %s", t.Name, a.Device, other.Name, b.Device)
					}
				}
			}
		}
	}
}

// excludes reports whether devices a and b cannot be in use at the same time.
func (s *policyRun) excludes(a, b string) bool {
	x, ok := device.ParseName(a)
	y, too := device.ParseName(b)
	return ok && too && device.Conflict(x, y, device.GPU{MIG: &device.MIG{Profiles: profiles}})
}

// checkCounters adds a violation if all claims together consume more of a counter than is
// published.
func (s *policyRun) checkCounters() {
	if s.scheduler == nil {
		return
	}
	left := map[string]*resource.Quantity{}
	for _, slice := range s.scheduler.Slices {
		for _, set := range slice.Spec.SharedCounters {
			for name, c := range set.Counters {
				left[set.Name+"/"+name] = &c.Value
			}
		}
	}
	counted := map[string]bool{} // a device consumes its counters once, also if several claims share it
	for _, t := range s.tenants {
		for _, r := range t.held() {
			counted[r.Device] = true
		}
	}
	for _, slice := range s.scheduler.Slices {
		for _, d := range slice.Spec.Devices {
			for _, c := range d.ConsumesCounters {
				for name, taken := range c.Counters {
					rest, there := left[c.CounterSet+"/"+name]
					if !there {
						s.violates("%s consumes counter %s of counter set %s, which is not published", d.Name, name, c.CounterSet)
						continue
					}
					if !counted[d.Name] {
						continue
					}
					amount := rest.DeepCopy()
					amount.Sub(taken.Value)
					if left[c.CounterSet+"/"+name] = &amount; amount.Sign() < 0 {
						s.violates("claims exceed counter %s of counter set %s", name, c.CounterSet)
					}
				}
			}
		}
	}
}

// end frees all claims and removes the admin's MIG instances. It then adds a violation if the
// plugin does not publish all devices under the policies static and dynamic.
func (s *policyRun) end() {
	for _, t := range slices.Clone(s.tenants) {
		if s.chance(50) {
			s.prepareTenant(t)
		}
		s.unprepareTenant(t)
	}
	s.note("the admin removes all MIG instances")
	for _, g := range s.gpus {
		for id := range g.adminInstances {
			delete(g.Instances, id)
		}
		clear(g.adminInstances)
		if g.Enabled && !g.modeIsOurs {
			s.adminDisablesMIG(g)
		}
	}
	s.annotate("static", device.PassthroughSettings{Enabled: ptr.To(false)})
	s.letSettle()
	for _, g := range s.gpus {
		if g.Enabled {
			s.violates("%s is left in MIG mode under the policy static", g.name())
		}
	}
	s.checkOffered("static", func(n device.Name) bool { return n.Partition == nil && !n.Passthrough })
	s.annotate("dynamic", device.PassthroughSettings{Enabled: ptr.To(true)})
	s.letSettle()
	s.checkOffered("dynamic", func(device.Name) bool { return true })
}

// letSettle gives the plugin three minutes in which it publishes and reconciles, while nothing else
// happens.
func (s *policyRun) letSettle() {
	for range 3 {
		wait(context.Background(), time.Minute)
		s.publish()
		s.reconcile()
	}
	s.publish()
}

// checkOffered adds a violation unless the published devices are exactly those for which the
// parameter wanted returns true, and unless they consume counters only if some of them overlap.
func (s *policyRun) checkOffered(policy string, wanted func(device.Name) bool) {
	counters := s.counters()
	overlap := false
	for index, g := range s.snapshot.Node.GPUs {
		for _, name := range g.DeviceNames() {
			n, _ := device.ParseName(name)
			want := wanted(n)
			if n.Share {
				want = want && s.shares.For(g.GPU, profileOf(n), index).Offered()
			}
			if _, there := counters[name]; there != want {
				s.violates("under the policy %s, device %s is published: %t; want the opposite", policy, name, there)
			}
			overlap = overlap || want && (n.Share || n.Partition != nil || n.Passthrough)
		}
	}
	for name, form := range counters {
		if (form != "") != overlap {
			s.violates("under the policy %s, device %s consumes the counters %q; want counters only if devices overlap", policy, name, form)
		}
	}
}

func profileOf(n device.Name) string {
	if n.Partition == nil {
		return ""
	}
	p, _ := device.GPU{MIG: &device.MIG{Profiles: profiles}}.Profile(n.Partition.ProfileID)
	return p.Name
}
