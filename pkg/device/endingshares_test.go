package device

import (
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

// What is shared by rules is held, then the rules change: whoever holds a share keeps away those that it kept away before, nobody joins, and afterwards the
// new rules hold.
func TestRulesThatChangeWhileSharesAreHeld(t *testing.T) {
	plain := map[resourceapi.QualifiedName]string{CapacityShares: "1"}
	const part = firstGPU + "-mig-19-6"
	for name, c := range map[string]struct {
		before, after string
		held          string
		wish          map[resourceapi.QualifiedName]string
		other         map[resourceapi.QualifiedName]string // what the new rules give out, nil for nothing
	}{
		"fractions of a GPU, and none":                {"fractions", "", firstGPU, memory("2Gi"), nil},
		"fractions of a GPU, and another's":           {"#0=fractions", "#1=fractions", firstGPU, memory("1Gi"), nil},
		"fractions of a GPU, and plain shares":        {"fractions", "shares:4", firstGPU, memory("2Gi"), plain},
		"plain shares of a GPU, and none":             {"shares:4", "off", firstGPU, plain, nil},
		"plain shares of a GPU, and fractions":        {"shares:4", "fractions", firstGPU, plain, memory("1Gi")},
		"fractions of a partition, and none":          {"*/1g.10gb=fractions", "", part, memory("1Gi"), nil},
		"plain shares of a partition, and fractions":  {"*/1g.10gb=shares:2", "*/1g.10gb=fractions", part, plain, memory("1Gi")},
		"plain shares of a partition, and of the GPU": {"*/1g.10gb=shares:2", "#0=shares:2", part, plain, nil},
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
				t.Fatalf("held is %+v", held)
			}
			offerings := sharing(t, c.after, gpus...)
			free := offered(t, offerings, Driver{Version: "580.65.06"})
			for i := range offerings {
				_, fraction := c.wish[CapacityMemory]
				offerings[i].HeldShares = map[string]bool{c.held + "-share": fraction}
			}
			m := offered(t, offerings, Driver{Version: "580.65.06"})
			keepsLimits(t, m)
			ending := 0
			for _, s := range Offer(offerings) {
				if shared, is := s.(Shared); is && shared.Ending() {
					ending++
				}
			}
			if ending != 1 {
				t.Errorf("%d shares are ending, want that one", ending)
			}
			if got := m.allocate(taken.Clone(), requests(count(1, onFirst, `device.attributes["gpu.nvidia.com"].type == "gpu"`))); got != nil {
				t.Errorf("beside the share, the GPU is given to another as %v", got)
			}
			for _, wish := range []map[resourceapi.QualifiedName]string{nil, memory("1Gi"), plain} {
				got := m.allocate(taken.Clone(), share(wish))
				if slices.Contains(got, c.held+"-share") || c.held == firstGPU && got != nil {
					t.Errorf("who asks for %v joins as %v", wish, got)
				}
			}
			if c.other == nil {
				return
			}
			if got := free.allocate(scheduler.NewTaken(), share(c.other)); len(got) != 1 {
				t.Errorf("when it was given back, %v gets %v", c.other, got)
			}
		})
	}
}

// Who only gets other limits by the new rules goes on as before.
func TestRulesThatChangeNumbersEndNothing(t *testing.T) {
	offerings := sharing(t, "shares:2", node(t, l40sKey)...)
	want := offered(t, offerings, Driver{})
	offerings[0].HeldShares = map[string]bool{firstGPU + "-share": false}
	for _, s := range Offer(offerings) {
		if shared, is := s.(Shared); is && shared.Ending() {
			t.Errorf("%s is ending", s.Name())
		}
	}
	if got := offered(t, offerings, Driver{}); len(got.Slices) != len(want.Slices) {
		t.Errorf("%d slices, want %d", len(got.Slices), len(want.Slices))
	}
}

func TestFractionsAreOfferedWhereTheyCanBeKept(t *testing.T) {
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
		"a new driver":        {l40s, "580.65.06", ""},
		"the first that can":  {h100, "555.42.02", ""},
		"Volta":               {volta, "580.65.06", ""},
		"an older driver":     {h100, "550.163.01", "driver 555"},
		"a GPU before Volta":  {p4, "580.65.06", "before Volta"},
		"a GPU that is mute":  {unknown, "580.65.06", "not known"},
		"no memory figures":   {unified, "580.65.06", "memory"},
		"a driver that is":    {l40s, "", "not known"},
		"a driver of letters": {l40s, "x.y", "not known"},
	} {
		t.Run(name, func(t *testing.T) {
			why := WhyNoFractions(c.gpu, Driver{Version: c.driver})
			if !strings.Contains(why, c.why) || (why == "") != (c.why == "") {
				t.Errorf("got %q, want %q", why, c.why)
			}
			for _, rules := range []string{"fractions,*/*=fractions", "shares:2", "#1=fractions"} {
				offerings := sharing(t, rules, c.gpu)
				offerings[0].NoFractions = why
				n := 0
				for _, s := range Offer(offerings) {
					if _, is := s.(Shared); is {
						n++
					}
				}
				fractions := strings.HasPrefix(rules, "fractions")
				if shares := n > 0; shares != (rules == "shares:2" || fractions && why == "") {
					t.Errorf("%s: %d shares are offered", rules, n)
				}
				if told := NotInFractions(offerings)[c.gpu.WholeName()]; (told == "") != (why == "" || !fractions) {
					t.Errorf("%s: it is said that %q", rules, told)
				}
			}
		})
	}
}
