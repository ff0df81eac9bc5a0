package prepare_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/claimlock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// forPods makes the claim reserved for exactly these Pods.
func forPods(c *resourceapi.ResourceClaim, pods ...string) *resourceapi.ResourceClaim {
	c.Status.ReservedFor = nil
	for _, pod := range pods {
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: pod,
			UID: types.UID(pod)})
	}
	return c
}

func TestUnreservedClaimIsRefused(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	if _, err := p.Prepare(t.Context(), forPods(newClaim("c", allocated("r", gpu0)))); cause.Of(err) != cause.Claim ||
		!strings.Contains(err.Error(), "not reserved for any Pod") {
		t.Error(err)
	}
	checkClean(t, w)
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

// If the API server does not answer when Prepare reads a claim again, only this claim's Prepare
// must fail. It must not delay claims on the same GPU.
func TestStalledClaimReadDelaysNoOtherClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		p := w.plugin(t)
		neighbour, next := newClaim("neighbour", plain("r", share0)), newClaim("next", plain("r", share0))
		mustPrepare(t, p, neighbour)
		p.OnUnpreparedSince = func(_ context.Context, uid types.UID) bool { return uid == "uid-stalled" }
		p.OnRead = func(ctx context.Context, _, _ string) (*resourceapi.ResourceClaim, error) {
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
			t.Errorf("other claims waited %v", took)
		}
		err := <-ended
		if cause.Of(err) != cause.Canceled || !strings.Contains(err.Error(), "default/stalled") ||
			!strings.Contains(err.Error(), "the API server did not answer within 5s") {
			t.Error(err)
		}
		if took := time.Since(began); took != 5*time.Second {
			t.Errorf("failed after %v", took)
		}
		mustUnprepare(t, p, next.UID)
		checkClean(t, w)
	})
}

// A Prepare that waits for its GPU keeps the claim's lock. So an Unprepare, or a Prepare with
// another allocation, must run after it, and the waiting Prepare need not read the claim again.
func TestCallsQueueBehindClaimWaitingForGPU(t *testing.T) {
	for name, after := range map[string]func(*plugin) error{
		"unprepared": func(p *plugin) error { return p.Unprepare(context.Background(), "uid-c") },
		"allocated anew": func(p *plugin) error {
			_, err := p.Prepare(context.Background(), newClaim("c", allocated("r", gpu1)))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				p := w.plugin(t)
				other, err := p.Locks.Acquire(t.Context(), claimlock.GPUNames(gpu0)...)
				if err != nil {
					t.Fatal(err)
				}
				ended := make(chan error, 2)
				go func() {
					_, err := p.Prepare(t.Context(), newClaim("c", allocated("r", gpu0)))
					ended <- err
				}()
				synctest.Wait()
				w.readClaim = func() (*resourceapi.ResourceClaim, error) { return newClaim("c", allocated("r", gpu1)), nil }
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
				checkClean(t, w)
			})
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
