package prepare

import (
	"context"
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
	// giveUp is the end of the kubelet's own patience.
	giveUp context.CancelFunc
}

func untilItWaits(t *testing.T, w *world, c *resourceapi.ResourceClaim) preparing {
	t.Helper()
	w.patience, w.stopping = 5*time.Second, make(chan struct{})
	ctx, giveUp := context.WithCancel(t.Context())
	call := preparing{w.plugin(t), time.Now(), make(chan error, 1), giveUp}
	mustPrepare(t, call.p, newClaim("first", allocated("r", gpu0)))
	go func() {
		_, err := call.p.Prepare(ctx, c)
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
		mustUnprepare(t, call.p, "uid-first")
		mustPrepare(t, call.p, newClaim("next", allocated("r", gpu0)))
	})
}

// A claim that waits can be given back: it holds nothing, not even its lock.
func TestTheWaitEndsWithTheCall(t *testing.T) {
	for name, end := range map[string]func(*world, preparing){
		"the kubelet gives it up": func(_ *world, call preparing) { call.giveUp() },
		"the plugin stops":        func(w *world, _ preparing) { close(w.stopping) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				call := untilItWaits(t, w, newClaim("next", allocated("r", gpu0)))
				mustUnprepare(t, call.p, "uid-next")
				end(w, call)
				if err := <-call.ended; CauseOf(err) != CauseHeld || time.Since(call.began) > 0 {
					t.Error(err, time.Since(call.began))
				}
			})
		})
	}
}

// Each of two GPUs is another claim's.
func TestOneHolderAfterTheOtherIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		next := newClaim("next", allocated("r", gpu0), allocated("s", gpu1))
		w.reread = func() (*resourceapi.ResourceClaim, error) { return next, nil }
		mustPrepare(t, w.plugin(t), newClaim("second", allocated("r", gpu1)))
		call := untilItWaits(t, w, next)
		mustUnprepare(t, call.p, "uid-first")
		<-time.After(time.Second)
		synctest.Wait()
		mustUnprepare(t, call.p, "uid-second")
		if err := <-call.ended; err != nil {
			t.Error(err)
		}
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
