package prepare

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// forPods is the claim reserved for these Pods alone.
func forPods(c *resourceapi.ResourceClaim, pods ...string) *resourceapi.ResourceClaim {
	c.Status.ReservedFor = nil
	for _, pod := range pods {
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: pod, UID: types.UID(pod)})
	}
	return c
}

func TestAClaimThatNoPodMayUseIsNotPrepared(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	if _, err := p.Prepare(t.Context(), forPods(newClaim("c", allocated("r", gpu0)))); CauseOf(err) != CauseClaim || !strings.Contains(err.Error(), "not reserved for any Pod") {
		t.Error(err)
	}
	clean(t, w)
}

// The kubelet's call was read before the claim was given back, and comes to its turn, without a wait, after that.
func TestAPrepareThatAnUnprepareHasOvertakenReadsTheClaimAgain(t *testing.T) {
	for name, c := range map[string]struct {
		now  []string
		want bool
	}{
		"its Pod has gone":              {nil, false},
		"its next Pod waits":            {[]string{"next"}, true},
		"its Pod is there all the time": {[]string{"pod-c"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			p := w.plugin(t)
			given := map[types.UID]bool{}
			p.GivenBack = func(uid types.UID) { given[uid] = true }
			p.Overtaken = func(_ context.Context, uid types.UID) bool { return given[uid] }
			before := newClaim("c", allocated("r", gpu0))
			mustPrepare(t, p, before)
			mustUnprepare(t, p, before.UID)
			w.reread = func() (*resourceapi.ResourceClaim, error) {
				return forPods(newClaim("c", allocated("r", gpu0)), c.now...), nil
			}
			_, err := p.Prepare(t.Context(), before)
			if c.want != (err == nil) {
				t.Errorf("prepared, %v; want %v", err, c.want)
			}
			if !c.want {
				clean(t, w)
			}
		})
	}
}

func TestACallThatTheKubeletHasGivenUpIsNotBegun(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	ctx, cancel := context.WithCancel(t.Context())
	p.Overtaken = func(context.Context, types.UID) bool { t.Error("asked for more than is needed"); return false }
	p.Hardware = during{w, cancel}
	if _, err := p.Prepare(ctx, newClaim("c", allocated("r", gpu0))); CauseOf(err) != CauseCanceled {
		t.Error(err)
	}
	clean(t, w)
}

// An API server that does not answer fails the call that asks it, and delays nobody else.
func TestAStalledReadOfAClaimDelaysNoOtherClaimOnTheGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		p := w.plugin(t)
		neighbour, next := newClaim("neighbour", plain("r", share0)), newClaim("next", plain("r", share0))
		mustPrepare(t, p, neighbour)
		p.Overtaken = func(_ context.Context, uid types.UID) bool { return uid == "uid-stalled" }
		p.Reread = func(ctx context.Context, _, _ string) (*resourceapi.ResourceClaim, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		began := time.Now()
		ended := make(chan error)
		go func() {
			const kubelets = 45 * time.Second
			ctx, cancel := context.WithTimeout(t.Context(), kubelets)
			defer cancel()
			_, err := p.Prepare(ctx, newClaim("stalled", plain("r", share0)))
			ended <- err
		}()
		synctest.Wait()
		mustUnprepare(t, p, neighbour.UID)
		mustPrepare(t, p, next)
		if took := time.Since(began); took > 0 {
			t.Errorf("the neighbours waited %v", took)
		}
		err := <-ended
		if CauseOf(err) != CauseCanceled || !strings.Contains(err.Error(), "default/stalled") || !strings.Contains(err.Error(), "the API server did not answer within 5s") {
			t.Error(err)
		}
		if took := time.Since(began); took != 5*time.Second {
			t.Errorf("it failed after %v", took)
		}
		mustUnprepare(t, p, next.UID)
		clean(t, w)
	})
}

// A call that waits for its GPU keeps the claim's lock: whatever gives the claim back, or prepares it
// for another allocation, comes after it. So nobody has to ask the API server once more.
func TestCallsForAClaimThatWaitsForItsGPUComeAfterIt(t *testing.T) {
	for name, after := range map[string]func(*Preparer) error{
		"given back": func(p *Preparer) error { return p.Unprepare(context.Background(), "uid-c") },
		"allocated anew": func(p *Preparer) error {
			_, err := p.Prepare(context.Background(), newClaim("c", allocated("r", gpu1)))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				p := w.plugin(t)
				other, err := p.Locks.Acquire(t.Context(), gpuLocks(gpu0)...)
				if err != nil {
					t.Fatal(err)
				}
				ended := make(chan error, 2)
				go func() {
					_, err := p.Prepare(t.Context(), newClaim("c", allocated("r", gpu0)))
					ended <- err
				}()
				synctest.Wait()
				w.reread = func() (*resourceapi.ResourceClaim, error) { return newClaim("c", allocated("r", gpu1)), nil }
				go func() { ended <- after(w.plugin(t)) }()
				synctest.Wait()
				other.Release()
				for range 2 {
					if err := <-ended; err != nil {
						t.Error(err)
					}
				}
				for _, record := range w.records() {
					if record != "uid-c_"+gpu1+".json" {
						t.Errorf("left: %s", record)
					}
				}
				if err := p.Unprepare(t.Context(), "uid-c"); err != nil {
					t.Error(err)
				}
				clean(t, w)
			})
		})
	}
}

// during does something each time when the node is looked at.
type during struct {
	Hardware
	do func()
}

func (d during) Snapshot() inventory.Snapshot {
	d.do()
	return d.Hardware.Snapshot()
}
