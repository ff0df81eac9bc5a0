package prepare_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/claimlock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// Claims that share a GPU setting, daemon or partition must be able to leave it in any order, even
// if some or all of their records are unreadable.
func TestClaimsLeaveSharedStateWithUnreadableRecords(t *testing.T) {
	for _, s := range sharingScenes() {
		if !strings.HasSuffix(s.name, "joined") && !strings.HasSuffix(s.name, "first") {
			continue
		}
		for _, spoilt := range [][]int{{0}, {len(s.claims) - 1}, {0, len(s.claims) - 1}} {
			for _, backwards := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %v, backwards %v", s.name, spoilt, backwards), func(t *testing.T) {
					w := newWorld(t)
					h := withMPS(w)
					h.of(t, gpu0).slice = device.TimeSliceMedium
					for _, c := range s.claims {
						mustPrepare(t, w.plugin(t), c)
						w.scan()
					}
					for _, i := range spoilt {
						w.disk.Put(recordFile(t, w, string(s.claims[i].UID)), []byte("{"))
					}
					p := w.plugin(t)
					if err := p.Recover(t.Context()); err != nil {
						t.Fatal(err)
					}
					if err := p.Reconcile(t.Context()); err != nil {
						t.Fatal(err)
					}
					for i := range s.claims {
						c := s.claims[i]
						if backwards {
							c = s.claims[len(s.claims)-1-i]
						}
						mustUnprepare(t, p, c.UID)
					}
					checkSharedState(t, w, h, p, device.TimeSliceMedium)
					checkClean(t, w)
					if left := w.holders(); len(left) != 0 {
						t.Errorf("holders left: %q", left)
					}
					// Instances that were created for one claim alone stay, because without the claim's record
					// nothing proves that this driver created them.
					if s.claims[0] != parted && len(h.of(t, gpu0).instances) != 0 {
						t.Errorf("left: %s", steps.DescribeInstances(h.of(t, gpu0).state().MIG.Instances...))
					}
				})
			}
		}
	}
}

func TestRePrepareWithUnreadableRecordJoinsAgain(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	mustPrepare(t, p, part1)
	mustPrepare(t, p, part2)
	w.disk.Put(recordFile(t, w, "uid-c"), nil)
	mustPrepare(t, p, part1)
	checkSharedState(t, w, h, p, device.TimeSliceDefault)
	mustUnprepare(t, p, part2.UID)
	mustUnprepare(t, p, part1.UID)
	checkSharedState(t, w, h, p, device.TimeSliceDefault)
	checkClean(t, w)
}

func TestHolderFileWithWrongStepKindIsAnError(t *testing.T) {
	w := newWorld(t)
	withMPS(w)
	p := w.plugin(t)
	other, err := steps.NewShared(gpu0, []string{gpu0}, &steps.ComputeMode{SettingState: steps.SettingState[device.ComputeMode]{GPU: gpu0}})
	if err != nil {
		t.Fatal(err)
	}
	name, _ := device.ParseName(migShare0)
	if err := p.Records.SaveHolder(checkpoint.Holder{Key: steps.PartitionKey(name), GPUs: []string{gpu0}, State: checkpoint.Applied,
		BootID: w.bootID, Step: other.Want}); err != nil {
		t.Fatal(err)
	}
	_, err = p.Prepare(t.Context(), migPart1)
	if cause.Of(err) != cause.Record || !strings.Contains(err.Error(), steps.PartitionKey(name)) ||
		!strings.Contains(err.Error(), steps.ComputeModeKind) ||
		strings.Contains(err.Error(), "%!") {
		t.Errorf("cause %s: %v", cause.Of(err), err)
	}
}

// If the file that lists the claims sharing a setting is unreadable, no further claim can share the
// setting. Claims that already share it must keep working, and the last one to leave must reset it
// to the default.
func TestUnreadableHolderRefusesJoinsAndEndsInDefault(t *testing.T) {
	for _, s := range sharingScenes() {
		if !strings.HasSuffix(s.name, "joined") {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			w := newWorld(t)
			h := withMPS(w)
			h.of(t, gpu0).slice = device.TimeSliceMedium
			p := w.plugin(t)
			for _, c := range s.claims {
				mustPrepare(t, p, c)
			}
			w.scan()
			for _, file := range w.holders() {
				w.disk.Put(filepath.Join(state, "holders", file), []byte("{}"))
			}
			third := s.claims[0].DeepCopy()
			third.Name, third.UID = "third", "uid-third"
			if _, err := p.Prepare(t.Context(), third); cause.Of(err) != cause.Held ||
				!strings.Contains(err.Error(), "it is unknown which claims share") {
				t.Errorf("cause %s: %v", cause.Of(err), err)
			}
			if s.claims[0] != migPart1 { // only the lost file proved that the driver created the MIG instance
				h.of(t, gpu0).forget()
				clear(w.daemons.running)
				if err := p.Reconcile(t.Context()); err != nil {
					t.Fatal(err)
				}
				if w.daemons.running[share0].ID == "" && h.of(t, gpu0).slice != device.TimeSliceLong {
					t.Errorf("not maintained: %v, %d", w.daemons.running, h.of(t, gpu0).slice)
				}
			}
			mustUnprepare(t, p, s.claims[0].UID)
			if len(w.holders()) == 0 {
				t.Error("the first claim to leave removed the shared state")
			}
			mustUnprepare(t, p, s.claims[1].UID)
			if s := h.of(t, gpu0); s.slice != device.TimeSliceDefault && s.slice != device.TimeSliceMedium || s.mode != device.ComputeDefault ||
				len(w.daemons.running) != 0 || len(w.holders()) != 0 {
				t.Errorf("left: time slice %d, compute mode %s, %v, %q", s.slice, s.mode, w.daemons.running, w.holders())
			}
			checkClean(t, w)
		})
	}
}

func TestSharedStateOfRecordlessClaimsIsRestored(t *testing.T) {
	alone := shareBy(newClaim("alone", allocated("r", gpu1)), "GpuConfig", byMPS)
	for _, on0 := range []*resourceapi.ResourceClaim{part1, sliced} {
		for _, unreadable := range []bool{false, true} {
			w := newWorld(t)
			h := withMPS(w)
			p := w.plugin(t)
			mustPrepare(t, p, on0)
			mustPrepare(t, p, alone)
			for _, c := range []*resourceapi.ResourceClaim{on0, alone} {
				if err := p.Records.Remove(c.UID); err != nil {
					t.Fatal(err)
				}
			}
			for _, file := range w.holders() {
				if unreadable {
					w.disk.Put(filepath.Join(state, "holders", file), nil)
				}
			}
			if err := p.Recover(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := p.Reconcile(t.Context()); err != nil {
				t.Fatal(err)
			}
			if len(w.holders()) != 0 {
				t.Errorf("unreadable %v: left: %q", unreadable, w.holders())
			}
			checkSharedState(t, w, h, p, device.TimeSliceDefault)
		}
	}
}

// Reconcile must remove the unfinished file of a shared setting if there is no finished one,
// because no claim would remove it.
func TestUnfinishedHolderFileIsRemoved(t *testing.T) {
	for _, key := range []string{steps.SharedKey(gpu0, steps.TimeSliceKind), steps.SharedKey("uid-c-0", steps.MPSDaemonKind)} {
		w := newWorld(t)
		withMPS(w)
		p := w.plugin(t)
		var repairs []string
		p.OnRepaired = func(r prepare.Repair) { repairs = append(repairs, r.Kind+" "+r.Object) }
		w.disk.Put(filepath.Join(state, "holders", ".tmp-"+key+".json"), []byte("{"))
		if err := p.Reconcile(t.Context()); err != nil {
			t.Error(err)
		}
		if left := w.holders(); len(left) != 0 || !slices.Equal(repairs, []string{"unfinished-write " + key}) {
			t.Errorf("left %q, repaired %q", left, repairs)
		}
		checkClean(t, w)
	}
}

func TestOneFailedRepairBlocksNoOther(t *testing.T) {
	for _, broken := range []string{"GPU-0", "GPU-1"} {
		w := newWorld(t)
		h := withMPS(w)
		p := w.plugin(t)
		mustPrepare(t, p, shareBy(newClaim("a", allocated("r", gpu0)), "GpuConfig", slicing("Long")))
		mustPrepare(t, p, shareBy(newClaim("b", allocated("r", gpu1)), "GpuConfig", slicing("Long")))
		for _, uid := range []types.UID{"uid-a", "uid-b"} {
			if err := p.Records.Remove(uid); err != nil {
				t.Fatal(err)
			}
		}
		for _, file := range w.holders() {
			w.disk.Put(filepath.Join(state, "holders", file), nil)
		}
		p.with(func(n *steps.Node) { n.Partitions = &muteTimeSlice{h, broken} })
		if err := p.Reconcile(t.Context()); err == nil {
			t.Error("no error was reported")
		}
		if left := w.holders(); len(left) != 1 {
			t.Errorf("%s is broken: left: %q", broken, left)
		}
		for _, gpu := range []string{gpu0, gpu1} {
			if s := h.of(t, gpu); s.uuid != broken && s.slice != device.TimeSliceDefault {
				t.Errorf("%s has time slice %d", gpu, s.slice)
			}
		}
		p.with(func(n *steps.Node) { n.Partitions = h })
		if err := p.Reconcile(t.Context()); err != nil || len(w.holders()) != 0 {
			t.Errorf("%v, left: %q", err, w.holders())
		}
		checkSharedState(t, w, h, p, device.TimeSliceDefault)
	}
}

// If a time slice cannot be restored, the last claim must still be unprepared and the GPU must stay
// usable. Reconcile must restore the time slice later.
func TestFailedTimeSliceRestoreIsRetried(t *testing.T) {
	for name, c := range map[string]struct {
		meanwhile func(*testing.T, *world, *plugin)
		found     device.TimeSlice
	}{
		"no other claim": {func(*testing.T, *world, *plugin) {}, device.TimeSliceMedium},
		"another claim uses the whole GPU": {func(t *testing.T, _ *world, p *plugin) {
			mustPrepare(t, p, newClaim("whole", allocated("r", gpu0)))
		}, device.TimeSliceMedium},
		"a reboot": {func(_ *testing.T, w *world, _ *plugin) { w.reboot() }, device.TimeSliceDefault},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			h := withMPS(w)
			h.of(t, gpu0).slice = device.TimeSliceMedium
			p := w.plugin(t)
			mustPrepare(t, p, long1)
			p.with(func(n *steps.Node) { n.Partitions = &muteTimeSlice{h, "GPU-0"} })
			mustUnprepare(t, p, long1.UID)
			checkClean(t, w)
			for range 2 {
				if err := p.Reconcile(t.Context()); err != nil || len(w.holders()) != 1 {
					t.Fatalf("%v, what is to be set back: %q", err, w.holders())
				}
			}
			if _, err := p.Prepare(t.Context(), long2); err == nil || !strings.Contains(err.Error(), "time slices of "+gpu0) {
				t.Errorf("the error does not say that time slices cannot be set: %v", err)
			}
			c.meanwhile(t, w, p)
			p = w.plugin(t)
			if err := p.Reconcile(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := h.of(t, gpu0).slice; got != c.found || len(w.holders()) != 0 {
				t.Errorf("the time slice is %d, left: %q", got, w.holders())
			}
			mustUnprepare(t, p, "uid-whole")
			mustPrepare(t, p, long2)
			mustUnprepare(t, p, long2.UID)
			checkSharedState(t, w, h, p, c.found)
			checkClean(t, w)
		})
	}
}

// The last claim's time slice could not be restored, so the original value is still in the file of
// the shared setting. A new claim must keep that value and restore it in the end.
func TestNewHolderKeepsOriginalTimeSlice(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	h.of(t, gpu0).slice = device.TimeSliceMedium
	p := w.plugin(t)
	mustPrepare(t, p, long1)
	p.with(func(n *steps.Node) { n.Partitions = &muteTimeSlice{h, "GPU-0"} })
	mustUnprepare(t, p, long1.UID)
	p.with(func(n *steps.Node) { n.Partitions = h })
	short := shareBy(newClaim("short", plain("r", share0)), "GpuConfig", slicing("Short"))
	mustPrepare(t, p, short)
	checkSharedState(t, w, h, p, device.TimeSliceMedium)
	mustUnprepare(t, p, short.UID)
	checkSharedState(t, w, h, p, device.TimeSliceMedium)
	checkClean(t, w)
}

// If the compute mode cannot be restored, Unprepare must fail: another claim could not use a GPU
// that stayed in exclusive mode.
func TestFailedComputeModeRestoreKeepsClaim(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	mustPrepare(t, p, part1)
	h.fault = func(int, bool) error {
		if h.of(t, gpu0).mode == device.ComputeExclusiveProcess && len(w.daemons.running) == 0 {
			return failure(device.FailureReset, "set compute mode", h.card(t, gpu0))
		}
		return nil
	}
	if err := p.Unprepare(t.Context(), part1.UID); err == nil || len(w.records()) != 1 {
		t.Errorf("%v, %q", err, w.records())
	}
	h.fault = nil
	mustUnprepare(t, p, part1.UID)
	checkSharedState(t, w, h, p, device.TimeSliceDefault)
	checkClean(t, w)
}

// muteTimeSlice is a fake node's hardware on which setting the time slice of one GPU always times
// out.
type muteTimeSlice struct {
	*hardware
	uuid string
}

func (m *muteTimeSlice) SetTimeSlice(ctx context.Context, c device.Card, slice device.TimeSlice) error {
	if c.UUID == m.uuid {
		return failure(device.FailureTimeout, "set time slice", c)
	}
	return m.hardware.SetTimeSlice(ctx, c, slice)
}

// Two plugin instances may both find the same unreadable file of a shared setting. So Reconcile
// must quarantine it only under the lock of the GPU or claim.
func TestUnreadableHolderIsQuarantinedUnderItsLock(t *testing.T) {
	for _, c := range []struct {
		claim *resourceapi.ResourceClaim
		lock  lock.Name
	}{{part1, lock.Name{File: gpu0}}, {grouped, claimlock.ClaimName(grouped.UID)}} {
		w := newWorld(t)
		withMPS(w)
		mustPrepare(t, w.plugin(t), c.claim)
		key := ""
		for _, file := range w.holders() {
			if strings.HasSuffix(file, "_"+steps.MPSDaemonKind+".json") {
				key = strings.TrimSuffix(file, ".json")
				w.disk.Put(filepath.Join(state, "holders", file), nil)
			}
		}
		synctest.Test(t, func(t *testing.T) {
			p := w.plugin(t)
			if err := p.Records.Remove(c.claim.UID); err != nil {
				t.Fatal(err)
			}
			held, err := p.Locks.Acquire(t.Context(), c.lock)
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Reconcile(t.Context()); cause.Of(err) != cause.Canceled || len(w.daemons.running) != 1 {
				t.Errorf("%s: while another call works on it: %v, %v", key, err, w.daemons.running)
			}
			held.Release()
			if err := p.Reconcile(t.Context()); err != nil || len(w.daemons.running) != 0 {
				t.Errorf("%s: %v, %v", key, err, w.daemons.running)
			}
		})
	}
}

// A DeviceClass may change between two allocations of a claim that are otherwise the same. If the
// sharing configuration changed, Prepare must revert the earlier preparation and prepare the claim
// again.
func TestChangedSharingIsPreparedAnew(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	for _, c := range []struct {
		sharing string
		slice   device.TimeSlice
		mode    device.ComputeMode
		threads int
	}{
		{slicing("Long"), device.TimeSliceLong, device.ComputeDefault, 0},
		{slicing("Short"), device.TimeSliceShort, device.ComputeDefault, 0},
		{byMPS, device.TimeSliceDefault, device.ComputeExclusiveProcess, 0},
		{`{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50}}`, device.TimeSliceDefault, device.ComputeExclusiveProcess, 50},
	} {
		mustPrepare(t, p, shareBy(newClaim("c", allocated("r", gpu0)), "GpuConfig", c.sharing))
		threads := w.daemons.running["uid-c-0"].ThreadPercentage
		if s := h.of(t, gpu0); s.slice != c.slice || s.mode != c.mode || (threads != nil) != (c.threads > 0) {
			t.Errorf("%s: time slice %d, compute mode %s, threads %v", c.sharing, s.slice, s.mode, threads)
		}
		checkSharedState(t, w, h, p, device.TimeSliceDefault)
	}
	mustPrepare(t, p, newClaim("c", allocated("r", gpu0)))
	if len(w.holders()) != 0 || len(w.daemons.running) != 0 {
		t.Errorf("left: %q, %v", w.holders(), w.daemons.running)
	}
}

// The kubelet may call Prepare for a claim that got a new GPU before it called Unprepare for the
// old one, and then calls Unprepare only once. No setting, daemon or record may be left of either
// GPU.
func TestReallocatedClaimLeavesSharedState(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	for _, c := range []string{part1.Name, part2.Name} {
		mustPrepare(t, p, newClaim(c, fraction("r", share0, "10Gi", "30")))
	}
	mustPrepare(t, p, moved)
	if d := w.daemons.running; len(d) != 2 || d[share0].ID == "" || d[share1].ID == "" {
		t.Errorf("the daemons are %v", d)
	}
	mustUnprepare(t, p, moved.UID)
	if d := w.daemons.running; len(d) != 1 || d[share0].ID == "" || h.of(t, gpu1).mode != device.ComputeDefault {
		t.Errorf("the daemons are %v", d)
	}
	mustUnprepare(t, p, part2.UID)
	checkSharedState(t, w, h, p, device.TimeSliceDefault)
	checkClean(t, w)
}

// The plugin dies in one claim's Prepare or Unprepare. Prepare of another claim that shares the
// same setting, daemon or partition must succeed, even if no Reconcile ran in between.
func TestPrepareJoinsAfterCrashWithoutReconcile(t *testing.T) {
	for _, c := range []struct {
		name        string
		first, next *resourceapi.ResourceClaim
	}{{"a fraction", part1, part2}, {"a fraction of a partition", migPart1, migPart2}, {"a plain share", long1, long2}} {
		for _, s := range []sharingScene{
			{c.name + ": first", []*resourceapi.ResourceClaim{c.next, c.first}, withPrepared(), prepares(c.first)},
			{c.name + ": last leaves", []*resourceapi.ResourceClaim{c.next, c.first}, withPrepared(c.first), unprepares(c.first)},
		} {
			for _, fault := range []string{"kill -9 before", "kill -9 after"} {
				for n := 1; ; n++ {
					w, h, p, found := interruptedScene(t, s)
					h.fault = func(call int, after bool) error {
						if call != n {
							return nil
						}
						return faults[fault](w, after)
					}
					_ = s.call(t, p)
					if !w.disk.Stopped() {
						break
					}
					h.fault = nil
					t.Run(fmt.Sprintf("%s, %s at call %d", s.name, fault, n), func(t *testing.T) {
						checkJoins(t, w, h, c.next, s.claims, found)
					})
				}
			}
			for n := 1; ; n++ {
				w, h, p, found := interruptedScene(t, s)
				w.disk.StopAt(n)
				_ = s.call(t, p)
				if !w.disk.Stopped() {
					break
				}
				t.Run(fmt.Sprintf("%s, at write %d", s.name, n), func(t *testing.T) {
					checkJoins(t, w, h, c.next, s.claims, found)
				})
			}
		}
	}
}

func checkJoins(t *testing.T, w *world, h *hardware, next *resourceapi.ResourceClaim, claims []*resourceapi.ResourceClaim,
	found device.TimeSlice) {
	t.Helper()
	w.disk.Restart()
	mustPrepare(t, w.plugin(t), next)
	w.scan()
	checkClaimsGoOn(t, w, h, claims, found)
}
