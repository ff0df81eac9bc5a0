// Reconcile removes what killed calls left, and releases the claims of deleted Pods.

package prepare_test

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// Reconcile in the running plugin must remove what killed calls left, and report each repair.
func TestReconcileRemovesLeftoversOfKilledCalls(t *testing.T) {
	w := newWorld(t)
	runs := w.plugin(t)
	var mu sync.Mutex // Reconcile calls OnRepaired concurrently
	var said []string
	runs.OnRepaired = func(r prepare.Repair) {
		mu.Lock()
		defer mu.Unlock()
		said = append(said, r.Kind+" "+r.Object)
	}
	kept := newClaim("kept", allocated("r", gpu1))
	mustPrepare(t, runs, kept)
	if err := w.specs.WriteClaim("uid-dead", nil); err != nil {
		t.Fatal(err)
	}
	w.disk.StopAt(2)
	if err := runs.Records.Save(checkpoint.Record{ClaimUID: "uid-begun"}); err == nil {
		t.Fatal("the call was not interrupted")
	}
	w.disk.Restart()
	if err := runs.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	slices.Sort(said)
	if want := []string{"leftover-spec uid-dead", "unfinished-write uid-begun"}; !slices.Equal(said, want) {
		t.Errorf("repairs: %q, want %q", said, want)
	}
	if w.specs.of("uid-dead") != "" || w.specs.of(kept.UID) == "" || len(w.records()) != 1 {
		t.Errorf("specs %v, records %q", w.specs.claims, w.records())
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

func TestOrphanIsConfirmedUnderTheClaimLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		p := w.plugin(t)
		c := newClaim("c", allocated("r", gpu0))
		mustPrepare(t, p, c)
		refused := errors.New("it is there")
		if done, err := p.UnprepareOrphan(t.Context(), c.UID, func(context.Context, checkpoint.Record) error { return refused }); done ||
			!errors.Is(err, refused) {
			t.Errorf("%v, %v", done, err)
		}
		// A Prepare of the claim that comes while UnprepareOrphan calls its confirm function must wait
		// for the claim's lock. After that it finds the claim unprepared and prepares it again.
		prepared := make(chan error, 1)
		w.readClaim = func() (*resourceapi.ResourceClaim, error) { return c, nil }
		done, err := p.UnprepareOrphan(t.Context(), c.UID, func(context.Context, checkpoint.Record) error {
			go func() {
				_, err := p.Prepare(t.Context(), c)
				prepared <- err
			}()
			synctest.Wait()
			return nil
		})
		if !done || err != nil {
			t.Fatal(done, err)
		}
		if err := <-prepared; err != nil || len(w.records()) != 1 {
			t.Errorf("%v, %q", err, w.records())
		}
		if done, err := p.UnprepareOrphan(t.Context(), c.UID, confirmAlways); !done || err != nil {
			t.Error(done, err)
		}
		checkClean(t, w)
		if done, err := p.UnprepareOrphan(t.Context(), c.UID, confirmAlways); done || err != nil {
			t.Errorf("unprepared twice: %v, %v", done, err)
		}
	})
}

func TestOrphanWithCallInFlightIsSkipped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		p := w.plugin(t)
		c := newClaim("c", allocated("r", gpu0))
		mustPrepare(t, p, c)
		held, err := p.Locks.Acquire(t.Context(), string(c.UID))
		if err != nil {
			t.Fatal(err)
		}
		before := time.Now()
		done, err := p.UnprepareOrphan(t.Context(), c.UID, func(context.Context,
			checkpoint.Record) error {
			t.Error("confirm was called")
			return nil
		})
		if done || err != nil || time.Since(before) > time.Second {
			t.Errorf("%v, %v after %s", done, err, time.Since(before))
		}
		held.Release()
	})
}
