package device

import (
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

// While a claim has a share, the share rules change so that they no longer offer this share. The
// share device must exclude the same devices as before, and no further share may be allocated.
// After the claim ends, the new rules must apply.
func TestShareRulesChangeWhileSharesAreHeld(t *testing.T) {
	plain := map[resourceapi.QualifiedName]string{CapacityShares: "1"}
	const part = firstGPU + "-mig-19-6"
	for name, c := range map[string]struct {
		before, after string
		held          string
		wish          map[resourceapi.QualifiedName]string
		other         map[resourceapi.QualifiedName]string // what can be allocated under the new rules
	}{
		"fractions of a GPU, then none":         {"[{kind: fractions}]", "", firstGPU, memory("2Gi"), nil},
		"fractions of a GPU, then of another":   {"[{index: 0, kind: fractions}]", "[{index: 1, kind: fractions}]", firstGPU, memory("1Gi"), nil},
		"fractions of a GPU, then plain shares": {"[{kind: fractions}]", "[{kind: shares, count: 4}]", firstGPU, memory("2Gi"), plain},
		"plain shares of a GPU, then none":      {"[{kind: shares, count: 4}]", "[{kind: 'off'}]", firstGPU, plain, nil},
		"plain shares of a GPU, then fractions": {"[{kind: shares, count: 4}]", "[{kind: fractions}]", firstGPU, plain, memory("1Gi")},
		"fractions of a partition, then none":   {"[{profile: 1g.10gb, kind: fractions}]", "", part, memory("1Gi"), nil},
		"plain shares of a partition, then fractions": {
			"[{profile: 1g.10gb, kind: shares, count: 2}]", "[{profile: 1g.10gb, kind: fractions}]", part, plain, memory("1Gi"),
		},
		"plain shares of a partition, then of the GPU": {
			"[{profile: 1g.10gb, kind: shares, count: 2}]", "[{index: 0, kind: shares, count: 2}]", part, plain, nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			const onFirst = `device.attributes["resource.kubernetes.io"].pciBusID == "0000:20:00.0"`
			gpus := node(t, h100Key, l40sKey)
			taken := scheduler.NewTaken()
			share := func(wish map[resourceapi.QualifiedName]string) resourceapi.DeviceClaim {
				return requests(share(wish, onFirst))
			}
			held := offered(t, sharing(t, c.before, gpus...), Driver{Version: "580.65.06"}).results(taken, share(c.wish))
			if len(held) != 1 || held[0].Device != c.held+"-share" {
				t.Fatalf("the first claim got %+v", held)
			}
			offerings := sharing(t, c.after, gpus...)
			free := offered(t, offerings, Driver{Version: "580.65.06"})
			for i := range offerings {
				_, fraction := c.wish[CapacityMemory]
				offerings[i].HeldShares = map[string]bool{c.held + "-share": fraction}
			}
			m := offered(t, offerings, Driver{Version: "580.65.06"})
			checkAPILimits(t, m)
			withdrawn := 0
			for _, s := range Offer(offerings) {
				if shared, is := s.(Shared); is && shared.Withdrawn() {
					withdrawn++
				}
			}
			if withdrawn != 1 {
				t.Errorf("%d shares are withdrawn, want only the held one", withdrawn)
			}
			if got := m.allocate(taken.Clone(), requests(count(1, onFirst, `device.attributes["gpu.nvidia.com"].type == "gpu"`))); got != nil {
				t.Errorf("the GPU was allocated as %v while a share is held", got)
			}
			for _, wish := range []map[resourceapi.QualifiedName]string{nil, memory("1Gi"), plain} {
				got := m.allocate(taken.Clone(), share(wish))
				if slices.Contains(got, c.held+"-share") || c.held == firstGPU && got != nil {
					t.Errorf("a claim for %v got %v while the share is withdrawn", wish, got)
				}
			}
			if c.other == nil {
				return
			}
			if got := free.allocate(scheduler.NewTaken(), share(c.other)); len(got) != 1 {
				t.Errorf("after the share was released, a claim for %v got %v", c.other, got)
			}
		})
	}
}

// A rule that changes only the number of shares must not withdraw the share device.
func TestChangedShareCountWithdrawsNothing(t *testing.T) {
	offerings := sharing(t, "[{kind: shares, count: 2}]", node(t, l40sKey)...)
	want := offered(t, offerings, Driver{})
	offerings[0].HeldShares = map[string]bool{firstGPU + "-share": false}
	for _, s := range Offer(offerings) {
		if shared, is := s.(Shared); is && shared.Withdrawn() {
			t.Errorf("%s is withdrawn", s.Name())
		}
	}
	if got := offered(t, offerings, Driver{}); len(got.Slices) != len(want.Slices) {
		t.Errorf("%d slices, want %d", len(got.Slices), len(want.Slices))
	}
}

func TestFractionsAreOfferedOnlyWhereMPSLimitsThem(t *testing.T) {
	p4 := node(t, "p4-8gb")[0]
	h100, l40s := node(t, h100Key)[0], node(t, l40sKey)[0]
	unknown := l40s
	unknown.CUDAComputeCapability = ""
	unified := l40s
	unified.MemoryBytes = 0
	volta := l40s
	volta.CUDAComputeCapability = "7.0"
	for name, c := range map[string]struct {
		gpu    GPU
		driver string
		why    string
	}{
		"new driver":                       {l40s, "580.65.06", ""},
		"first driver with multi-user MPS": {h100, "555.42.02", ""},
		"Volta":                            {volta, "580.65.06", ""},
		"older driver":                     {h100, "550.163.01", "driver 555"},
		"GPU before Volta":                 {p4, "580.65.06", "before Volta"},
		"unknown compute capability":       {unknown, "580.65.06", "cannot determine"},
		"unknown memory":                   {unified, "580.65.06", "memory"},
		"unknown driver version":           {l40s, "", "cannot determine"},
		"invalid driver version":           {l40s, "x.y", "cannot determine"},
	} {
		t.Run(name, func(t *testing.T) {
			why := FractionsUnsupportedReason(c.gpu, Driver{Version: c.driver})
			if !strings.Contains(why, c.why) || (why == "") != (c.why == "") {
				t.Errorf("got %q, want %q", why, c.why)
			}
			for _, rules := range []string{
				"[{kind: fractions}, {profile: '*', kind: fractions}]", "[{kind: shares, count: 2}]", "[{index: 1, kind: fractions}]",
			} {
				offerings := sharing(t, rules, c.gpu)
				offerings[0].FractionsUnsupported = why
				n := 0
				for _, s := range Offer(offerings) {
					if _, is := s.(Shared); is {
						n++
					}
				}
				fractions := strings.HasPrefix(rules, "[{kind: fractions")
				if shares := n > 0; shares != (rules == "[{kind: shares, count: 2}]" || fractions && why == "") {
					t.Errorf("%s: %d shares are offered", rules, n)
				}
				if refusal := FractionRefusals(offerings)[c.gpu.WholeName()]; (refusal == "") != (why == "" || !fractions) {
					t.Errorf("%s: the refusal is %q", rules, refusal)
				}
			}
		})
	}
}
