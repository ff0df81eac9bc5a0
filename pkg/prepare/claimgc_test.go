package prepare_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/claimlock"
)

func confirmAlways(context.Context, checkpoint.Record) error { return nil }

func TestOrphanReason(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	c := newClaim("c", allocated("r", gpu0))
	mustPrepare(t, p, c)
	r, _, err := p.Record(c.UID)
	if err != nil {
		t.Fatal(err)
	}
	replaced := newClaim("c", allocated("r", gpu0))
	replaced.UID = "another"
	deallocated := newClaim("c")
	deallocated.Status.Allocation = nil
	group := resourceapi.ResourceClaimConsumerReference{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "gang", UID: "uid-of-gang"}
	ofGroup := newClaim("c", allocated("r", gpu0))
	ofGroup.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{group}
	leftByGroup := newClaim("c") // the claim controller deallocates with the last reservation
	leftByGroup.Status.Allocation, leftByGroup.Status.ReservedFor = nil, nil
	for name, c := range map[string]struct {
		now       *resourceapi.ResourceClaim
		abandoned bool
	}{
		"deleted":                   {nil, true},
		"replaced":                  {replaced, true},
		"not allocated":             {deallocated, true},
		"allocated another device":  {newClaim("c", allocated("r", gpu1)), true},
		"another device and no Pod": {forPods(newClaim("c", allocated("r", gpu1))), true},
		"its PodGroup was deleted":  {leftByGroup, true},
		"unchanged":                 {newClaim("c", allocated("r", gpu0)), false},
		"reserved for a PodGroup":   {ofGroup, false},
		"between two Pods":          {forPods(newClaim("c", allocated("r", gpu0))), false},
		"has a further device":      {newClaim("c", allocated("r", gpu0), allocated("s", gpu1)), false},
	} {
		if why := p.OrphanReason(r, c.now); why != "" != c.abandoned {
			t.Errorf("%s: %q", name, why)
		}
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
		held, err := p.Locks.Acquire(t.Context(), claimlock.ClaimName(c.UID))
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
