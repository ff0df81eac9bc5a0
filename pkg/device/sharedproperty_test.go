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

// amounts maps capacities to amounts, in bytes, percent or shares.
type amounts map[resourceapi.QualifiedName]int64

// sharedRack is a rack (simulated GPUs of one model) whose devices are also offered in shares. It
// keeps account of how much of each device claims have.
type sharedRack struct {
	*rack
	// total maps the name of each unshared device to the capacities of its share device.
	total map[string]amounts
	held  map[string][]amounts
}

// newSharedRack offers every second GPU and the smallest partitions in plain shares, and the rest
// in fractions.
func newSharedRack(t *testing.T, known *model.GPU, n int) *sharedRack {
	t.Helper()
	c := &sharedRack{rack: newRack(t, known, n), total: map[string]amounts{}, held: map[string][]amounts{}}
	const rules = "[{kind: fractions}, {index: 1, kind: shares, count: 2}, " +
		"{profile: '*', kind: fractions}, {profile: '1g*', kind: shares, count: 3}]"
	c.machine = offered(t, sharing(t, rules, migCapable(known, n)...), Driver{Version: "580.65.06"})
	for name, d := range c.items {
		mib, plain := int64(known.MemoryTotalMiB.Value)-1024, int64(0)
		switch {
		case d.whole && c.card[name] == 1:
			plain = 2
		case !d.whole:
			for _, p := range known.MIG.Profiles {
				if p.ID == d.place.Profile {
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

// consumedFor returns the capacities that a request consumes if it asks for the amounts in asked.
// The second result is false if a device with these totals can never satisfy the request.
func consumedFor(asked, total amounts) (amounts, bool) {
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

// hasRoom reports whether the device has enough capacity left for the amounts in more.
func (c *sharedRack) hasRoom(device string, more amounts) bool {
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

// heldOn returns all devices of the GPU with index card that claims have, alone or in shares.
func (c *sharedRack) heldOn(card int) []item {
	all := slices.Clone(c.rack.held[card])
	for _, name := range slices.Sorted(maps.Keys(c.held)) {
		if len(c.held[name]) > 0 && c.card[name] == card {
			all = append(all, c.items[name])
		}
	}
	return all
}

// fits reports whether, according to the model, some GPU can satisfy the request.
func (c *sharedRack) fits(w sharedRequest) bool {
	for i, h := range c.cards {
		held := c.heldOn(i)
		for _, d := range h.devices {
			if !w.wants(d) {
				continue
			}
			if !w.shared {
				if !slices.ContainsFunc(held, func(o item) bool { return o.device == d.device }) && h.holds(append(slices.Clip(held), d)...) {
					return true
				}
				continue
			}
			got, ever := consumedFor(w.asks, c.total[d.device])
			if ever && c.hasRoom(d.device, got) && (len(c.held[d.device]) > 0 || h.holds(append(slices.Clip(held), d)...)) {
				return true
			}
		}
	}
	return false
}

// sharedRequest is a request for an unshared device, or for a share with the amounts in the field
// asks.
type sharedRequest struct {
	requestKind
	shared bool
	asks   amounts
}

func (w sharedRequest) request() resourceapi.DeviceRequest {
	r := ofClass(w.class)
	for name, n := range w.asks {
		if r.Exactly.Capacity == nil {
			r.Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{}}
		}
		r.Exactly.Capacity.Requests[name] = *resource.NewQuantity(n, resource.BinarySI)
	}
	return r
}

// sharedRequests returns the requests that the test picks from: every third request for an unshared
// device, and requests for shares of any device, of a whole GPU, and of partitions of each profile.
func (c *sharedRack) sharedRequests() []sharedRequest {
	var all []sharedRequest
	for i, w := range c.requestKinds() {
		if i%3 == 0 { // fewer, so that shares are requested as often
			all = append(all, sharedRequest{requestKind: w})
		}
	}
	kinds := []requestKind{{sharedClass, func(item) bool { return true }}}
	add := func(expression string, wants func(item) bool) {
		c.Classes[expression] = expression
		kinds = append(kinds, requestKind{expression, wants})
	}
	const attribute = `device.attributes["gpu.nvidia.com"].`
	add(attribute+`type == "gpu-share"`, func(d item) bool { return d.whole })
	seen := sets.New[uint32]()
	for _, d := range c.cards[0].devices {
		if !d.whole && !seen.Has(d.place.Profile) {
			seen.Insert(d.place.Profile)
			add(fmt.Sprintf(attribute+`type == "mig-share" && `+attribute+`profileID == %d`, d.place.Profile),
				func(o item) bool { return !o.whole && o.place.Profile == d.place.Profile })
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
			all = append(all, sharedRequest{k, true, asks})
		}
	}
	return all
}

// record adds an allocation to the model. It returns an error if, according to the model, the
// device or the capacity was not available.
func (c *sharedRack) record(w sharedRequest, r resourceapi.DeviceRequestAllocationResult) error {
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
	want, _ := consumedFor(w.asks, c.total[device])
	if !maps.Equal(got, want) {
		return fmt.Errorf("%s: consumed %v for request %v, want %v", r.Device, got, w.asks, want)
	}
	if !c.hasRoom(device, got) {
		return fmt.Errorf("with %v held, %s does not have %v", c.held[device], r.Device, got)
	}
	c.held[device] = append(c.held[device], got)
	if i := c.card[device]; !c.cards[i].holds(c.heldOn(i)...) {
		return fmt.Errorf("the hardware cannot hold %v", c.heldOn(i))
	}
	return nil
}

func (c *sharedRack) giveBack(r resourceapi.DeviceRequestAllocationResult) {
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

// Claims for whole GPUs, for partitions and for shares of both come and go at random. The allocator
// must satisfy a request if and only if, according to the model, a GPU has no conflicting device
// and enough capacity left.
func TestAllocatorOfSharesAgreesWithHardware(t *testing.T) {
	const sequences, steps = 80, 12
	forEachMIGModel(t, func(t *testing.T, known *model.GPU) {
		t.Parallel()
		seed := fnv.New64a()
		_, _ = seed.Write([]byte(known.Key))
		random := rand.New(rand.NewPCG(seed.Sum64(), 3))
		racks := []*sharedRack{newSharedRack(t, known, 1), newSharedRack(t, known, 2)}
		requestKinds := racks[0].sharedRequests()
		racks[1].Classes = racks[0].Classes
		given, shared, refused := 0, 0, 0
		for n := range sequences {
			c := racks[n%2]
			clear(c.rack.held)
			clear(c.held)
			*c.taken = *scheduler.NewTaken()
			var held []resourceapi.DeviceRequestAllocationResult
			w := requestKinds[random.IntN(len(requestKinds))]
			for range steps {
				if len(held) > 0 && random.IntN(4) == 0 {
					i := random.IntN(len(held))
					c.giveBack(held[i])
					held = slices.Delete(held, i, i+1)
					continue
				}
				if random.IntN(2) == 0 { // otherwise repeat the last request
					w = requestKinds[random.IntN(len(requestKinds))]
				}
				can := c.fits(w)
				got := c.results(c.taken, requests(w.request()))
				if can != (len(got) == 1) {
					t.Fatalf("sequence %d: with %v and %v held, the allocator gave %v for %s %v, the hardware has room: %v", n,
						c.rack.held, c.held, got, w.class, w.asks, can)
				}
				if !can {
					refused++
					continue
				}
				if err := c.record(w, got[0]); err != nil {
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
			t.Error("too few cases to prove anything")
		}
	})
}
