package rollout

import (
	"math/rand/v2"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// taintedSlices returns n slices with one device each. The device of slice i has a taint with the
// value values[i], if there is one.
func taintedSlices(n int, values map[int]string) []resourceslice.Slice {
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

func countDiffering(a, b []resourceslice.Slice) int {
	n := 0
	for i := range a {
		if i >= len(b) || !apiequality.Semantic.DeepEqual(a[i], b[i]) {
			n++
		}
	}
	return n
}

// The test changes taints at random, while a fake controller writes the slices at random times and
// sometimes fails. Of the slices passed to the controller, at most one may differ from those it has
// written.
func TestRolloutSendsOneChangedSliceAtATime(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 0))
		now := time.Now()
		start := taintedSlices(5, nil)
		stored, writes := start, int64(5)
		s := Rollout{sent: start, target: start, writesAtSend: writes, sentAt: now.Add(-time.Minute)}
		away, failing := false, false
		var writing []resourceslice.Slice
		for range 300 {
			now = now.Add(time.Duration(r.IntN(30)) * time.Millisecond)
			switch r.IntN(6) {
			case 0:
				s.SetTarget(taintedSlices(5, map[int]string{r.IntN(5): "x", r.IntN(5): "y", r.IntN(5): ""}))
			case 1:
				away = r.IntN(3) == 0
			}
			if sent, ok := s.Next(writes, failing, now); ok {
				if n := countDiffering(stored, sent); n > 1 {
					t.Fatalf("seed %d: the controller must write %d slices at once", seed, n)
				}
			}
			switch {
			case away:
				failing, writing = true, nil
			case writing != nil && r.IntN(2) == 0:
				stored, writing, failing = writing, nil, false
				writes++
			case writing == nil && countDiffering(stored, s.sent) == 0:
				failing = false
			case writing == nil && r.IntN(2) == 0:
				writing = s.sent
			}
		}
		for range 50 { // after some more steps the whole target must be stored
			now = now.Add(writeTimeout)
			_, _ = s.Next(writes, false, now)
			if sent := s.sent; countDiffering(stored, sent) > 0 {
				stored = sent
				writes++
			}
		}
		if countDiffering(stored, s.target) > 0 || s.Pending() {
			t.Fatalf("seed %d: stored %v, target %v", seed, stored, s.target)
		}
	}
}

func TestDeviceChangeIsSentAtOnce(t *testing.T) {
	now := time.Now()
	s := Rollout{sent: taintedSlices(3, nil), sentAt: now, writesAtSend: 7}
	s.SetTarget(taintedSlices(4, map[int]string{0: "x", 1: "x"}))
	sent, ok := s.Next(7, false, now)
	if !ok || countDiffering(sent, s.target) != 0 || s.Pending() {
		t.Errorf("%v, %v", sent, ok)
	}
	// The number of writes does not grow, as if the controller had nothing to write. The next slices
	// must be sent only after writeTimeout.
	s.SetTarget(taintedSlices(4, map[int]string{2: "x"}))
	if _, ok := s.Next(7, false, now); ok {
		t.Error("sent although the last slices may not be written")
	}
	if sent, ok := s.Next(7, false, now.Add(writeTimeout)); !ok || countDiffering(sent, s.sent) != 0 {
		t.Errorf("%v, %v", sent, ok)
	}
}

func TestEmptyPoolIsSent(t *testing.T) {
	now := time.Now()
	s := Rollout{sent: taintedSlices(3, nil), sentAt: now}
	s.SetTarget(nil)
	if sent, ok := s.Next(0, false, now); !ok || len(sent) != 0 {
		t.Errorf("%v, %v", sent, ok)
	}
}

func TestRolloutDoesNotWaitForPublishedSlices(t *testing.T) {
	now := time.Now()
	for _, published := range []bool{true, false} {
		s := New(taintedSlices(3, nil), published, now)
		s.SetTarget(taintedSlices(3, map[int]string{1: "x"}))
		if slices, sent := s.Next(0, false, now); sent != published {
			t.Errorf("published %v: the first change was sent: %v, %v", published, sent, slices)
		}
		s.SetTarget(taintedSlices(3, map[int]string{1: "x", 2: "x"}))
		if published {
			if _, sent := s.Next(0, false, now); sent {
				t.Error("a second change was sent before the first was written")
			}
		}
	}
}
