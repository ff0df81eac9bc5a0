package prepare

import (
	"context"
	"errors"
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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// The records of the first, of the last and of all who share cannot be read: each claim still leaves what it shared, in any order.
func TestWithUnreadableRecordsWhatIsSharedIsLeftAllTheSame(t *testing.T) {
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
					shares(t, w, h, p, device.TimeSliceMedium)
					clean(t, w)
					if left := w.holders(); len(left) != 0 {
						t.Errorf("holders left: %q", left)
					}
					// The instances of a claim alone stay, because nothing proves any more that they are its.
					if s.claims[0] != parted && len(h.of(t, gpu0).instances) != 0 {
						t.Errorf("left: %s", describe(h.of(t, gpu0).state().MIG.Instances...))
					}
				})
			}
		}
	}
}

func TestAClaimWhoseRecordCannotBeReadAndThatComesAgainSharesAnew(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	mustPrepare(t, p, part1)
	mustPrepare(t, p, part2)
	w.disk.Put(recordFile(t, w, "uid-c"), nil)
	mustPrepare(t, p, part1)
	shares(t, w, h, p, device.TimeSliceDefault)
	mustUnprepare(t, p, part2.UID)
	mustUnprepare(t, p, part1.UID)
	shares(t, w, h, p, device.TimeSliceDefault)
	clean(t, w)
}

func TestAFileOfAPartitionThatHoldsAnotherStepIsAnErrorThatNamesBoth(t *testing.T) {
	w := newWorld(t)
	withMPS(w)
	p := w.plugin(t)
	other, err := storeOne(&computeMode{setting[device.ComputeMode]{GPU: gpu0}})
	if err != nil {
		t.Fatal(err)
	}
	name, _ := device.ParseName(migShare0)
	if err := p.Records.SaveHolder(checkpoint.Holder{Key: partKey(name), GPUs: []string{gpu0}, State: checkpoint.Applied, BootID: w.bootID, Step: other}); err != nil {
		t.Fatal(err)
	}
	_, err = p.Prepare(t.Context(), migPart1)
	if CauseOf(err) != CauseRecord || !strings.Contains(err.Error(), partKey(name)) || !strings.Contains(err.Error(), computeModeKind) || strings.Contains(err.Error(), "%!") {
		t.Errorf("cause %s: %v", CauseOf(err), err)
	}
}

// Who holds what cannot be told any more, nor what was found: nobody joins, who holds it is looked after, and the last sets what is the default.
func TestWithAnUnreadableHolderNobodyJoinsAndTheLastSetsTheDefault(t *testing.T) {
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
			if _, err := p.Prepare(t.Context(), third); CauseOf(err) != CauseHeld || !strings.Contains(err.Error(), "cannot be told who holds") {
				t.Errorf("cause %s: %v", CauseOf(err), err)
			}
			if s.claims[0] != migPart1 { // whether an instance is ours is in the file alone
				h.of(t, gpu0).forget()
				clear(w.daemons.running)
				if err := p.Reconcile(t.Context()); err != nil {
					t.Fatal(err)
				}
				if w.daemons.running[share0].ID == "" && h.of(t, gpu0).slice != device.TimeSliceLong {
					t.Errorf("not looked after: %v, %d", w.daemons.running, h.of(t, gpu0).slice)
				}
			}
			mustUnprepare(t, p, s.claims[0].UID)
			if len(w.holders()) == 0 {
				t.Error("the first who left has left nothing for the others")
			}
			mustUnprepare(t, p, s.claims[1].UID)
			if s := h.of(t, gpu0); s.slice != device.TimeSliceDefault && s.slice != device.TimeSliceMedium || s.mode != device.ComputeDefault || len(w.daemons.running) != 0 || len(w.holders()) != 0 {
				t.Errorf("left: time slice %d, compute mode %s, %v, %q", s.slice, s.mode, w.daemons.running, w.holders())
			}
			clean(t, w)
		})
	}
}

func TestWhatClaimsWithoutARecordSharedIsSetBack(t *testing.T) {
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
			shares(t, w, h, p, device.TimeSliceDefault)
		}
	}
}

// Each of two GPUs has a file that cannot be read and that nobody holds; one of the GPUs does not answer.
// Its file was set aside, or the record that names it: no claim takes it along any more.
func TestTheBeginningOfAFileThatNoClaimNamesIsRemoved(t *testing.T) {
	for _, key := range []string{sharedKey(gpu0, timeSliceKind), sharedKey("uid-c-0", mpsDaemonKind)} {
		w := newWorld(t)
		withMPS(w)
		p := w.plugin(t)
		var repairs []string
		p.Repaired = func(r Repair) { repairs = append(repairs, r.Kind+" "+r.Object) }
		w.disk.Put(filepath.Join(state, "holders", ".tmp-"+key+".json"), []byte("{"))
		if err := p.Reconcile(t.Context()); err != nil {
			t.Error(err)
		}
		if left := w.holders(); len(left) != 0 || !slices.Equal(repairs, []string{"unfinished-write " + key}) {
			t.Errorf("left %q, repaired %q", left, repairs)
		}
		clean(t, w)
	}
}

func TestWhatCannotBePutInOrderKeepsNothingElseFromIt(t *testing.T) {
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
		p.Partitions = &mute{h, broken}
		if err := p.Reconcile(t.Context()); err == nil {
			t.Error("nobody was told")
		}
		if left := w.holders(); len(left) != 1 {
			t.Errorf("%s is broken: left: %q", broken, left)
		}
		for _, gpu := range []string{gpu0, gpu1} {
			if s := h.of(t, gpu); s.uuid != broken && s.slice != device.TimeSliceDefault {
				t.Errorf("%s has time slice %d", gpu, s.slice)
			}
		}
		p.Partitions = h
		if err := p.Reconcile(t.Context()); err != nil || len(w.holders()) != 0 {
			t.Errorf("%v, left: %q", err, w.holders())
		}
		shares(t, w, h, p, device.TimeSliceDefault)
	}
}

// That a time slice cannot be set back keeps no Pod from ending and no GPU from others.
func TestATimeSliceThatCannotBeSetBackIsSetBackLater(t *testing.T) {
	for name, c := range map[string]struct {
		meanwhile func(*testing.T, *world, *Preparer)
		found     device.TimeSlice
	}{
		"nobody comes": {func(*testing.T, *world, *Preparer) {}, device.TimeSliceMedium},
		"another claim has the GPU whole": {func(t *testing.T, _ *world, p *Preparer) {
			mustPrepare(t, p, newClaim("whole", allocated("r", gpu0)))
		}, device.TimeSliceMedium},
		"the node is started again": {func(_ *testing.T, w *world, _ *Preparer) { w.reboot() }, device.TimeSliceDefault},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			h := withMPS(w)
			h.of(t, gpu0).slice = device.TimeSliceMedium
			p := w.plugin(t)
			mustPrepare(t, p, long1)
			p.Partitions = &mute{h, "GPU-0"}
			mustUnprepare(t, p, long1.UID)
			clean(t, w)
			for range 2 {
				if err := p.Reconcile(t.Context()); err != nil || len(w.holders()) != 1 {
					t.Fatalf("%v, what is to be set back: %q", err, w.holders())
				}
			}
			if _, err := p.Prepare(t.Context(), long2); err == nil || !strings.Contains(err.Error(), "time slices of "+gpu0) {
				t.Errorf("who wants time slices of its own is not told that they cannot be set: %v", err)
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
			shares(t, w, h, p, c.found)
			clean(t, w)
		})
	}
}

// The next claim finds what the one before it has found.
func TestWhoWantsTimeSlicesBeforeTheyWereSetBackRemembersWhatWasFound(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	h.of(t, gpu0).slice = device.TimeSliceMedium
	p := w.plugin(t)
	mustPrepare(t, p, long1)
	p.Partitions = &mute{h, "GPU-0"}
	mustUnprepare(t, p, long1.UID)
	p.Partitions = h
	short := shareBy(newClaim("short", plain("r", share0)), "GpuConfig", slicing("Short"))
	mustPrepare(t, p, short)
	shares(t, w, h, p, device.TimeSliceMedium)
	mustUnprepare(t, p, short.UID)
	shares(t, w, h, p, device.TimeSliceMedium)
	clean(t, w)
}

// With a GPU in a mode that lets one process in, who has it next could not use it.
func TestAComputeModeThatCannotBeSetBackKeepsItsClaim(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	mustPrepare(t, p, part1)
	h.fault = func(int, bool) error {
		if h.of(t, gpu0).mode == device.ComputeExclusiveProcess && len(w.daemons.running) == 0 {
			return failure(nvidia.CodeReset, "set compute mode", h.card(t, gpu0))
		}
		return nil
	}
	if err := p.Unprepare(t.Context(), part1.UID); err == nil || len(w.records()) != 1 {
		t.Errorf("%v, %q", err, w.records())
	}
	h.fault = nil
	mustUnprepare(t, p, part1.UID)
	shares(t, w, h, p, device.TimeSliceDefault)
	clean(t, w)
}

// mute is hardware of which one GPU does not answer.
type mute struct {
	*hardware
	uuid string
}

func (m *mute) SetTimeSlice(ctx context.Context, c nvidia.Card, slice device.TimeSlice) error {
	if c.UUID == m.uuid {
		return failure(nvidia.CodeTimeout, "set time slice", c)
	}
	return m.hardware.SetTimeSlice(ctx, c, slice)
}

// Two instances of the plugin may come upon the same file.
func TestAFileThatCannotBeReadIsSetAsideUnderTheLockOfWhoIsInIt(t *testing.T) {
	for _, c := range []struct {
		claim *resourceapi.ResourceClaim
		lock  lock.Name
	}{{part1, lock.Name{File: gpu0}}, {grouped, claimLock(grouped.UID)}} {
		w := newWorld(t)
		withMPS(w)
		mustPrepare(t, w.plugin(t), c.claim)
		key := ""
		for _, file := range w.holders() {
			if strings.HasSuffix(file, "_"+mpsDaemonKind+".json") {
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
			if err := p.unheld(t.Context(), key, errors.New("torn")); CauseOf(err) != CauseCanceled || len(w.daemons.running) != 1 {
				t.Errorf("%s: while another call works on it: %v, %v", key, err, w.daemons.running)
			}
			held.Release()
			if err := p.unheld(t.Context(), key, errors.New("torn")); err != nil || len(w.daemons.running) != 0 {
				t.Errorf("%s: %v, %v", key, err, w.daemons.running)
			}
		})
	}
}

// A class may have changed between two allocations of a claim that are alike in all else.
func TestAClaimThatWantsToShareInAnotherWayIsPreparedAnew(t *testing.T) {
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
		shares(t, w, h, p, device.TimeSliceDefault)
	}
	mustPrepare(t, p, newClaim("c", allocated("r", gpu0)))
	if len(w.holders()) != 0 || len(w.daemons.running) != 0 {
		t.Errorf("left: %q, %v", w.holders(), w.daemons.running)
	}
}

// The kubelet may prepare a claim with its new GPU before it has unprepared it with the old one, and unprepares it once.
func TestAClaimThatIsAllocatedElsewhereLeavesWhatItShared(t *testing.T) {
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
	shares(t, w, h, p, device.TimeSliceDefault)
	clean(t, w)
}

// Who joins may be the first to come after a process has died within the first claim's preparation, or while the last was being given back.
func TestWhoComesBeforeAnythingWasPutInOrderSharesAnew(t *testing.T) {
	for _, c := range []struct {
		name        string
		first, next *resourceapi.ResourceClaim
	}{{"a fraction", part1, part2}, {"a fraction of a partition", migPart1, migPart2}, {"a plain share", long1, long2}} {
		for _, s := range []sharingScene{
			{c.name + ": first", []*resourceapi.ResourceClaim{c.next, c.first}, having(), prepares(c.first)},
			{c.name + ": last leaves", []*resourceapi.ResourceClaim{c.next, c.first}, having(c.first), unprepares(c.first)},
		} {
			for _, fault := range []string{"kill -9 before", "kill -9 after"} {
				for n := 1; ; n++ {
					w, h, p, found := disturbed(t, s)
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
						joins(t, w, h, c.next, s.claims, found)
					})
				}
			}
			for n := 1; ; n++ {
				w, h, p, found := disturbed(t, s)
				w.disk.StopAt(n)
				_ = s.call(t, p)
				if !w.disk.Stopped() {
					break
				}
				t.Run(fmt.Sprintf("%s, at write %d", s.name, n), func(t *testing.T) {
					joins(t, w, h, c.next, s.claims, found)
				})
			}
		}
	}
}

func joins(t *testing.T, w *world, h *hardware, next *resourceapi.ResourceClaim, claims []*resourceapi.ResourceClaim, found device.TimeSlice) {
	t.Helper()
	w.disk.Restart()
	mustPrepare(t, w.plugin(t), next)
	w.scan()
	goesOn(t, w, h, claims, found)
}
