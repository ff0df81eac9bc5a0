// A call that comes too late, or that the kubelet canceled, does nothing.

package prepare_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

func TestUnreservedClaimIsRefused(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	if _, err := p.Prepare(t.Context(), forPods(newClaim("c", allocated("r", gpu0)))); cause.Of(err) != cause.Claim ||
		!strings.Contains(err.Error(), "not reserved for any Pod") {
		t.Error(err)
	}
	checkClean(t, w)
}

// While Prepare waits for the claim's lock, another call may unprepare the claim. So Prepare must
// read the claim again after the wait.
func TestPrepareRereadsClaimAfterWait(t *testing.T) {
	same := newClaim("c", allocated("r", gpu0))
	replaced := newClaim("c", allocated("r", gpu0))
	replaced.UID = "another"
	for _, c := range []struct {
		name  string
		claim *resourceapi.ResourceClaim
		err   error
		says  string
	}{
		{"unchanged", same, nil, ""},
		{"deleted", nil, errors.New("not found"), "not found"},
		{"replaced", replaced, nil, "another"},
		{"allocated anew", newClaim("c", allocated("r", gpu1)), nil, "allocation changed"},
		{"reserved for its next Pod", forPods(newClaim("c", allocated("r", gpu0)), "next"), nil, ""},
		{"no longer reserved", forPods(newClaim("c", allocated("r", gpu0))), nil, "not reserved"},
		{"no longer allocated", &resourceapi.ResourceClaim{ObjectMeta: same.ObjectMeta}, nil, "not allocated"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				w.readClaim = func() (*resourceapi.ResourceClaim, error) { return c.claim, c.err }
				p := w.plugin(t)
				other, err := p.Locks.Acquire(t.Context(), string(same.UID))
				if err != nil {
					t.Fatal(err)
				}
				done := make(chan error)
				go func() {
					_, err := p.Prepare(t.Context(), same)
					done <- err
				}()
				synctest.Wait() // until Prepare waits for the lock
				other.Release()
				err = <-done
				if err != nil && strings.Contains(err.Error(), "the kubelet retries") && cause.Of(err) == cause.Claim {
					t.Errorf("a retry helps, but the claim is blamed: %v", err)
				}
				if c.says == "" && err != nil || c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
					t.Error(err)
				}
			})
		})
	}
}

// The kubelet's Prepare reads the claim, then an Unprepare runs, and then the Prepare goes on. It
// must read the claim again and refuse it if its Pod is gone.
func TestPrepareRereadsClaimAfterUnprepare(t *testing.T) {
	for name, c := range map[string]struct {
		now  []string
		want bool
	}{
		"its Pod is gone":            {nil, false},
		"reserved for its next Pod":  {[]string{"next"}, true},
		"still reserved for its Pod": {[]string{"pod-c"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			p := w.plugin(t)
			given := map[types.UID]bool{}
			p.OnUnprepared = func(uid types.UID) { given[uid] = true }
			p.OnUnpreparedSince = func(_ context.Context, uid types.UID) bool { return given[uid] }
			before := newClaim("c", allocated("r", gpu0))
			mustPrepare(t, p, before)
			mustUnprepare(t, p, before.UID)
			w.readClaim = func() (*resourceapi.ResourceClaim, error) {
				return forPods(newClaim("c", allocated("r", gpu0)), c.now...), nil
			}
			_, err := p.Prepare(t.Context(), before)
			if c.want != (err == nil) {
				t.Errorf("prepared, %v; want %v", err, c.want)
			}
			if !c.want {
				checkClean(t, w)
			}
		})
	}
}

// snapshotHook is a fake inventory that runs the function "do" whenever it is read.
type snapshotHook struct {
	steps.Hardware
	do func()
}

func (d snapshotHook) Snapshot() inventory.Snapshot {
	d.do()
	return d.Hardware.Snapshot()
}

func TestCanceledCallDoesNotStart(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	ctx, cancel := context.WithCancel(t.Context())
	p.OnUnpreparedSince = func(context.Context, types.UID) bool { t.Error("called although not needed"); return false }
	p.with(func(n *steps.Node) { n.Hardware = snapshotHook{w, cancel} })
	if _, err := p.Prepare(ctx, newClaim("c", allocated("r", gpu0))); cause.Of(err) != cause.Canceled {
		t.Error(err)
	}
	checkClean(t, w)
}

func TestCallCanceledWhileWaitingChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		p := w.plugin(t)
		other, err := p.Locks.Acquire(t.Context(), gpu0)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		w.readClaim = func() (*resourceapi.ResourceClaim, error) { return nil, ctx.Err() }
		done := make(chan error)
		go func() {
			_, err := p.Prepare(ctx, newClaim("c", allocated("r", gpu0)))
			done <- err
		}()
		synctest.Wait()
		cancel()
		if err := <-done; cause.Of(err) != cause.Canceled {
			t.Error(err)
		}
		other.Release()
		checkClean(t, w)
	})
}

func TestLockWaitEndsWithTheCall(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	claims, err := p.Locks.Acquire(t.Context(), "uid-a")
	if err != nil {
		t.Fatal(err)
	}
	defer claims.Release()
	gpus, err := p.Locks.Acquire(t.Context(), gpu0)
	if err != nil {
		t.Fatal(err)
	}
	defer gpus.Release()
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for _, name := range []string{"a", "b"} {
		if _, err := p.Prepare(gone, newClaim(name, allocated("r", gpu0))); cause.Of(err) != cause.Canceled || !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := p.Unprepare(gone, "uid-a"); cause.Of(err) != cause.Canceled {
		t.Error(err)
	}
	if len(w.records()) != 0 {
		t.Errorf("left %q", w.records())
	}
}
