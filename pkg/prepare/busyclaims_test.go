package prepare_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/claimlock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// slowDestroy is a fake GPU whose Look or Destroy hangs until the caller's deadline.
type slowDestroy struct {
	*hardware
	look, destroy bool
}

func (s *slowDestroy) Look(ctx context.Context, c device.Card) (device.CardState, error) {
	if s.look {
		<-ctx.Done()
		return device.CardState{}, failure(device.FailureTimeout, "look", c)
	}
	return s.hardware.Look(ctx, c)
}

func (s *slowDestroy) Destroy(ctx context.Context, c device.Card, in device.Instance) error {
	if s.destroy {
		<-ctx.Done()
		return failure(device.FailureInUse, "destroy", c)
	}
	return s.hardware.Destroy(ctx, c, in)
}

func TestPeriodicWorkReleasesGPUSoon(t *testing.T) {
	for name, c := range map[string]struct {
		slow slowDestroy
		busy bool // another call holds the GPU's lock
		call func(*testing.T, *plugin, device.Card) error
	}{
		"adopt, a call holds the GPU":    {slowDestroy{}, true, adoptInstances},
		"adopt, the GPU does not answer": {slowDestroy{look: true}, false, adoptInstances},
		"adopt, the instance is in use":  {slowDestroy{destroy: true}, false, adoptInstances},
		"reconcile, the instance is in use": {slowDestroy{destroy: true}, false, func(t *testing.T, p *plugin, _ device.Card) error {
			return p.Reconcile(t.Context())
		}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			h := withMIG(w)
			mustPrepare(t, w.plugin(t), newClaim("c", allocated("r", small0)))
			h.createForeign(t, gpu0, 9, 4)
			w.scan()
			synctest.Test(t, func(t *testing.T) {
				p := w.plugin(t)
				r, _, err := p.Records.Load("uid-c")
				if err != nil {
					t.Fatal(err)
				}
				r.State = checkpoint.Reverting
				if err := p.Records.Save(r); err != nil {
					t.Fatal(err)
				}
				c.slow.hardware = h
				p.with(func(n *steps.Node) { n.Partitions = &c.slow })
				if c.busy {
					held, err := p.Locks.Acquire(t.Context(), claimlock.GPUNames(gpu0)...)
					if err != nil {
						t.Fatal(err)
					}
					defer held.Release()
				}
				start := time.Now()
				if err := c.call(t, p, h.card(t, gpu0)); err == nil {
					t.Error("no error was reported")
				}
				if took := time.Since(start); took > steps.PeriodicTime {
					t.Errorf("took %s", took)
				}
			})
		})
	}
}

func adoptInstances(t *testing.T, p *plugin, c device.Card) error {
	return p.Adopt(t.Context(), c, gpu0)
}

// Four claims are busy in another call. The test expects that they do not delay the repair of a
// fifth claim's CDI spec, because restarting containers need their specs.
func TestBusyClaimsDelayNoOtherSpecRepair(t *testing.T) {
	w := newWorld(t)
	withMIG(w)
	for start := range 4 {
		mustPrepare(t, w.plugin(t), newClaim(fmt.Sprint(start), allocated("r", fmt.Sprintf("%s-mig-19-%d", gpu0, start))))
	}
	mustPrepare(t, w.plugin(t), newClaim("z", allocated("r", gpu1)))
	w.scan()
	w.specs.clear()
	synctest.Test(t, func(t *testing.T) {
		p := w.plugin(t)
		for start := range 4 {
			held, err := p.Locks.Acquire(t.Context(), claimlock.ClaimName(newClaim(fmt.Sprint(start)).UID))
			if err != nil {
				t.Fatal(err)
			}
			defer held.Release()
		}
		start := time.Now()
		go func() {
			<-time.After(recoverWait / 2)
			if w.specs.of("uid-z") == nothing {
				t.Error("an idle claim has no spec yet")
			}
		}()
		if err := p.RepairAllSpecs(t.Context()); err == nil {
			t.Error("no error was reported")
		}
		if took := time.Since(start); took > recoverWait+time.Second {
			t.Errorf("took %s", took)
		}
	})
}

// During an upgrade the old plugin instance may still work on several claims when the new one
// starts. Recover must wait for these claims at the same time, because the kubelet waits for
// Recover.
func TestRecoverWaitsForBusyClaimsConcurrently(t *testing.T) {
	w := newWorld(t)
	withMIG(w)
	for start := range 4 {
		mustPrepare(t, w.plugin(t), newClaim(fmt.Sprint(start), allocated("r", fmt.Sprintf("%s-mig-19-%d", gpu0, start))))
	}
	mustPrepare(t, w.plugin(t), newClaim("z", allocated("r", gpu1)))
	w.specs.clear()
	synctest.Test(t, func(t *testing.T) {
		p := w.plugin(t)
		for start := range 4 {
			held, err := p.Locks.Acquire(t.Context(), claimlock.ClaimName(newClaim(fmt.Sprint(start)).UID))
			if err != nil {
				t.Fatal(err)
			}
			defer held.Release()
		}
		start := time.Now()
		if err := p.Recover(t.Context()); err != nil {
			t.Error(err)
		}
		if took := time.Since(start); took > recoverWait {
			t.Errorf("took %s", took)
		}
		if w.specs.of("uid-z") == nothing {
			t.Error("an idle claim has no spec")
		}
	})
}

// slowRead is a fake GPU that takes this long to answer Look.
type slowRead struct {
	*hardware
	time time.Duration
}

func (s *slowRead) Look(ctx context.Context, c device.Card) (device.CardState, error) {
	select {
	case <-ctx.Done():
		return device.CardState{}, failure(device.FailureTimeout, "look", c)
	case <-time.After(s.time):
		return s.hardware.Look(ctx, c)
	}
}

func TestSlowReadOutlivesClaimLockWait(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	mustPrepare(t, w.plugin(t), newClaim("c", allocated("r", small0)))
	w.specs.clear() // without w.scan the inventory lacks the new partitions
	synctest.Test(t, func(t *testing.T) {
		p := w.plugin(t)
		p.with(func(n *steps.Node) { n.Partitions = &slowRead{h, 3 * recoverWait} })
		if err := p.RepairAllSpecs(t.Context()); err != nil || w.specs.of("uid-c") == nothing {
			t.Errorf("the spec is %q: %v", w.specs.of("uid-c"), err)
		}
	})
}

// A claim with two GPUs waits for the second one, which hangs. The test expects that a claim on the
// first GPU is served meanwhile.
func TestClaimWaitingForGPUBlocksNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		withMPS(w)
		p := w.plugin(t)
		hanging, err := p.Locks.Acquire(t.Context(), claimlock.GPUNames(gpu1)...)
		if err != nil {
			t.Fatal(err)
		}
		both := newClaim("both", plain("x", share0), plain("y", gpu1+"-share"))
		w.readClaim = func() (*resourceapi.ResourceClaim, error) { return both, nil }
		done := make(chan error, 1)
		go func() { _, err := p.Prepare(t.Context(), both); done <- err }()
		synctest.Wait()
		began := time.Now()
		one := newClaim("one", plain("r", share0))
		w.readClaim = func() (*resourceapi.ResourceClaim, error) { return one, nil }
		mustPrepare(t, p, one)
		mustUnprepare(t, p, one.UID)
		if waited := time.Since(began); waited > time.Second {
			t.Errorf("a claim on one GPU waited %s for another GPU", waited)
		}
		w.readClaim = func() (*resourceapi.ResourceClaim, error) { return both, nil }
		hanging.Release()
		if err := <-done; err != nil {
			t.Error(err)
		}
		mustUnprepare(t, p, both.UID)
		checkClean(t, w)
	})
}
