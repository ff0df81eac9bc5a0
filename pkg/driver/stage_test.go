package driver

import (
	"math/rand/v2"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// tainted are slices of one device each; those that are named have a taint.
func tainted(n int, values map[int]string) []resourceslice.Slice {
	slices := make([]resourceslice.Slice, n)
	for i := range slices {
		d := resourceapi.Device{Name: string(rune('a' + i))}
		if v := values[i]; v != "" {
			d.Taints = []resourceapi.DeviceTaint{{Key: "k", Value: v, Effect: resourceapi.DeviceTaintEffectNoSchedule}}
		}
		slices[i].Devices = []resourceapi.Device{d}
	}
	return slices
}

func differing(a, b []resourceslice.Slice) int {
	n := 0
	for i := range a {
		if i >= len(b) || !apiequality.Semantic.DeepEqual(a[i], b[i]) {
			n++
		}
	}
	return n
}

func want(t *testing.T, s *stages, slices []resourceslice.Slice) {
	t.Helper()
	if err := s.want(slices); err != nil {
		t.Fatal(err)
	}
}

func next(t *testing.T, s *stages, writes int64, failing bool, now time.Time) (_ []resourceslice.Slice, ok bool) {
	t.Helper()
	given, ok, err := s.next(writes, failing, now)
	if err != nil {
		t.Fatal(err)
	}
	return given, ok
}

// TestTheControllerNeverHasTwoSlicesToWrite changes taints at random while a controller writes now and then, what it was given some time ago, and fails at
// times.
func TestTheControllerNeverHasTwoSlicesToWrite(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 0))
		now := time.Now()
		start := tainted(5, nil)
		stored, writes := start, int64(5)
		s := stages{given: kept(t, start), wanted: kept(t, start), writes: writes, at: now.Add(-time.Minute)}
		away, failing := false, false
		var writing []resourceslice.Slice
		for range 300 {
			now = now.Add(time.Duration(r.IntN(30)) * time.Millisecond)
			switch r.IntN(6) {
			case 0:
				want(t, &s, tainted(5, map[int]string{r.IntN(5): "x", r.IntN(5): "y", r.IntN(5): ""}))
			case 1:
				away = r.IntN(3) == 0
			}
			if given, ok := next(t, &s, writes, failing, now); ok {
				if n := differing(stored, given); n > 1 {
					t.Fatalf("seed %d: %d slices are to be written at once", seed, n)
				}
			}
			switch {
			case away:
				failing, writing = true, nil
			case writing != nil && r.IntN(2) == 0:
				stored, writing, failing = writing, nil, false
				writes++
			case writing == nil && differing(stored, unkept(t, s.given)) == 0:
				failing = false
			case writing == nil && r.IntN(2) == 0:
				writing = unkept(t, s.given)
			}
		}
		for range 50 { // then all that is wanted gets there
			now = now.Add(stagePatience)
			_, _ = next(t, &s, writes, false, now)
			if given := unkept(t, s.given); differing(stored, given) > 0 {
				stored = given
				writes++
			}
		}
		if differing(stored, unkept(t, s.wanted)) > 0 || s.waiting() {
			t.Fatalf("seed %d: stored %v, wanted %v", seed, stored, s.wanted)
		}
	}
}

func TestOtherDevicesAreGivenAtOnce(t *testing.T) {
	now := time.Now()
	s := stages{given: kept(t, tainted(3, nil)), at: now, writes: 7}
	want(t, &s, tainted(4, map[int]string{0: "x", 1: "x"}))
	given, ok := next(t, &s, 7, false, now)
	if !ok || differing(given, unkept(t, s.wanted)) != 0 || s.waiting() {
		t.Errorf("%v, %v", given, ok)
	}
	// What is there already is not written: the next follows all the same.
	want(t, &s, tainted(4, map[int]string{2: "x"}))
	if _, ok := next(t, &s, 7, false, now); ok {
		t.Error("given while the last may not be written")
	}
	if given, ok := next(t, &s, 7, false, now.Add(stagePatience)); !ok || differing(given, unkept(t, s.given)) != 0 {
		t.Errorf("%v, %v", given, ok)
	}
}

func TestAPoolThatBecomesEmptyIsGiven(t *testing.T) {
	now := time.Now()
	s := stages{given: kept(t, tainted(3, nil)), at: now}
	want(t, &s, nil)
	if given, ok := next(t, &s, 0, false, now); !ok || len(given) != 0 {
		t.Errorf("%v, %v", given, ok)
	}
}

func TestWhatIsPublishedAlreadyIsNotWaitedFor(t *testing.T) {
	now := time.Now()
	for _, published := range []bool{true, false} {
		s, err := begin(tainted(3, nil), published, now)
		if err != nil {
			t.Fatal(err)
		}
		want(t, &s, tainted(3, map[int]string{1: "x"}))
		if slices, given := next(t, &s, 0, false, now); given != published {
			t.Errorf("published %v: the first change is given: %v, %v", published, given, slices)
		}
		want(t, &s, tainted(3, map[int]string{1: "x", 2: "x"}))
		if published {
			if _, given := next(t, &s, 0, false, now); given {
				t.Error("a second change is given before the first is written")
			}
		}
	}
}
