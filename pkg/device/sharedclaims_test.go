package device

import (
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

// share returns a request for a share with these amounts of capacity, on a device for which all
// expressions are true.
func share(amounts map[resourceapi.QualifiedName]string, expressions ...string) resourceapi.DeviceRequest {
	r := count(1, expressions...)
	r.Exactly.DeviceClassName = sharedClass
	if len(amounts) > 0 {
		r.Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{}}
		for name, amount := range amounts {
			r.Exactly.Capacity.Requests[name] = resource.MustParse(amount)
		}
	}
	return r
}

func memory(amount string) map[resourceapi.QualifiedName]string {
	return map[resourceapi.QualifiedName]string{CapacityMemory: amount}
}

func TestSharesFillTheMemoryAndExcludeTheGPU(t *testing.T) {
	for _, key := range []string{h100Key, "a100-sxm4-80gb"} {
		offerings := sharing(t, "[{kind: fractions}, {profile: '1g*', kind: shares, count: 2}]", node(t, key)...)
		m := offered(t, offerings, Driver{Version: "580.65.06"})
		taken := scheduler.NewTaken()
		var held []resourceapi.DeviceRequestAllocationResult
		for n := range 4 {
			got := m.results(taken, requests(share(memory("18Gi"))))
			if len(got) != 1 || got[0].Device != firstGPU+"-share" || got[0].ShareID == nil {
				t.Fatalf("claim %d got %+v", n, got)
			}
			if amount := got[0].ConsumedCapacity[CapacityMemory]; amount.Cmp(resource.MustParse("18Gi")) != 0 {
				t.Errorf("claim %d got %s", n, amount.String())
			}
			if amount := got[0].ConsumedCapacity[CapacityCores]; amount.Sign() != 0 || len(got[0].ConsumedCapacity) != 2 {
				t.Errorf("claim %d got %+v", n, got[0].ConsumedCapacity)
			}
			held = append(held, got...)
		}
		if got := m.results(taken, requests(share(memory("18Gi")))); got != nil {
			t.Errorf("a fifth claim got %+v", got)
		}
		exclusive := []resourceapi.DeviceClaim{requests(count(1)), requests(partitions(1)),
			requests(share(map[resourceapi.QualifiedName]string{CapacityShares: "1"}))}
		for len(held) > 0 {
			for i, spec := range exclusive {
				if got := m.allocate(taken.Clone(), spec); got != nil {
					t.Fatalf("with %d shares held, exclusive claim %d got %v", len(held), i, got)
				}
			}
			taken.Free(held[len(held)-1])
			held = held[:len(held)-1]
		}
		for i, spec := range exclusive {
			wants := len(spec.Requests)
			if key != h100Key && i > 0 {
				wants = 0 // only a reset enables MIG mode, so only the whole GPU is offered
			}
			other := taken.Clone()
			if got := m.allocate(other, spec); len(got) != wants {
				t.Errorf("after the shares, exclusive claim %d got %v", i, got)
			} else if got := m.allocate(other, requests(share(memory("1Gi")))); wants > 0 && got != nil {
				t.Errorf("with exclusive claim %d held, a share got %v", i, got)
			}
		}
	}
}

func TestConsumedCapacityOfAShare(t *testing.T) {
	amounts := func(memory, cores string) map[resourceapi.QualifiedName]string {
		return map[resourceapi.QualifiedName]string{CapacityMemory: memory, CapacityCores: cores}
	}
	l40s := sharing(t, "[{kind: fractions}]", node(t, l40sKey)...)
	fiveShares := sharing(t, "[{kind: shares, count: 5}]", node(t, l40sKey)...)
	for _, c := range []struct {
		name      string
		offerings []Offering
		ask       map[resourceapi.QualifiedName]string
		want      map[resourceapi.QualifiedName]string // nil for no allocation
		more      int                                  // how many more such claims fit
	}{
		{"no amounts", l40s, nil, amounts("1Gi", "0"), 42},
		{"too little", l40s, amounts("1Mi", "0"), amounts("1Gi", "0"), 42},
		{"between two steps", l40s, amounts("2049Mi", "1"), amounts("2112Mi", "1"), 20},
		{"all", l40s, amounts("44736Mi", "100"), amounts("44736Mi", "100"), 0},
		{"more than there is", l40s, memory("45Gi"), nil, 0},
		{"all the card's own memory", l40s, memory("46068Mi"), nil, 0},
		{"more cores than there are", l40s, amounts("1Gi", "101"), nil, 0},
		{"a third of the cores", l40s, amounts("1Gi", "33"), amounts("1Gi", "33"), 2},
		{"half a percent", l40s, amounts("1Gi", "500m"), amounts("1Gi", "1"), 42},
		{"an unknown capacity", l40s, map[resourceapi.QualifiedName]string{CapacityShares: "1"}, nil, 0},
		{"a plain share", fiveShares, nil, map[resourceapi.QualifiedName]string{CapacityShares: "1"}, 4},
		{"two plain shares", fiveShares,
			map[resourceapi.QualifiedName]string{CapacityShares: "2"}, map[resourceapi.QualifiedName]string{CapacityShares: "2"}, 1},
		{"six of five", fiveShares, map[resourceapi.QualifiedName]string{CapacityShares: "6"}, nil, 0},
		{"memory of plain shares", fiveShares, memory("1Gi"), nil, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, taken := offered(t, c.offerings, Driver{}), scheduler.NewTaken()
			got := m.results(taken, requests(share(c.ask)))
			if len(got) != min(1, len(c.want)) {
				t.Fatalf("the claim got %+v", got)
			}
			if c.want == nil {
				return
			}
			for name, want := range c.want {
				if amount := got[0].ConsumedCapacity[name]; amount.Cmp(resource.MustParse(want)) != 0 {
					t.Errorf("the claim got %s of %s, want %s", amount.String(), name, want)
				}
			}
			more := 0
			for m.allocate(taken, requests(share(c.ask))) != nil {
				more++
			}
			if more != c.more || len(got[0].ConsumedCapacity) != len(c.want) {
				t.Errorf("%d more fit, want %d. The first got %v", more, c.more, got[0].ConsumedCapacity)
			}
		})
	}
}

// Several requests of one claim may get shares of one device. A request with a count must get that
// many different devices.
func TestOneClaimWithSeveralShares(t *testing.T) {
	m := offered(t, sharing(t, "[{kind: fractions}]", node(t, l40sKey, l40sKey)...), Driver{})
	if got := m.allocate(scheduler.NewTaken(), requests(share(memory("20Gi")),
		share(memory("20Gi")))); !slices.Equal(got, []string{firstGPU + "-share", firstGPU + "-share"}) {
		t.Errorf("two requests got %v", got)
	}
	two := share(memory("4Gi"))
	two.Exactly.Count = 2
	if got := m.allocate(scheduler.NewTaken(), requests(two)); len(got) != 2 || got[0] == got[1] {
		t.Errorf("a count of two got %v", got)
	}
	attribute := resourceapi.FullyQualifiedName(driverName + "/parentUUID")
	spec := requests(share(memory("39Gi")), share(memory("4Gi")))
	spec.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: &attribute}}
	if got := m.allocate(scheduler.NewTaken(), spec); len(got) != 2 || got[0] != got[1] {
		t.Errorf("two shares of one card got %v", got)
	}
	spec = requests(share(memory("40Gi")), share(memory("5Gi")))
	spec.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: &attribute}}
	if got := m.allocate(scheduler.NewTaken(), spec); got != nil {
		t.Errorf("more memory than one card has: %v", got)
	}
	if got := m.allocate(scheduler.NewTaken(), requests(count(1), share(memory("4Gi")))); !slices.Equal(got,
		[]string{firstGPU, secondGPU + "-share"}) {
		t.Errorf("a whole GPU and a share got %v", got)
	}
	// The third request of this claim fits on no device, so the allocator must also give back what it
	// took for the first two requests.
	taken := scheduler.NewTaken()
	if got := m.allocate(taken, requests(share(memory("30Gi")), share(memory("30Gi")),
		share(memory("30Gi")))); got != nil || taken.Len() != 0 {
		t.Errorf("three of 30Gi on two cards: %v", got)
	}
	if got := m.allocate(taken, requests(count(2))); len(got) != 2 {
		t.Errorf("then both cards: %v", got)
	}
}

// A share of a partition must exclude the same devices as the partition. The rest of the GPU must
// stay available.
func TestSharesOfPartitions(t *testing.T) {
	offerings := sharing(t, "[{profile: 1g.10gb, kind: shares, count: 2}, {profile: '3g*', kind: fractions}]", node(t, h100Key)...)
	m := offered(t, offerings, Driver{})
	taken := scheduler.NewTaken()
	const half = `device.attributes["gpu.nvidia.com"].profile == "3g.40gb"`
	// Each half of the GPU has 40448Mi less the reserve of 256Mi, which is enough for one claim of
	// 30Gi.
	for n, want := range []int{1, 1, 0} {
		got := m.allocate(taken, requests(share(memory("30Gi"), half)))
		if len(got) != want {
			t.Fatalf("claim %d for most of a half got %v", n, got)
		}
	}
	if got := m.allocate(taken, requests(share(memory("9Gi"), half), share(memory("9Gi"), half))); len(got) != 2 || got[0] == got[1] {
		t.Errorf("the remaining memory of both halves: %v", got)
	}
	for _, spec := range []resourceapi.DeviceClaim{requests(count(1)), requests(partitions(1)),
		requests(share(map[resourceapi.QualifiedName]string{CapacityShares: "1"}))} {
		if got := m.allocate(taken, spec); got != nil {
			t.Errorf("with both halves held: %v", got)
		}
	}
	taken = scheduler.NewTaken()
	if got := m.allocate(taken, requests(partitions(1, profile("4g.40gb")))); len(got) != 1 {
		t.Fatal(got)
	}
	shares := 0
	for m.allocate(taken, requests(share(nil, profile("1g.10gb")))) != nil {
		shares++
	}
	if shares != 2*3 {
		t.Errorf("with a 4g held, %d shares of three 1g were allocated", shares)
	}
}

// Existing MIG instances must be offered in shares as they are. Each of them overlaps only with its
// own shares.
func TestSharesOfExistingInstances(t *testing.T) {
	g := small()
	g.Brand, g.Architecture = "Nvidia", "Hopper"
	g.MIG.Enabled, g.MIG.Pending, g.MIG.Instances = true, true, []Instance{instance(1, 0), instance(2, 1)}
	offerings := sharing(t, "[{kind: fractions}, {profile: '1g*', kind: fractions}]", g)
	if !offerings[0].Placements {
		offerings[0].Layout, _ = Decide(g, nil, Policy{Mode: PolicyStatic}, true)
	}
	m := offered(t, offerings, Driver{Version: "580.65.06"})
	checkAPILimits(t, m)
	taken := scheduler.NewTaken()
	got := m.results(taken, requests(share(memory("5Gi"))))
	if len(got) != 1 || got[0].Device != firstName+"-share" {
		t.Fatalf("the claim got %+v", got)
	}
	if second := m.allocate(taken, requests(partitions(2))); second != nil {
		t.Errorf("one of two instances is shared, but both were allocated: %v", second)
	}
	if second := m.allocate(taken, requests(partitions(1))); !slices.Equal(second, []string{lastName}) {
		t.Errorf("the other instance is %v", second)
	}
	if more := m.allocate(taken, requests(share(memory("5Gi")))); more != nil {
		t.Errorf("more than 9984Mi were allocated: %v", more)
	}
	taken.Free(got...)
	if again := m.allocate(taken, requests(partitions(1))); !slices.Equal(again, []string{firstName}) {
		t.Errorf("after the release of the share a claim got %v", again)
	}
}

func TestAdminAccessToShares(t *testing.T) {
	m := offered(t, sharing(t, "[{kind: fractions}]", node(t, l40sKey, h100Key)...), Driver{})
	admin := share(nil)
	admin.Exactly.AllocationMode, admin.Exactly.Count, admin.Exactly.AdminAccess = resourceapi.DeviceAllocationModeAll, 0, ptr.To(true)
	taken := scheduler.NewTaken()
	if got := m.allocate(taken, requests(admin)); len(got) != 2 || taken.Len() != 0 {
		t.Errorf("admin access to idle shares sees %v and consumes %d", got, taken.Len())
	}
	m.allocate(taken, requests(share(memory("40Gi"))))
	before := taken.Len()
	m.allocate(taken, requests(admin))
	if taken.Len() != before {
		t.Error("admin access consumes a share")
	}
}
