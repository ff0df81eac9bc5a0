package prepare

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// slow is hardware that has never done what it is asked when the caller's time is over.
type slow struct {
	*hardware
	look, destroy bool
}

func (s *slow) Look(ctx context.Context, c nvidia.Card) (nvidia.State, error) {
	if s.look {
		<-ctx.Done()
		return nvidia.State{}, failure(nvidia.CodeTimeout, "look", c)
	}
	return s.hardware.Look(ctx, c)
}

func (s *slow) Destroy(ctx context.Context, c nvidia.Card, in device.Instance) error {
	if s.destroy {
		<-ctx.Done()
		return failure(nvidia.CodeInUse, "destroy", c)
	}
	return s.hardware.Destroy(ctx, c, in)
}

func TestWhatComesRoundAgainDoesNotKeepAGPUForLong(t *testing.T) {
	for name, c := range map[string]struct {
		slow slow
		busy bool // another call has the GPU
		call func(*testing.T, *Preparer, nvidia.Card) error
	}{
		"a hand-over, the GPU is worked on":    {slow{}, true, adopts},
		"a hand-over, the GPU does not answer": {slow{look: true}, false, adopts},
		"a hand-over, the instance is in use":  {slow{destroy: true}, false, adopts},
		"giving back what is in use": {slow{destroy: true}, false, func(t *testing.T, p *Preparer, _ nvidia.Card) error {
			return p.Reconcile(t.Context())
		}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			h := withMIG(w)
			mustPrepare(t, w.plugin(t), newClaim("c", allocated("r", small0)))
			h.someoneElse(t, gpu0, 9, 4)
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
				p.Partitions = &c.slow
				if c.busy {
					held, err := p.Locks.Acquire(t.Context(), gpuLocks(gpu0)...)
					if err != nil {
						t.Fatal(err)
					}
					defer held.Release()
				}
				start := time.Now()
				if err := c.call(t, p, h.card(t, gpu0)); err == nil {
					t.Error("nobody was told")
				}
				if took := time.Since(start); took > roundTime {
					t.Errorf("it took %s", took)
				}
			})
		})
	}
}

func adopts(t *testing.T, p *Preparer, c nvidia.Card) error { return p.Adopt(t.Context(), c, gpu0) }

// Containers that restart wait for their specs.
func TestClaimsThatAreWorkedOnKeepNoOthersWithoutTheirSpecs(t *testing.T) {
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
			held, err := p.Locks.Acquire(t.Context(), claimLock(newClaim(fmt.Sprint(start)).UID))
			if err != nil {
				t.Fatal(err)
			}
			defer held.Release()
		}
		start := time.Now()
		go func() {
			<-time.After(recoverWait / 2)
			if w.specs.of("uid-z") == nothing {
				t.Error("a claim that nobody works on has no spec yet")
			}
		}()
		if err := p.Mend(t.Context()); err == nil {
			t.Error("nobody was told")
		}
		if took := time.Since(start); took > recoverWait+time.Second {
			t.Errorf("it took %s", took)
		}
	})
}

// An older instance may be working on several claims while a newer one starts, which the kubelet then waits for.
func TestAStartWaitsForAllClaimsThatAreWorkedOnAtOnce(t *testing.T) {
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
			held, err := p.Locks.Acquire(t.Context(), claimLock(newClaim(fmt.Sprint(start)).UID))
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
			t.Errorf("it took %s", took)
		}
		if w.specs.of("uid-z") == nothing {
			t.Error("a claim that nobody works on has no spec")
		}
	})
}

// thoughtful is hardware that takes its time to answer.
type thoughtful struct {
	*hardware
	time time.Duration
}

func (s *thoughtful) Look(ctx context.Context, c nvidia.Card) (nvidia.State, error) {
	select {
	case <-ctx.Done():
		return nvidia.State{}, failure(nvidia.CodeTimeout, "look", c)
	case <-time.After(s.time):
		return s.hardware.Look(ctx, c)
	}
}

func TestALookThatTakesLongerThanAWaitForAClaimIsNotGivenUp(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	mustPrepare(t, w.plugin(t), newClaim("c", allocated("r", small0)))
	w.specs.clear() // and the inventory has not seen it
	synctest.Test(t, func(t *testing.T) {
		p := w.plugin(t)
		p.Partitions = &thoughtful{h, 3 * recoverWait}
		if err := p.Mend(t.Context()); err != nil || w.specs.of("uid-c") == nothing {
			t.Errorf("its spec is %q: %v", w.specs.of("uid-c"), err)
		}
	})
}

// A claim over two GPUs of which one hangs: who wants the other is served.
func TestAClaimThatWaitsForAGPUKeepsNoOtherBusy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		withMPS(w)
		p := w.plugin(t)
		hanging, err := p.Locks.Acquire(t.Context(), gpuLocks(gpu1)...)
		if err != nil {
			t.Fatal(err)
		}
		both := newClaim("both", plain("x", share0), plain("y", gpu1+"-share"))
		w.reread = func() (*resourceapi.ResourceClaim, error) { return both, nil }
		done := make(chan error, 1)
		go func() { _, err := p.Prepare(t.Context(), both); done <- err }()
		synctest.Wait()
		began := time.Now()
		one := newClaim("one", plain("r", share0))
		w.reread = func() (*resourceapi.ResourceClaim, error) { return one, nil }
		mustPrepare(t, p, one)
		mustUnprepare(t, p, one.UID)
		if waited := time.Since(began); waited > time.Second {
			t.Errorf("who wants one GPU has waited %s for another", waited)
		}
		w.reread = func() (*resourceapi.ResourceClaim, error) { return both, nil }
		hanging.Release()
		if err := <-done; err != nil {
			t.Error(err)
		}
		mustUnprepare(t, p, both.UID)
		clean(t, w)
	})
}
