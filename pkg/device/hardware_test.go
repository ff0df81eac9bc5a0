package device

import (
	"maps"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

// hardware says which devices of one GPU of a model file fit on the GPU at the same time. It does
// not use the driver's counters, so that tests can compare the counters with it.
type hardware struct {
	gpu GPU
	mig *model.MIG
	// devices has all devices that the GPU can be offered as, the whole GPU first.
	devices []item
}

// item is one device and where it lies on the GPU.
type item struct {
	name   Name
	device string
	whole  bool
	place  model.Place
}

func newHardware(m *model.GPU) hardware {
	h := hardware{gpu: migCapable(m, 1)[0], mig: &m.MIG}
	whole := Name{GPU: h.gpu.WholeName()}
	h.devices = append(h.devices, item{name: whole, device: whole.String(), whole: true})
	for _, p := range m.MIG.Profiles {
		for _, start := range p.Placements.Starts {
			n := Name{GPU: whole.GPU, Partition: &PartitionName{ProfileID: p.ID, Start: start}}
			h.devices = append(h.devices, item{name: n, device: n.String(), place: model.Place{Profile: p.ID, Start: start}})
		}
	}
	return h
}

// holds reports whether the GPU can hold these devices at the same time.
func (h hardware) holds(set ...item) bool {
	var places []model.Place
	for _, d := range set {
		if d.whole {
			return len(set) == 1
		}
		places = append(places, d.place)
	}
	return h.mig.Holds(places...)
}

// sets calls visit with every set of devices that the GPU can hold at the same time. visit must not
// keep the slice.
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

// ledger simulates how the scheduler counts. left and total have what is left and the total amount,
// by counter set and counter. cost has what each device consumes.
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

// covers reports whether enough is left of every counter for the device. The result by lists the
// counters of which too little is left.
func (l ledger) covers(device string) (_ bool, by []string) {
	for _, c := range l.cost[device] {
		for name, n := range c.Counters {
			if l.left[c.CounterSet][name] < n.Value.Value() {
				by = append(by, name)
			}
		}
	}
	return len(by) == 0, by
}

// For every set of devices that a GPU can hold, the published counters must allow the same further
// devices as the hardware model. If too little memory is left by the memory counter, another
// counter must also be short.
func TestCountersAgreeWithHardware(t *testing.T) {
	forEachMIGModel(t, func(t *testing.T, known *model.GPU) {
		checkCountersAgree(t, newHardware(known))
	})
}

func checkCountersAgree(t *testing.T, h hardware) {
	t.Helper()
	l := newLedger(newMachine(t, []GPU{h.gpu}, Driver{}).Scheduler)
	// A GPU in MIG mode that needs a reset to leave MIG mode offers only partitions.
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
				continue // the scheduler does not allocate this device again
			}
			may, by := l.covers(d.device)
			if can := h.holds(append(slices.Clip(held), d)...); may != can && wrong < 10 {
				wrong++
				t.Errorf("with %v held, counters allow %s: %v %v, hardware: %v", held, d.device, may, by, can)
			}
			if slices.Equal(by, []string{"memory"}) && wrong < 10 {
				wrong++
				t.Errorf("with %v held, only the memory counter excludes %s", held, d.device)
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

// Conflict must be true for two devices if and only if the GPU cannot hold both.
func TestConflictAgreesWithHardware(t *testing.T) {
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
