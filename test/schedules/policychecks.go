package schedules

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// check looks at what must hold after each act and each publication.
func (s *sequence) check() {
	s.staysPublished()
	s.excluded()
	s.inCounters()
}

// forms are the counters that each published device consumes.
func (s *sequence) forms() map[string]string {
	forms := map[string]string{}
	if s.scheduler == nil {
		return forms
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
			forms[d.Name] = strings.Join(all, " ")
		}
	}
	return forms
}

// names are the devices that are published, those that consume counters with a mark.
func (s *sequence) names() []string {
	forms := s.forms()
	var names []string
	for _, name := range slices.Sorted(maps.Keys(forms)) {
		if forms[name] != "" {
			name += "*"
		}
		names = append(names, name)
	}
	return names
}

// staysPublished makes sure that each allocated device is published, and consumes what it did when
// it was allocated. While there are no slices nothing is allocated either.
func (s *sequence) staysPublished() {
	if s.scheduler == nil {
		return
	}
	forms := s.forms()
	for _, t := range s.tenants {
		for _, r := range t.held() {
			form, published := forms[r.Device]
			switch {
			case !published:
				s.breaks("%s is not published, which claim %s holds", r.Device, t.Name)
			case form != t.forms[r.Device]:
				s.breaks("%s consumes other counters since claim %s was allocated it: %q, and %q before", r.Device, t.Name, form, t.forms[r.Device])
			}
		}
	}
}

// excluded makes sure that no two claims hold what the hardware cannot hold at once.
func (s *sequence) excluded() {
	for i, t := range s.tenants {
		for _, other := range s.tenants[:i] {
			for _, a := range t.held() {
				for _, b := range other.held() {
					if s.excludes(a.Device, b.Device) {
						s.breaks("claim %s holds %s, and claim %s holds %s", t.Name, a.Device, other.Name, b.Device)
					}
				}
			}
		}
	}
}

// excludes says whether the hardware cannot hold both devices at once.
func (s *sequence) excludes(a, b string) bool {
	x, ok := device.ParseName(a)
	y, too := device.ParseName(b)
	return ok && too && device.Conflict(x, y, device.GPU{MIG: &device.MIG{Profiles: profiles}})
}

// inCounters makes sure that claims consume no more of a counter than there is.
func (s *sequence) inCounters() {
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
	counted := map[string]bool{} // a device that is shared is taken once
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
						s.breaks("%s consumes %s of %s, which is not published", d.Name, name, c.CounterSet)
						continue
					}
					if !counted[d.Name] {
						continue
					}
					amount := rest.DeepCopy()
					amount.Sub(taken.Value)
					if left[c.CounterSet+"/"+name] = &amount; amount.Sign() < 0 {
						s.breaks("claims consume more of %s of %s than there is", name, c.CounterSet)
					}
				}
			}
		}
	}
}

// end ends all claims, and looks what is offered under each policy then.
func (s *sequence) end() {
	for _, t := range slices.Clone(s.tenants) {
		if s.chance(50) {
			s.prepareTenant(t)
		}
		s.leave(t)
	}
	s.note("the admin removes what is theirs")
	for _, g := range s.gpus {
		for id := range g.theirs {
			delete(g.instances, id)
		}
		clear(g.theirs)
		if g.on && !g.ours {
			s.adminTurnsModeOff(g)
		}
	}
	s.annotated = "static"
	s.note("the Node's annotation says %q", s.annotated)
	s.follow()
	s.settled()
	for _, g := range s.gpus {
		if g.on {
			s.breaks("%s is left in MIG mode under the policy static", g.name())
		}
	}
	s.offers("static", func(n device.Name) bool { return n.Partition == nil })
	s.annotated = "dynamic"
	s.note("the Node's annotation says %q", s.annotated)
	s.follow()
	s.settled()
	s.offers("dynamic", func(device.Name) bool { return true })
}

// settled is what comes about by itself while nothing happens.
func (s *sequence) settled() {
	for range 3 {
		wait(context.Background(), time.Minute)
		s.publish()
		s.compareAll()
	}
	s.publish()
}

// offers makes sure that all devices of these names are offered, and no others. Counters are there
// only where shapes overlap.
func (s *sequence) offers(policy string, wanted func(device.Name) bool) {
	forms := s.forms()
	overlap := false
	for index, g := range s.snapshot.Node.GPUs {
		for _, name := range g.DeviceNames() {
			n, _ := device.ParseName(name)
			want := wanted(n)
			if n.Share {
				want = want && s.shares.For(g.GPU, profileOf(n), index).Offered()
			}
			if _, there := forms[name]; there != want {
				s.breaks("under the policy %s, %s is offered: %t", policy, name, there)
			}
			overlap = overlap || want && (n.Share || n.Partition != nil)
		}
	}
	for name, form := range forms {
		if (form != "") != overlap {
			s.breaks("under the policy %s, %s consumes %q", policy, name, form)
		}
	}
}

func profileOf(n device.Name) string {
	if n.Partition == nil {
		return ""
	}
	return profileName(n.Partition.ProfileID)
}
