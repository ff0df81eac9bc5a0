package prepare

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
)

// preparing is a call that waits for a GPU that another claim holds.
type preparing struct {
	p     *Preparer
	began time.Time
	ended chan error
}

func untilItWaits(t *testing.T, w *world, c *resourceapi.ResourceClaim) preparing {
	t.Helper()
	w.patience = 5 * time.Second
	call := preparing{w.plugin(t), time.Now(), make(chan error, 1)}
	mustPrepare(t, call.p, newClaim("first", allocated("r", gpu0)))
	go func() {
		_, err := call.p.Prepare(t.Context(), c)
		call.ended <- err
	}()
	synctest.Wait()
	return call
}

func TestAGPUThatIsGivenBackMeanwhileIsHad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		next := newClaim("next", allocated("r", gpu0))
		w.reread = func() (*resourceapi.ResourceClaim, error) { return next, nil }
		call := untilItWaits(t, w, next)
		mustUnprepare(t, call.p, "uid-first")
		if err := <-call.ended; err != nil {
			t.Fatal(err)
		}
		if took := time.Since(call.began); took > 2*heldPoll {
			t.Errorf("it took %v", took)
		}
		if got := w.records(); len(got) != 1 || !strings.Contains(got[0], "uid-next") {
			t.Errorf("records: %q", got)
		}
	})
}

func TestAGPUThatStaysHeldIsRefusedInTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		call := untilItWaits(t, newWorld(t), newClaim("next", allocated("r", gpu0)))
		if err := <-call.ended; CauseOf(err) != CauseHeld || !strings.Contains(err.Error(), "default/first") {
			t.Error(err)
		}
		if took := time.Since(call.began); took != 5*time.Second {
			t.Errorf("it took %v", took)
		}
		mustPrepare(t, call.p, newClaim("other", allocated("r", gpu1)))
	})
}

// The Pod that waited may have gone, and nobody would give back what is prepared for it then.
func TestAClaimThatIsNotInUseAfterTheWaitIsNotPrepared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.reread = func() (*resourceapi.ResourceClaim, error) {
			now := newClaim("next", allocated("r", gpu0))
			now.Status.ReservedFor = nil
			return now, nil
		}
		call := untilItWaits(t, w, newClaim("next", allocated("r", gpu0)))
		mustUnprepare(t, call.p, "uid-first")
		if err := <-call.ended; CauseOf(err) != CauseClaim || len(w.records()) != 0 {
			t.Error(err, w.records())
		}
	})
}

func TestAHolderThatCannotBeReadIsNotWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.patience = time.Hour
		p := w.plugin(t)
		mustPrepare(t, p, newClaim("first", allocated("r", gpu0)))
		w.disk.Put(recordFile(t, w, "uid-first"), []byte("{"))
		began := time.Now()
		if _, err := p.Prepare(t.Context(), newClaim("next", allocated("r", gpu0))); CauseOf(err) != CauseHeld || time.Since(began) > 0 {
			t.Error(err, time.Since(began))
		}
	})
}
