// A crash while claims share a step loses no original state and blocks no claim.

package prepare_test

import (
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// sharingScene describes a fake node, a call that the tests interrupt, and claims that can all be
// prepared at the same time afterwards.
type sharingScene struct {
	name   string
	claims []*resourceapi.ResourceClaim
	before func(*testing.T, *world, *plugin)
	call   call
}

func withPrepared(claims ...*resourceapi.ResourceClaim) func(*testing.T, *world, *plugin) {
	return func(t *testing.T, _ *world, p *plugin) {
		for _, c := range claims {
			mustPrepare(t, p, c)
		}
	}
}

// withRestart prepares the claims. After that it resets all GPUs and ends all MPS daemons while the
// claims are still prepared.
func withRestart(claims ...*resourceapi.ResourceClaim) func(*testing.T, *world, *plugin) {
	return func(t *testing.T, w *world, p *plugin) {
		withPrepared(claims...)(t, w, p)
		for _, gpu := range []string{gpu0, gpu1} {
			w.hardware.of(t, gpu).RemoveInstances()
			w.hardware.of(t, gpu).ForgetSettings()
		}
		clear(w.daemons.running)
	}
}

func sharingScenes() []sharingScene {
	var all []sharingScene
	for _, s := range []struct {
		name  string
		first *resourceapi.ResourceClaim
		next  *resourceapi.ResourceClaim // nil if no claim can join
	}{
		{"time slices", sliced, nil}, {"MPS", grouped, nil}, {"MPS on partitions", parted, nil}, {"a fraction", part1, part2},
		{"a fraction of a partition", migPart1, migPart2}, {"a plain share", long1, long2},
	} {
		alone := []*resourceapi.ResourceClaim{s.first}
		all = append(all,
			sharingScene{s.name + ": first", alone, withPrepared(), prepares(s.first)},
			sharingScene{s.name + ": last leaves", alone, withPrepared(s.first), unprepares(s.first)},
			sharingScene{s.name + ": reconcile", alone, withRestart(s.first), reconciles},
		)
		if s.next == nil {
			continue
		}
		both := []*resourceapi.ResourceClaim{s.first, s.next}
		all = append(all,
			sharingScene{s.name + ": joined", both, withPrepared(s.first), prepares(s.next)},
			sharingScene{s.name + ": first leaves", both, withPrepared(s.first, s.next), unprepares(s.first)},
		)
	}
	return append(all,
		sharingScene{"a fraction of a partition: again", []*resourceapi.ResourceClaim{migPart1}, withRestart(migPart1), prepares(migPart1)},
		sharingScene{"a fraction: allocated elsewhere", []*resourceapi.ResourceClaim{moved, part2}, withPrepared(part1, part2), prepares(moved)},
		sharingScene{"a fraction: sharing changed", []*resourceapi.ResourceClaim{sliced}, withPrepared(grouped), prepares(sliced)})
}

// interruptedScene returns the fake node of scene s right before the call that the tests interrupt.
// The result "found" is the time slice that gpu0 must have again after the last claim left.
func interruptedScene(t *testing.T, s sharingScene) (w *world, h *hardware, p *plugin, found device.TimeSlice) {
	t.Helper()
	w = newWorld(t)
	h = withMPS(w)
	h.of(t, gpu0).TimeSlice = device.TimeSliceMedium
	p = w.plugin(t)
	s.before(t, w, p)
	w.scan()
	h.takeCalls()
	if slices.Contains(w.holders(), steps.SharedKey(gpu0, steps.TimeSliceKind)+".json") {
		return w, h, p, device.TimeSliceMedium
	}
	return w, h, p, h.of(t, gpu0).TimeSlice
}

// checkClaimsGoOn starts a new plugin process. It fails the test unless Reconcile
// repairs the node and all claims can be prepared and unprepared.
func checkClaimsGoOn(t *testing.T, w *world, h *hardware, claims []*resourceapi.ResourceClaim, found device.TimeSlice) {
	t.Helper()
	h.fault = nil
	p := w.plugin(t)
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.scan()
	for range 2 { // the first pass may skip what the dead process left blocked
		if err := p.Reconcile(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	checkSharedState(t, w, h, p, found)
	checkRecordsMatchHardware(t, w, h, p, nil)
	for _, c := range claims {
		mustPrepare(t, p, c)
		w.scan()
	}
	checkSharedState(t, w, h, p, found)
	checkRecordsMatchHardware(t, w, h, p, nil)
	mustLeave(t, w, h, p, found, claims...)
	mustPrepare(t, p, newClaim("whole", allocated("a", gpu0), allocated("b", gpu1)))
}

func forEachScene(t *testing.T, test func(*testing.T, sharingScene)) {
	t.Helper()
	for _, s := range sharingScenes() {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			test(t, s)
		})
	}
}

// begin returns an attempt of the scene's call, after which all claims must go on.
func (s sharingScene) begin(t *testing.T) attempt {
	t.Helper()
	w, h, p, found := interruptedScene(t, s)
	boot := w.bootID
	return attempt{w, s.call.on(t, p), func(t *testing.T) {
		if w.bootID != boot {
			found = device.TimeSliceDefault
		}
		checkClaimsGoOn(t, w, h, s.claims, found)
	}}
}

func TestSharedStateIsRestoredAfterFailedCalls(t *testing.T) {
	forEachScene(t, func(t *testing.T, s sharingScene) {
		least := 1
		if strings.Contains(s.name, "first leaves") {
			least = 0 // what other claims hold stays as it is
		}
		// The test does not kill the plugin right before a call, because that equals killing it after the
		// previous disk write.
		for _, interrupted := range []interruption{failedCall, lostAnswer, killAfter} {
			interrupted.everywhere(t, least, s.begin)
		}
	})
}

func TestSharedStateIsRestoredAfterFailedWrites(t *testing.T) {
	forEachScene(t, func(t *testing.T, s sharingScene) {
		least := 5
		if strings.Contains(s.name, "reconcile") || strings.Contains(s.name, "again") {
			least = 0 // the records stay as they are
		}
		for _, interrupted := range atWrites {
			interrupted.everywhere(t, least, s.begin)
		}
	})
}

// The plugin dies in one claim's Prepare or Unprepare. Prepare of another claim that shares the
// same setting, daemon or partition must succeed, even if no Reconcile ran in between.
func TestPrepareJoinsAfterCrashWithoutReconcile(t *testing.T) {
	for _, c := range []struct {
		name        string
		first, next *resourceapi.ResourceClaim
	}{{"a fraction", part1, part2}, {"a fraction of a partition", migPart1, migPart2}, {"a plain share", long1, long2}} {
		both := []*resourceapi.ResourceClaim{c.next, c.first}
		for _, s := range []sharingScene{
			{c.name + ": first", both, withPrepared(), prepares(c.first)},
			{c.name + ": last leaves", both, withPrepared(c.first), unprepares(c.first)},
		} {
			t.Run(s.name, func(t *testing.T) {
				for _, death := range []interruption{killBefore, killAfter, killAtWrite} {
					death.everywhere(t, 1, func(t *testing.T) attempt {
						a := s.begin(t)
						goOn := a.check
						a.check = func(t *testing.T) {
							mustPrepare(t, a.plugin(t), c.next)
							a.scan()
							goOn(t)
						}
						return a
					})
				}
			})
		}
	}
}
