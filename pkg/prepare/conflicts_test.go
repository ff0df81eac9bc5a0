// While one claim uses a device for itself, every other claim is refused after a short wait, by
// name.

package prepare_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

func TestDeviceInUseIsRefusedNamingTheClaim(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("first", allocated("r", gpu0)))
	_, err := w.plugin(t).Prepare(t.Context(), newClaim("second", allocated("free", gpu1), allocated("r", gpu0)))
	if cause.Of(err) != cause.Held {
		t.Fatal(err)
	}
	for _, want := range []string{"default/second", "request r", gpu0 + " is in use by claim default/first (UID uid-first)"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
	if w.specs.of("uid-second") != "" || len(w.records()) != 1 {
		t.Error("instances or records are left")
	}
	mustUnprepare(t, p, "uid-first")
	mustPrepare(t, p, newClaim("second", allocated("r", gpu0)))
}

func TestConflictingDevicesAreRefusedByName(t *testing.T) {
	w := newWorld(t)
	withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("first", allocated("r", small0)))
	for _, want := range []string{gpu0, small0, large0} {
		_, err := p.Prepare(t.Context(), newClaim("second", allocated("r", want)))
		problem := "device " + want + " cannot exist together with " + small0 + ", which is in use by claim default/first"
		if want == small0 {
			problem = "device " + want + " is in use by claim default/first"
		}
		if cause.Of(err) != cause.Held || !strings.Contains(err.Error(), problem) {
			t.Errorf("%s: %v", want, err)
		}
	}
	mustPrepare(t, p, newClaim("second", allocated("r", small1), allocated("s", gpu1)))
	if _, err := p.Prepare(t.Context(), newClaim("third", allocated("r", neighbor))); cause.Of(err) != cause.Held ||
		!strings.Contains(err.Error(), "together with "+gpu1) {
		t.Error(err)
	}
}

func TestAdminAccessNeitherBlocksNorIsBlocked(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("user", allocated("r", gpu0)))
	devices := mustPrepare(t, p, newClaim("admin", admin("a", gpu0), admin("b", gpu0), allocated("c", gpu1)))
	if len(devices) != 3 {
		t.Error(devices)
	}
	if n := strings.Count(w.specs.of("uid-admin"), "uid-admin-"+gpu0); n != 1 {
		t.Errorf("the spec names the device %d times", n)
	}
	mustUnprepare(t, p, "uid-user")
	mustPrepare(t, p, newClaim("next", allocated("r", gpu0)))
	if _, err := p.Prepare(t.Context(), newClaim("late", allocated("r", gpu1))); cause.Of(err) != cause.Held {
		t.Error(err)
	}
}

// Two requests with admin access may name one device. With and without it, the containers of one
// request would get what belongs to the other.
func TestDeviceWithAndWithoutAdminAccessIsRefused(t *testing.T) {
	for _, name := range []string{gpu0, small0, share0, migShare0} {
		ordinary := allocated("b", name)
		if strings.HasSuffix(name, "-share") {
			ordinary = plain("b", name)
		}
		for _, results := range [][]result{
			{admin("a", name), ordinary}, {ordinary, admin("a", name)}, {admin("a", name), ordinary, admin("c", name)},
		} {
			w := newWorld(t)
			withMPS(w)
			_, err := w.plugin(t).Prepare(t.Context(), newClaim("c", results...))
			if cause.Of(err) != cause.Claim || !strings.Contains(err.Error(), "device "+name+" with and without admin access") ||
				!strings.Contains(err.Error(), "make them two claims") {
				t.Errorf("%s: %v", name, err)
			}
			checkClean(t, w)
		}
	}
}

func TestPartitionTwiceWithAdminAccess(t *testing.T) {
	w := newWorld(t)
	withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("user", allocated("r", small0)))
	c := newClaim("admin", admin("a", small0), admin("b", small0))
	for range 2 {
		if given := mustPrepare(t, p, c); len(given) != 2 || given[0].CDIDeviceIDs[1] != given[1].CDIDeviceIDs[1] {
			t.Errorf("%+v", given)
		}
		if n := strings.Count(w.specs.of("uid-admin"), "uid-admin-"+small0); n != 1 {
			t.Errorf("the spec names the device %d times", n)
		}
	}
	mustUnprepare(t, p, "uid-admin")
	mustUnprepare(t, p, "uid-user")
	checkClean(t, w)
}

func TestFractionsAndPlainSharesExcludeEachOther(t *testing.T) {
	f, s := newClaim("f", fraction("r", share0, "1Gi", "0")), newClaim("s", plain("r", share0))
	for _, c := range []struct{ first, second string }{{"f", "s"}, {"s", "f"}} {
		claims := map[string]func(*testing.T, *plugin) error{
			"f": func(t *testing.T, p *plugin) error { _, err := p.Prepare(t.Context(), f); return err },
			"s": func(t *testing.T, p *plugin) error { _, err := p.Prepare(t.Context(), s); return err },
		}
		for _, unreadable := range []bool{false, true} {
			w := newWorld(t)
			withMPS(w)
			p := w.plugin(t)
			if err := claims[c.first](t, p); err != nil {
				t.Fatal(err)
			}
			if unreadable {
				w.disk.Put(recordFile(t, w, "uid-"+c.first), nil)
			}
			err := claims[c.second](t, p)
			if cause.Of(err) != cause.Held || !strings.Contains(err.Error(), "uid-"+c.first) ||
				!strings.Contains(err.Error(), "fractions and plain shares") {
				t.Errorf("%s after %s: %v", c.second, c.first, err)
			}
			mustUnprepare(t, p, newClaim(c.first).UID)
			if err := claims[c.second](t, p); err != nil {
				t.Error(err)
			}
		}
	}
}

// pendingCall is a Prepare call that waits because another claim uses its GPU.
type pendingCall struct {
	p     *plugin
	began time.Time
	ended chan error
	// cancel cancels the Prepare call, as the kubelet may do.
	cancel context.CancelFunc
}

func prepareUntilWaiting(t *testing.T, w *world, c *resourceapi.ResourceClaim) pendingCall {
	t.Helper()
	w.conflictWait, w.stopping = 5*time.Second, make(chan struct{})
	ctx, giveUp := context.WithCancel(t.Context())
	call := pendingCall{w.plugin(t), time.Now(), make(chan error, 1), giveUp}
	mustPrepare(t, call.p, newClaim("first", allocated("r", gpu0)))
	go func() {
		_, err := call.p.Prepare(ctx, c)
		call.ended <- err
	}()
	synctest.Wait()
	return call
}

func TestPrepareSucceedsWhenOtherClaimEndsInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		next := newClaim("next", allocated("r", gpu0))
		w.readClaim = func() (*resourceapi.ResourceClaim, error) { return next, nil }
		call := prepareUntilWaiting(t, w, next)
		mustUnprepare(t, call.p, "uid-first")
		if err := <-call.ended; err != nil {
			t.Fatal(err)
		}
		if took := time.Since(call.began); took > 2*conflictPoll {
			t.Errorf("took %v", took)
		}
		if got := w.records(); len(got) != 1 || !strings.Contains(got[0], "uid-next") {
			t.Errorf("records: %q", got)
		}
	})
}

func TestPrepareFailsWhenOtherClaimStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		call := prepareUntilWaiting(t, newWorld(t), newClaim("next", allocated("r", gpu0)))
		if err := <-call.ended; cause.Of(err) != cause.Held || !strings.Contains(err.Error(), "default/first") {
			t.Error(err)
		}
		if took := time.Since(call.began); took != 5*time.Second {
			t.Errorf("took %v", took)
		}
		mustUnprepare(t, call.p, "uid-first")
		mustPrepare(t, call.p, newClaim("next", allocated("r", gpu0)))
	})
}

// The claim wants two GPUs that two other claims use. Prepare must wait for both of these claims in
// one call.
func TestPrepareWaitsForOneClaimAfterAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		next := newClaim("next", allocated("r", gpu0), allocated("s", gpu1))
		w.readClaim = func() (*resourceapi.ResourceClaim, error) { return next, nil }
		mustPrepare(t, w.plugin(t), newClaim("second", allocated("r", gpu1)))
		call := prepareUntilWaiting(t, w, next)
		mustUnprepare(t, call.p, "uid-first")
		<-time.After(time.Second)
		synctest.Wait()
		mustUnprepare(t, call.p, "uid-second")
		if err := <-call.ended; err != nil {
			t.Error(err)
		}
	})
}

// The wait must end at once if the kubelet cancels the call or the plugin stops. The waiting claim
// can be unprepared before that, because the wait holds no lock.
func TestConflictWaitEndsWithTheCall(t *testing.T) {
	for name, end := range map[string]func(*world, pendingCall){
		"the kubelet cancels": func(_ *world, call pendingCall) { call.cancel() },
		"the plugin stops":    func(w *world, _ pendingCall) { close(w.stopping) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				call := prepareUntilWaiting(t, w, newClaim("next", allocated("r", gpu0)))
				mustUnprepare(t, call.p, "uid-next")
				end(w, call)
				if err := <-call.ended; cause.Of(err) != cause.Held || time.Since(call.began) > 0 {
					t.Error(err, time.Since(call.began))
				}
			})
		})
	}
}

// While Prepare waits, the claim's Pod may end, so that no Pod reserves the claim any longer.
// Prepare must then refuse the claim, because no later call would unprepare it.
func TestUnreservedClaimIsRefusedAfterConflictWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.readClaim = func() (*resourceapi.ResourceClaim, error) {
			now := newClaim("next", allocated("r", gpu0))
			now.Status.ReservedFor = nil
			return now, nil
		}
		call := prepareUntilWaiting(t, w, newClaim("next", allocated("r", gpu0)))
		mustUnprepare(t, call.p, "uid-first")
		if err := <-call.ended; cause.Of(err) != cause.Claim || len(w.records()) != 0 {
			t.Error(err, w.records())
		}
	})
}

func TestPrepareDoesNotWaitForUnreadableRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.conflictWait = time.Hour
		p := w.plugin(t)
		mustPrepare(t, p, newClaim("first", allocated("r", gpu0)))
		w.disk.Put(recordFile(t, w, "uid-first"), []byte("{"))
		began := time.Now()
		if _, err := p.Prepare(t.Context(), newClaim("next", allocated("r", gpu0))); cause.Of(err) != cause.Held || time.Since(began) > 0 {
			t.Error(err, time.Since(began))
		}
	})
}
