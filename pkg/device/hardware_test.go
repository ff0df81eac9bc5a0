package device

import (
	"maps"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

// hardware is one card by its model file: the rules of the card itself, written without looking at how the driver counts.
type hardware struct {
	gpu GPU
	// devices are all that can be had of the card, the whole first.
	devices      []item
	has          engineCount
	maxInstances int
}

// item is one device and what it needs of the card.
type item struct {
	name    Name
	device  string
	whole   bool
	profile uint32
	slices  uint64 // one bit for each memory slice
	needs   engineCount
	most    int // instances of the profile beside each other
}

// engineCount has copy, decode, encode, JPEG and OFA engines.
type engineCount [5]uint32

func enginesOf(p model.Profile) engineCount {
	return engineCount{p.CopyEngines, p.Decoders, p.Encoders, p.JPEGEngines, p.OFAEngines}
}

func newHardware(m *model.GPU) hardware {
	h := hardware{gpu: cuttable(m, 1)[0], maxInstances: int(m.MIG.MaxInstances.Value)}
	whole := Name{GPU: h.gpu.WholeName()}
	h.devices = append(h.devices, item{name: whole, device: whole.String(), whole: true})
	for _, p := range m.MIG.Profiles {
		if p.Placements.Size == m.MIG.MemorySlices {
			for i, n := range enginesOf(p) {
				h.has[i] = max(h.has[i], n)
			}
		}
		for _, start := range p.Placements.Starts {
			n := Name{GPU: whole.GPU, Partition: &PartitionName{ProfileID: p.ID, Start: start}}
			h.devices = append(h.devices, item{
				name: n, device: n.String(), profile: p.ID, slices: (uint64(1)<<p.Placements.Size - 1) << start, needs: enginesOf(p), most: int(p.InstancesMax),
			})
		}
	}
	return h
}

// holds says whether the card can hold these devices together. A memory slice belongs to one instance, there are as many engines as the profile has that
// takes all memory, and of each profile and of all together there are no more than so many instances.
func (h hardware) holds(set ...item) bool {
	var taken uint64
	var used engineCount
	for i, d := range set {
		if d.whole && len(set) > 1 || taken&d.slices != 0 {
			return false
		}
		taken |= d.slices
		for e, n := range d.needs {
			if used[e] += n; used[e] > h.has[e] {
				return false
			}
		}
		alike := 1
		for _, o := range set[:i] {
			if o.profile == d.profile {
				alike++
			}
		}
		if !d.whole && alike > d.most {
			return false
		}
	}
	return len(set) <= h.maxInstances
}

// sets calls visit with every set of the devices that the card can hold. The slice is only lent.
func (h hardware) sets(visit func(held []item)) {
	var grow func(held []item, from int)
	grow = func(held []item, from int) {
		visit(held)
		for i := from; i < len(h.devices); i++ {
			if more := append(slices.Clip(held), h.devices[i]); h.holds(more...) {
				grow(more, i+1)
			}
		}
	}
	grow(nil, 0)
}

// ledger is the scheduler's arithmetic on the slices that are published: what is left of each
// counter and what there was, by set and name.
type ledger struct {
	left, total map[string]map[string]int64
	cost        map[string][]resourceapi.DeviceCounterConsumption
}

func newLedger(m *scheduler.Scheduler) ledger {
	l := ledger{map[string]map[string]int64{}, map[string]map[string]int64{}, map[string][]resourceapi.DeviceCounterConsumption{}}
	for _, s := range m.Slices {
		for _, set := range s.Spec.SharedCounters {
			l.left[set.Name] = map[string]int64{}
			for name, c := range set.Counters {
				l.left[set.Name][name] = c.Value.Value()
			}
			l.total[set.Name] = maps.Clone(l.left[set.Name])
		}
		for _, d := range s.Spec.Devices {
			l.cost[d.Name] = d.ConsumesCounters
		}
	}
	return l
}

func (l ledger) add(device string, sign int64) {
	for _, c := range l.cost[device] {
		for name, n := range c.Counters {
			l.left[c.CounterSet][name] -= sign * n.Value.Value()
		}
	}
}

// has says whether every counter has enough left for the device; by are those that have not.
func (l ledger) has(device string) (_ bool, by []string) {
	for _, c := range l.cost[device] {
		for name, n := range c.Counters {
			if l.left[c.CounterSet][name] < n.Value.Value() {
				by = append(by, name)
			}
		}
	}
	return len(by) == 0, by
}

// For every set of devices that a card can hold, and every further device, published counters and
// hardware agree on whether it fits beside them. Every set that the hardware allows is reached by
// adding one device after the other, so nothing else has to be looked at. Memory never decides:
// where it is short, another counter is, too.
func TestCountersAllowExactlyWhatTheHardwareCanHold(t *testing.T) {
	forEachMIGModel(t, func(t *testing.T, known *model.GPU) {
		agree(t, newHardware(known))
	})
}

func agree(t *testing.T, h hardware) {
	t.Helper()
	l := newLedger(newMachine(t, []GPU{h.gpu}, Driver{}).Scheduler)
	// Of a card whose mode is fixed only partitions are offered.
	h.devices = slices.DeleteFunc(h.devices, func(d item) bool { _, offered := l.cost[d.device]; return !offered })
	if len(h.devices) != len(l.cost) {
		t.Fatalf("%d devices are offered, the card has %d", len(l.cost), len(h.devices))
	}
	sets, wrong := 0, 0
	h.sets(func(held []item) {
		sets++
		for _, d := range held {
			l.add(d.device, 1)
		}
		for _, d := range h.devices {
			if slices.ContainsFunc(held, func(o item) bool { return o.device == d.device }) {
				continue // nobody asks counters about a device that is held
			}
			may, by := l.has(d.device)
			if can := h.holds(append(slices.Clip(held), d)...); may != can && wrong < 10 {
				wrong++
				t.Errorf("beside %v, counters allow %s: %v %v, the hardware: %v", held, d.device, may, by, can)
			}
			if slices.Equal(by, []string{"memory"}) && wrong < 10 {
				wrong++
				t.Errorf("beside %v, nothing but the memory keeps %s away", held, d.device)
			}
		}
		for _, d := range held {
			l.add(d.device, -1)
		}
	})
	t.Logf("%d sets of %d devices", sets, len(h.devices))
	if sets < len(h.devices) {
		t.Errorf("only %d sets were tried", sets)
	}
}

// Two claims are refused together if and only if the card cannot hold what they want.
func TestDevicesConflictWhereTheHardwareCannotHoldBoth(t *testing.T) {
	forEachMIGModel(t, func(t *testing.T, known *model.GPU) {
		h := newHardware(known)
		for _, a := range h.devices {
			for _, b := range h.devices {
				want := a.device == b.device || !h.holds(a, b)
				if got := Conflict(a.name, b.name, h.gpu); got != want {
					t.Errorf("%s and %s conflict: %v, want %v", a.name, b.name, got, want)
				}
			}
		}
	})
}
