package reconciler

import (
	"context"
	"errors"
	"maps"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// switchable fakes hardware that may be accessed while allowed is true.
type switchable struct{ allowed *atomic.Bool }

func (s *switchable) Use() (done func(), ok bool) { return func() {}, s.allowed.Load() }

// hangingClaims fakes prepared claims "a" and "b" whose CDI specs need the hardware for their
// repair. The repair of a claim hangs until the test closes the claim's channel in the field hangs.
type hangingClaims struct {
	Claims
	hangs map[types.UID]chan struct{}
	err   error

	mu       sync.Mutex
	started  map[types.UID]int
	repaired map[types.UID]int
}

// noScan fakes an inventory before the first scan.
type noScan struct{}

func (noScan) Snapshot() inventory.Snapshot { return inventory.Snapshot{} }
func (noScan) RequestScan()                 {}

func (u *hangingClaims) RepairSpecs(context.Context) ([]types.UID, error) {
	return []types.UID{"a", "b"}, nil
}

func (u *hangingClaims) RepairClaimSpec(ctx context.Context, claim types.UID) error {
	u.mu.Lock()
	u.started[claim]++
	u.mu.Unlock()
	if hangs := u.hangs[claim]; hangs != nil {
		select {
		case <-hangs:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.repaired[claim]++
	return u.err
}

func (u *hangingClaims) fail(err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.err = err
}

func TestHungGPUDoesNotDelayOtherRepairs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := make(chan struct{})
		claims := &hangingClaims{hangs: map[types.UID]chan struct{}{"a": a}, started: map[types.UID]int{}, repaired: map[types.UID]int{}}
		var allowed atomic.Bool
		allowed.Store(true)
		r := New(Options{
			Claims: claims, Use: (&switchable{&allowed}).Use, Inventory: noScan{}, NewerLeads: func() bool { return false },
		})
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { r.RunSpecRepairs(ctx); close(ended) }()
		expect := func(when string, started, repaired map[types.UID]int) {
			t.Helper()
			synctest.Wait()
			if !maps.Equal(claims.started, started) || !maps.Equal(claims.repaired, repaired) {
				t.Errorf("%s: started %v, repaired %v", when, claims.started, claims.repaired)
			}
		}
		repair := func() {
			t.Helper()
			began := time.Now()
			if err := r.RepairSpecs(ctx); err != nil || time.Since(began) > 0 {
				t.Errorf("it took %s: %v", time.Since(began), err)
			}
			synctest.Wait()
		}
		repair()
		expect("one hangs", map[types.UID]int{"a": 1, "b": 1}, map[types.UID]int{"b": 1})
		repair()
		repair()
		expect("more requests while it hangs", map[types.UID]int{"a": 1, "b": 3}, map[types.UID]int{"b": 3})
		close(a)
		expect("the queued repair runs once", map[types.UID]int{"a": 2, "b": 3}, map[types.UID]int{"a": 2, "b": 3})
		if len(r.wakeup) > 0 {
			t.Error("repairs without a failure wake the reconciler")
		}
		allowed.Store(false)
		r.specs.Add("a") // queued before the GPUs were released
		expect("the GPUs are released", map[types.UID]int{"a": 2, "b": 3}, map[types.UID]int{"a": 2, "b": 3})
		allowed.Store(true)
		claims.fail(errors.New("the GPU does not answer"))
		repair()
		if len(r.wakeup) != 1 {
			t.Error("after failed repairs the reconciler is not woken")
		}
		stop()
		<-ended
	})
}
