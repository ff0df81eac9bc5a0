package device

import (
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

// amounts are of capacities, in their smallest unit.
type amounts map[resourceapi.QualifiedName]int64

// crowd is a rack whose devices are also offered in shares: who holds what of which, beside those that hold devices alone.
type crowd struct {
	*rack
	// total is what a share device has, by the name of the device that it is made of.
	total map[string]amounts
	held  map[string][]amounts
}

// newCrowd shares every second card in plain shares, the others in fractions; of partitions the smallest in plain shares.
func newCrowd(t *testing.T, known *model.GPU, n int) *crowd {
	t.Helper()
	c := &crowd{rack: newRack(t, known, n), total: map[string]amounts{}, held: map[string][]amounts{}}
	c.machine = offered(t, sharing(t, "fractions,#1=shares:2,*/*=fractions,*/1g*=shares:3", cuttable(known, n)...), Driver{Version: "580.65.06"})
	for name, d := range c.items {
		mib, plain := int64(known.MemoryTotalMiB.Value)-1024, int64(0)
		switch {
		case d.whole && c.card[name] == 1:
			plain = 2
		case !d.whole:
			for _, p := range known.MIG.Profiles {
				if p.ID == d.profile {
					mib = int64(p.MemoryMiB) - 256
					if p.Slices == 1 {
						plain = 3
					}
				}
			}
		}
		if plain > 0 {
			c.total[name] = amounts{CapacityShares: plain}
		} else {
			c.total[name] = amounts{CapacityMemory: mib / 64 * 64 << 20, CapacityCores: 100}
		}
	}
	return c
}

// given is what one gets who asks for so much; false if one would never get that here.
func given(asked, total amounts) (amounts, bool) {
	for name := range asked {
		if _, has := total[name]; !has {
			return nil, false
		}
	}
	got := amounts{}
	for name := range total {
		n, said := asked[name]
		switch {
		case name == CapacityMemory:
			n = max(n, 1<<30)
			n = (n + 64<<20 - 1) / (64 << 20) * (64 << 20)
		case name == CapacityShares && !said:
			n = 1
		}
		got[name] = n
	}
	return got, true
}

// room says whether a device has so much left.
func (c *crowd) room(device string, more amounts) bool {
	for name, total := range c.total[device] {
		sum := more[name]
		for _, h := range c.held[device] {
			sum += h[name]
		}
		if sum > total {
			return false
		}
	}
	return true
}

// together are all devices of a card that are held, alone or in shares.
func (c *crowd) together(card int) []item {
	all := slices.Clone(c.rack.held[card])
	for _, name := range slices.Sorted(maps.Keys(c.held)) {
		if len(c.held[name]) > 0 && c.card[name] == card {
			all = append(all, c.items[name])
		}
	}
	return all
}

// fits says whether some card can give what is asked for.
func (c *crowd) fits(w sharedWish) bool {
	for i, h := range c.cards {
		beside := c.together(i)
		for _, d := range h.devices {
			if !w.wants(d) {
				continue
			}
			if !w.shared {
				if !slices.ContainsFunc(beside, func(o item) bool { return o.device == d.device }) && h.holds(append(slices.Clip(beside), d)...) {
					return true
				}
				continue
			}
			got, ever := given(w.asks, c.total[d.device])
			if ever && c.room(d.device, got) && (len(c.held[d.device]) > 0 || h.holds(append(slices.Clip(beside), d)...)) {
				return true
			}
		}
	}
	return false
}

// sharedWish is for a device, or for so much of one.
type sharedWish struct {
	wish
	shared bool
	asks   amounts
}

func (w sharedWish) request() resourceapi.DeviceRequest {
	r := ofClass(w.class)
	for name, n := range w.asks {
		if r.Exactly.Capacity == nil {
			r.Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{}}
		}
		r.Exactly.Capacity.Requests[name] = *resource.NewQuantity(n, resource.BinarySI)
	}
	return r
}

// crowdWishes are those of a rack, and shares: of any device, of a whole GPU, of partitions of a profile.
func (c *crowd) crowdWishes() []sharedWish {
	var all []sharedWish
	for i, w := range c.wishes() {
		if i%3 == 0 { // as often as shares
			all = append(all, sharedWish{wish: w})
		}
	}
	kinds := []wish{{sharedClass, func(item) bool { return true }}}
	add := func(expression string, wants func(item) bool) {
		c.Classes[expression] = expression
		kinds = append(kinds, wish{expression, wants})
	}
	const attribute = `device.attributes["gpu.nvidia.com"].`
	add(attribute+`type == "gpu-share"`, func(d item) bool { return d.whole })
	seen := sets.New[uint32]()
	for _, d := range c.cards[0].devices {
		if !d.whole && !seen.Has(d.profile) {
			seen.Insert(d.profile)
			add(fmt.Sprintf(attribute+`type == "mig-share" && `+attribute+`profileID == %d`, d.profile), func(o item) bool { return !o.whole && o.profile == d.profile })
		}
	}
	for _, k := range kinds {
		for _, asks := range []amounts{
			nil,
			{CapacityMemory: 1},
			{CapacityMemory: 5<<30 + 1},
			{CapacityMemory: 18 << 30},
			{CapacityMemory: 3 << 30, CapacityCores: 40},
			{CapacityCores: 60},
			{CapacityShares: 1},
			{CapacityShares: 2},
		} {
			all = append(all, sharedWish{k, true, asks})
		}
	}
	return all
}

// take takes down what the allocator gave, and says if it was not there to give.
func (c *crowd) take(w sharedWish, r resourceapi.DeviceRequestAllocationResult) error {
	name, ok := ParseName(r.Device)
	if !ok || name.Share != w.shared || name.Share != (r.ShareID != nil) {
		return fmt.Errorf("%s was given for %s", r.Device, w.class)
	}
	device := name.Unshared().String()
	if !w.wants(c.items[device]) {
		return fmt.Errorf("%s was given for %s", r.Device, w.class)
	}
	if !w.shared {
		return c.hold(device)
	}
	got := amounts{}
	for capacity, q := range r.ConsumedCapacity {
		got[capacity] = q.Value()
	}
	want, _ := given(w.asks, c.total[device])
	if !maps.Equal(got, want) {
		return fmt.Errorf("of %s %v was given for %v, want %v", r.Device, got, w.asks, want)
	}
	if !c.room(device, got) {
		return fmt.Errorf("beside %v, %s has not %v", c.held[device], r.Device, got)
	}
	c.held[device] = append(c.held[device], got)
	if i := c.card[device]; !c.cards[i].holds(c.together(i)...) {
		return fmt.Errorf("the hardware cannot hold %v", c.together(i))
	}
	return nil
}

func (c *crowd) leave(r resourceapi.DeviceRequestAllocationResult) {
	name, _ := ParseName(r.Device)
	device := name.Unshared().String()
	if !name.Share {
		c.free(device)
		return
	}
	c.taken.Free(r)
	n := slices.IndexFunc(c.held[device], func(h amounts) bool {
		for capacity, q := range r.ConsumedCapacity {
			if h[capacity] != q.Value() {
				return false
			}
		}
		return true
	})
	c.held[device] = slices.Delete(c.held[device], n, n+1)
}

// Claims for whole GPUs, partitions and shares of either come and go at random. The allocator gives something if and only if a card can hold it: no share beside
// what its device excludes, never more of a capacity than there is, and nothing is refused that there would be room for.
func TestTheAllocatorGivesSharesWhereThereIsRoom(t *testing.T) {
	const sequences, steps = 80, 12
	forEachMIGModel(t, func(t *testing.T, known *model.GPU) {
		t.Parallel()
		seed := fnv.New64a()
		_, _ = seed.Write([]byte(known.Key))
		random := rand.New(rand.NewPCG(seed.Sum64(), 3))
		crowds := []*crowd{newCrowd(t, known, 1), newCrowd(t, known, 2)}
		wishes := crowds[0].crowdWishes()
		crowds[1].Classes = crowds[0].Classes
		given, shared, refused := 0, 0, 0
		for n := range sequences {
			c := crowds[n%2]
			clear(c.rack.held)
			clear(c.held)
			*c.taken = *scheduler.NewTaken()
			var held []resourceapi.DeviceRequestAllocationResult
			w := wishes[random.IntN(len(wishes))]
			for range steps {
				if len(held) > 0 && random.IntN(4) == 0 {
					i := random.IntN(len(held))
					c.leave(held[i])
					held = slices.Delete(held, i, i+1)
					continue
				}
				if random.IntN(2) == 0 { // else one more like the last
					w = wishes[random.IntN(len(wishes))]
				}
				can := c.fits(w)
				got := c.results(c.taken, requests(w.request()))
				if can != (len(got) == 1) {
					t.Fatalf("sequence %d: beside %v and %v the allocator gave %v for %s %v, the hardware can: %v", n, c.rack.held, c.held, got, w.class, w.asks, can)
				}
				if !can {
					refused++
					continue
				}
				if err := c.take(w, got[0]); err != nil {
					t.Fatalf("sequence %d: %v", n, err)
				}
				given++
				if w.shared {
					shared++
				}
				held = append(held, got...)
			}
		}
		t.Logf("%d given, %d of them shares, %d refused", given, shared, refused)
		if given < sequences || shared < sequences || refused < sequences {
			t.Error("that proves little")
		}
	})
}
