package driver

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
)

func TestAClaimThatCannotBeMendedIsNoReasonToMendAgain(t *testing.T) {
	n := newAiling(t)
	n.run(t)
	n.register(t)
	c := n.claim(t, "unreadable", firstGPU)
	eventually(t, "a claim is prepared", func() bool { return n.prepare(t, c).GetError() == "" })
	records, err := filepath.Glob(filepath.Join(n.cfg.StateDir(), "claims", "uid-unreadable*"))
	if err != nil || len(records) != 1 {
		t.Fatalf("records %q, %v", records, err)
	}
	if err := os.WriteFile(records[0], []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := n.driver.mend(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestASpecWrittenAgainIsARepair(t *testing.T) {
	n := newAiling(t)
	n.run(t)
	n.register(t)
	c := n.claim(t, "altered", firstGPU)
	eventually(t, "a claim is prepared", func() bool { return n.prepare(t, c).GetError() == "" })
	if err := n.driver.mend(t.Context()); err != nil {
		t.Error(err)
	}
	if n.metric(t, "gpu_dra_repairs_total kind=cdi-spec") {
		t.Error("what was as it should be is told as repaired")
	}
	spec := filepath.Join(n.cfg.CDIRoot, "k8s.gpu.nvidia.com-claim_uid-altered.json")
	// The watch may not have begun: what it has not seen before is not altered to it.
	eventually(t, "a spec that is removed is told as repaired", func() bool {
		if err := os.Remove(spec); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
		return n.hasEvent(t, "Node", "node", "Repaired", filepath.Base(spec))
	})
	if !n.metric(t, "gpu_dra_repairs_total kind=cdi-spec") {
		t.Error("it is not counted")
	}
}

// unseenClaims take a look at the hardware to be mended. One hangs as long as its channel is open.
type unseenClaims struct {
	hangs map[types.UID]chan struct{}
	err   error

	mu     sync.Mutex
	begun  map[types.UID]int
	mended map[types.UID]int
}

func (u *unseenClaims) MendSeen(context.Context) ([]types.UID, error) {
	return []types.UID{"a", "b"}, nil
}

func (u *unseenClaims) MendUnseen(ctx context.Context, claim types.UID) error {
	u.mu.Lock()
	u.begun[claim]++
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
	u.mended[claim]++
	return u.err
}

func (u *unseenClaims) fail(err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.err = err
}

func TestAGPUThatHangsKeepsNobodyFromBeingMended(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := make(chan struct{})
		claims := &unseenClaims{hangs: map[types.UID]chan struct{}{"a": a}, begun: map[types.UID]int{}, mended: map[types.UID]int{}}
		var allowed atomic.Bool
		var off, failed atomic.Int64
		allowed.Store(true)
		m := &claimMender{
			claims: claims, left: workqueue.NewTyped[types.UID](), failed: func() { failed.Add(1) },
			use: func() (func(), bool) { return func() {}, allowed.Load() }, off: func() { off.Add(1) },
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { m.Run(ctx); close(ended) }()
		expect := func(when string, begun, mended map[types.UID]int) {
			t.Helper()
			synctest.Wait()
			if !maps.Equal(claims.begun, begun) || !maps.Equal(claims.mended, mended) {
				t.Errorf("%s: begun %v, mended %v", when, claims.begun, claims.mended)
			}
		}
		mend := func() {
			t.Helper()
			began := time.Now()
			if err := m.Mend(ctx); err != nil || time.Since(began) > 0 {
				t.Errorf("it took %s: %v", time.Since(began), err)
			}
			synctest.Wait()
		}
		mend()
		expect("one hangs", map[types.UID]int{"a": 1, "b": 1}, map[types.UID]int{"b": 1})
		mend()
		mend()
		expect("more is to be mended meanwhile", map[types.UID]int{"a": 1, "b": 3}, map[types.UID]int{"b": 3})
		close(a)
		expect("what was asked for meanwhile follows, once", map[types.UID]int{"a": 2, "b": 3}, map[types.UID]int{"a": 2, "b": 3})
		allowed.Store(false)
		mend()
		expect("the hardware is let go of", map[types.UID]int{"a": 2, "b": 3}, map[types.UID]int{"a": 2, "b": 3})
		allowed.Store(true)
		claims.fail(errors.New("the GPU does not answer"))
		mend()
		if off.Load() != 2 || failed.Load() != 2 {
			t.Errorf("told %d times that it may not be done now, and %d times that it failed", off.Load(), failed.Load())
		}
		stop()
		<-ended
	})
}
