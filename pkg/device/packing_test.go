package device

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

// kinds are the kinds of devices that the packing tests request, the largest first.
var kinds = []string{"whole", "7g.80gb", "4g.40gb", "3g.40gb", "2g.20gb", "1g.10gb"}

// load has the number of requested devices of each kind, in the order of the variable kinds.
type load [6]int

func (l load) plus(o load) load {
	for i := range l {
		l[i] += o[i]
	}
	return l
}

// claims returns one element for each requested device: the index of its kind, the largest first.
func (l load) claims() []int {
	var all []int
	for k, n := range l {
		all = append(all, slices.Repeat([]int{k}, n)...)
	}
	return all
}

func ofKind(k int) resourceapi.DeviceRequest {
	if k == 0 {
		return count(1)
	}
	return ofClass(kinds[k])
}

func (l load) within(o load) bool {
	for i := range l {
		if l[i] > o[i] {
			return false
		}
	}
	return true
}

// fillings returns all loads that fill one GPU completely, so that no further device of any kind
// fits.
func fillings(h hardware) []load {
	kind := func(d item) int {
		if d.whole {
			return 0
		}
		p, _ := h.gpu.Profile(d.place.Profile)
		return slices.Index(kinds, p.Name)
	}
	all := sets.New[load]()
	h.sets(func(held []item) {
		var l load
		for _, d := range held {
			k := kind(d)
			if k < 0 {
				return
			}
			l[k]++
		}
		all.Insert(l)
	})
	var most []load
	for l := range all {
		part := false
		for o := range all {
			part = part || l != o && l.within(o)
		}
		if !part {
			most = append(most, l)
		}
	}
	slices.SortFunc(most, func(a, b load) int { return slices.Compare(a[:], b[:]) })
	return most
}

// canPack reports whether this many cards can hold the load wanted. One card can hold each of the
// loads in ways, and canPack tries all their combinations. dead caches the ones that failed.
func canPack(wanted load, cards int, ways []load, dead sets.Set[string]) bool {
	if wanted == (load{}) {
		return true
	}
	key := fmt.Sprint(wanted, cards)
	if cards == 0 || dead.Has(key) {
		return false
	}
	for _, w := range ways {
		rest := wanted
		for i := range rest {
			rest[i] = max(0, rest[i]-w[i])
		}
		if rest != wanted && canPack(rest, cards-1, ways, dead) {
			return true
		}
	}
	dead.Insert(key)
	return false
}

// allocateInOrder runs the allocator for one claim after the other. It returns the claims that the
// allocator could not allocate.
func allocateInOrder(r *rack, claims []int) (refused load) {
	r.clear()
	for _, k := range claims {
		got := r.allocate(r.taken, requests(ofKind(k)))
		if len(got) == 0 {
			refused[k]++
		}
		if err := r.hold(got...); err != nil {
			r.t.Fatal(err)
		}
	}
	return refused
}

// Each tested mix of claims can fill eight H100 completely. If large claims come first, the
// allocator must allocate every claim of a common mix. In any order, it may refuse a few per cent:
// it allocates one claim at a time and never moves one, so no order of devices suits every order of
// claims.
func TestMixedClaimsFillEightH100(t *testing.T) {
	known := readModels(t)["h100-sxm5-80gb"]
	r := newRack(t, known, 8)
	for _, k := range kinds[1:] {
		r.Classes[k] = fmt.Sprintf(`device.attributes["gpu.nvidia.com"].type == "mig" && %s`, profile(k))
	}
	ways := fillings(r.cards[0])
	random := rand.New(rand.NewPCG(3, 4))
	wanted := []load{{5: 56}, {4: 24, 5: 8}, {3: 16}, {2: 8, 3: 8}, {0: 8}, {0: 1, 1: 1, 2: 3, 3: 3, 4: 4, 5: 13}}
	mixes := slices.Clone(wanted)
	for range 5 {
		var mix load
		for range 8 {
			mix = mix.plus(ways[random.IntN(len(ways))])
		}
		mixes = append(mixes, mix)
	}
	total, lostInOrder, lost := 0, 0, 0
	for i, mix := range mixes {
		if !canPack(mix, 8, ways, sets.New[string]()) {
			t.Fatalf("%v of %v do not fit on eight cards", mix, kinds)
		}
		claims := mix.claims()
		refused := allocateInOrder(r, claims)
		if i < len(wanted) && refused != (load{}) {
			t.Errorf("of %v of %v, largest first, %v were not placed", mix, kinds, refused)
		}
		lostInOrder += len(refused.claims())
		for k := range mix {
			more := mix
			more[k]++
			if refused == (load{}) && !canPack(more, 8, ways, sets.New[string]()) && r.allocate(r.taken.Clone(), requests(ofKind(k))) != nil {
				t.Errorf("with %v of %v held, another %s was placed where exhaustive packing finds no room", mix, kinds, kinds[k])
			}
		}
		random.Shuffle(len(claims), func(i, j int) { claims[i], claims[j] = claims[j], claims[i] })
		lost += len(allocateInOrder(r, claims).claims())
		total += len(claims)
	}
	t.Logf("of %d claims, %d were not placed with the largest first, and %d in random order", total, lostInOrder, lost)
	if lostInOrder*100 > total*2 || lost*100 > total*5 {
		t.Error("too many claims were not placed")
	}
}

// One claim must be able to request several devices of one kind, devices of several kinds, and all
// of them on one GPU.
func TestClaimWithSeveralPartitions(t *testing.T) {
	m := newMachine(t, migCapable(readModels(t)["h100-sxm5-80gb"], 2), Driver{Version: "580.65.06", CUDAVersion: "13.0"})
	one, two, three, four, seven := profile("1g.10gb"), profile("2g.20gb"), profile("3g.40gb"), profile("4g.40gb"), profile("7g.80gb")
	gpusOf := func(devices []string) int {
		gpus := sets.New[string]()
		for _, d := range devices {
			n, _ := ParseName(d)
			gpus.Insert(n.GPU)
		}
		return gpus.Len()
	}
	type asks []resourceapi.DeviceRequest
	for _, c := range []struct {
		name    string
		claim   asks
		match   string // attribute that all devices must share, empty for none
		devices int    // how many are allocated, 0 if the claim does not fit
		gpus    int
	}{
		{"fourteen of one kind on two cards", asks{partitions(14, one)}, "", 14, 2},
		{"fifteen of one kind on two cards", asks{partitions(15, one)}, "", 0, 0},
		{"seven on one card", asks{partitions(7, one)}, "parentUUID", 7, 1},
		{"eight on one card", asks{partitions(8, one)}, "parentUUID", 0, 0},
		{"several kinds on one card", asks{partitions(1, four), partitions(1, two), partitions(1, one)}, "parentUUID", 3, 1},
		{"several kinds that one card cannot hold", asks{partitions(1, four), partitions(1, three), partitions(1, one)}, "parentUUID", 0, 0},
		{"the same kinds on two cards", asks{partitions(1, four), partitions(1, three), partitions(1, one)}, "", 3, 2},
		{"small before large, which needs backtracking", asks{partitions(1, one), partitions(1, three),
			partitions(1, three), partitions(1, four)}, "", 4, 2},
		{"a whole GPU and a partition", asks{count(1), partitions(1, three)}, "", 2, 2},
		{"a whole GPU and a partition of the same card", asks{count(1), partitions(1, one)}, "parentUUID", 0, 0},
		{"a whole GPU and a 7g twice", asks{count(1), partitions(2, seven)}, "", 0, 0},
		{"two with the only optical flow engine of a card", asks{partitions(2, profile("1g.10gb+me"))}, "", 2, 2},
		{"three with the only optical flow engine of a card", asks{partitions(3, profile("1g.10gb+me"))}, "", 0, 0},
		{"by capacity instead of profile", asks{partitions(4, `device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("30Gi")) >= 0 && `+
			`device.capacity["gpu.nvidia.com"].multiprocessors.compareTo(quantity("60")) >= 0`)}, "", 4, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			spec := requests(c.claim...)
			if c.match != "" {
				attribute := resourceapi.FullyQualifiedName(driverName + "/" + c.match)
				spec.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: &attribute}}
			}
			got := m.allocate(scheduler.NewTaken(), spec)
			if len(got) != c.devices || gpusOf(got) != c.gpus {
				t.Errorf("%v on %d cards, want %d devices on %d", got, gpusOf(got), c.devices, c.gpus)
			}
		})
	}
}
