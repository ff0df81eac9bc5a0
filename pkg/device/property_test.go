package device

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

// rack is a machine with GPUs of one model. It also has a model of what each GPU can hold, with
// which the tests compare the scheduler's allocator.
type rack struct {
	machine
	cards []hardware
	items map[string]item
	card  map[string]int
	held  [][]item // devices of claims, by the index of the card
	taken *scheduler.Taken
}

func newRack(t *testing.T, known *model.GPU, n int) *rack {
	t.Helper()
	gpus := migCapable(known, n)
	r := &rack{
		machine: newMachine(t, gpus, Driver{Version: "580.65.06", CUDAVersion: "13.0"}),
		items:   map[string]item{}, card: map[string]int{}, held: make([][]item, n), taken: scheduler.NewTaken(),
	}
	offered := sets.New[string]()
	for _, s := range r.Slices {
		for _, d := range s.Spec.Devices {
			offered.Insert(d.Name)
		}
	}
	for i, g := range gpus {
		h := newHardware(known)
		for k := range h.devices {
			h.devices[k].name.GPU = g.WholeName()
			h.devices[k].device = h.devices[k].name.String()
		}
		h.devices = slices.DeleteFunc(h.devices, func(d item) bool { return !offered.Has(d.device) })
		for _, d := range h.devices {
			r.items[d.device], r.card[d.device] = d, i
		}
		r.cards = append(r.cards, h)
	}
	return r
}

// fits reports whether, according to the hardware model, some GPU can hold one more device for
// which the parameter wanted returns true.
func (r *rack) fits(wanted func(item) bool) bool {
	for i, h := range r.cards {
		for _, d := range h.devices {
			if wanted(d) && !slices.ContainsFunc(r.held[i], func(o item) bool { return o.device == d.device }) &&
				h.holds(append(slices.Clip(r.held[i]), d)...) {
				return true
			}
		}
	}
	return false
}

// hold adds the allocated devices to the hardware model. It returns an error if a GPU cannot hold
// one of them.
func (r *rack) hold(devices ...string) error {
	for _, name := range devices {
		i := r.card[name]
		r.held[i] = append(slices.Clip(r.held[i]), r.items[name])
		if !r.cards[i].holds(r.held[i]...) {
			return fmt.Errorf("the hardware cannot hold %v", r.held[i])
		}
	}
	return nil
}

func (r *rack) free(device string) {
	i := r.card[device]
	r.held[i] = slices.DeleteFunc(slices.Clone(r.held[i]), func(o item) bool { return o.device == device })
	r.taken.Free(scheduler.Device(driverName, device))
}

func (r *rack) clear() {
	clear(r.held)
	r.taken.Clear()
}

// requestKind is one kind of request. Each kind has its own device class, because a class is
// cheaper to evaluate than expressions in the request.
type requestKind struct {
	class string
	wants func(item) bool
}

func ofClass(name string) resourceapi.DeviceRequest {
	r := count(1)
	r.Exactly.DeviceClassName = name
	return r
}

// requestKinds returns one kind of request for a whole GPU, three for a partition of each profile,
// and one for each single placement.
func (r *rack) requestKinds() []requestKind {
	all := []requestKind{{driverName, func(d item) bool { return d.whole }}}
	add := func(expression string, wants func(item) bool) {
		r.Classes[expression] = expression
		all = append(all, requestKind{expression, wants})
	}
	seen := sets.New[uint32]()
	for _, d := range r.cards[0].devices {
		if d.whole {
			continue
		}
		const isMIG = `device.attributes["gpu.nvidia.com"].type == "mig" && device.attributes["gpu.nvidia.com"].profileID == %d`
		is := fmt.Sprintf(isMIG, d.place.Profile)
		if !seen.Has(d.place.Profile) {
			seen.Insert(d.place.Profile)
			for range 3 { // more often than single placements
				add(is, func(o item) bool { return !o.whole && o.place.Profile == d.place.Profile })
			}
		}
		start := d.name.Partition.Start
		add(fmt.Sprintf(`%s && device.attributes["gpu.nvidia.com"].placementStart == %d`, is, start),
			func(o item) bool {
				return !o.whole && o.place.Profile == d.place.Profile && o.name.Partition.Start == start
			})
	}
	return all
}

// Random claims come and go. The allocator must allocate a device if and only if, according to the
// hardware model, some GPU can hold one more of the requested kind.
func TestAllocatorAgreesWithHardware(t *testing.T) {
	const sequences, steps = 250, 8
	forEachMIGModel(t, func(t *testing.T, known *model.GPU) {
		t.Parallel()
		seed := fnv.New64a()
		_, _ = seed.Write([]byte(known.Key))
		random := rand.New(rand.NewPCG(seed.Sum64(), 1))
		given, refused := 0, 0
		racks := []*rack{newRack(t, known, 1), newRack(t, known, 2)}
		requestKinds := racks[0].requestKinds()
		racks[1].Classes = racks[0].Classes
		for n := range sequences {
			r := racks[n%4/3]
			r.clear()
			var held []string
			for range steps {
				if len(held) > 0 && random.IntN(4) == 0 {
					i := random.IntN(len(held))
					r.free(held[i])
					held = slices.Delete(held, i, i+1)
					continue
				}
				w := requestKinds[random.IntN(len(requestKinds))]
				can := r.fits(w.wants)
				got := r.allocate(r.taken, requests(ofClass(w.class)))
				if can != (len(got) == 1) {
					t.Fatalf("sequence %d: with %v held, the allocator gave %v for %s, the hardware has room: %v", n, r.held, got, w.class, can)
				}
				if !can {
					refused++
					continue
				}
				given++
				if !w.wants(r.items[got[0]]) {
					t.Fatalf("sequence %d: asked for %s, got %s", n, w.class, got[0])
				}
				if err := r.hold(got...); err != nil {
					t.Fatalf("sequence %d: %v", n, err)
				}
				held = append(held, got...)
			}
		}
		t.Logf("%d given, %d refused", given, refused)
		if given < sequences || refused < sequences {
			t.Errorf("%d given and %d refused are too few cases to prove anything", given, refused)
		}
	})
}
