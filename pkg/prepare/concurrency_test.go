// Calls for one claim run one after another, and calls for different GPUs run concurrently.

package prepare_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

func TestConcurrentCallsGiveEachGPUToOneClaim(t *testing.T) {
	w := newWorld(t)
	claims := make([]*resourceapi.ResourceClaim, 8)
	for i := range claims {
		claims[i] = newClaim(fmt.Sprint("c", i), allocated("a", gpu0), allocated("b", gpu1))
	}
	var mu sync.Mutex
	prepared := map[types.UID]bool{}
	var wg sync.WaitGroup
	// Two plugin instances prepare the claims concurrently, as during an upgrade.
	for range 2 {
		p := w.plugin(t)
		p.OnRead = func(_ context.Context, _, name string) (*resourceapi.ResourceClaim, error) {
			for _, c := range claims {
				if c.Name == name {
					return c, nil
				}
			}
			return nil, errors.New("not found")
		}
		for _, c := range claims {
			wg.Go(func() {
				_, err := p.Prepare(t.Context(), c)
				if err != nil {
					if cause.Of(err) != cause.Held {
						t.Error(err)
					}
					return
				}
				mu.Lock()
				prepared[c.UID] = true
				mu.Unlock()
			})
		}
	}
	wg.Wait()
	if len(prepared) != 1 || len(w.records()) != 1 {
		t.Errorf("prepared %v, records %q", prepared, w.records())
	}
}

func TestConcurrentClaimsOnOneGPU(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	claims := map[string]*resourceapi.ResourceClaim{}
	for _, gpu := range []string{gpu0, gpu1} {
		for start := range 7 {
			name := fmt.Sprintf("%s-%d", gpu, start)
			claims[name] = newClaim(name, allocated("r", fmt.Sprintf("%s-mig-19-%d", gpu, start)))
		}
	}
	var plugins []*plugin
	for range 2 { // as during an upgrade
		p := w.plugin(t)
		p.OnRead = func(_ context.Context, _, name string) (*resourceapi.ResourceClaim, error) { return claims[name], nil }
		plugins = append(plugins, p)
	}
	all := func(do func(*plugin, *resourceapi.ResourceClaim) error) {
		var wg sync.WaitGroup
		for _, p := range plugins {
			wg.Go(func() {
				if err := p.Reconcile(t.Context()); err != nil {
					t.Error(err)
				}
			})
			for _, c := range claims {
				wg.Go(func() {
					if err := do(p, c); err != nil {
						t.Error(err)
					}
				})
			}
		}
		wg.Wait()
	}
	all(func(p *plugin, c *resourceapi.ResourceClaim) error {
		_, err := p.Prepare(t.Context(), c)
		return err
	})
	for _, gpu := range []string{gpu0, gpu1} {
		if n := len(h.of(t, gpu).Instances); n != 7 {
			t.Errorf("%s has %d instances", gpu, n)
		}
	}
	w.scan()
	checkRecordsMatchHardware(t, w, h, plugins[0], nil)
	all(func(p *plugin, c *resourceapi.ResourceClaim) error { return p.Unprepare(t.Context(), c.UID) })
	checkClean(t, w)
	for _, gpu := range []string{gpu0, gpu1} {
		if n := len(h.of(t, gpu).Instances); n != 0 {
			t.Errorf("%s has %d instances", gpu, n)
		}
	}
}

func TestConcurrentSharing(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	claims := map[string]*resourceapi.ResourceClaim{}
	for i := range 24 {
		name := fmt.Sprint("many-", i)
		claims[name] = newClaim(name, []result{
			fraction("r", share1, "1Gi", "0"), fraction("r", migShare0, "1Gi", "0"), plain("r", gpu0+"-mig-19-3-share"),
		}[i%3])
	}
	var plugins []*plugin
	for range 2 { // as during an upgrade
		p := w.plugin(t)
		p.OnRead = func(_ context.Context, _, name string) (*resourceapi.ResourceClaim, error) { return claims[name], nil }
		plugins = append(plugins, p)
	}
	stop := make(chan struct{})
	var compared, worked sync.WaitGroup
	for _, p := range plugins {
		compared.Go(func() {
			for {
				select {
				case <-stop:
					return
				default: // errors during a transition are transient
					_ = p.Reconcile(t.Context())
				}
			}
		})
	}
	for i, c := range slices.Collect(maps.Values(claims)) {
		worked.Go(func() {
			for round := range 3 {
				p := plugins[(i+round)%len(plugins)]
				if _, err := p.Prepare(t.Context(), c); err != nil {
					t.Error(err)
				}
				if err := p.Unprepare(t.Context(), c.UID); err != nil {
					t.Error(err)
				}
			}
		})
	}
	worked.Wait()
	close(stop)
	compared.Wait()
	if err := plugins[0].Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	checkSharedState(t, w, h, plugins[0], device.TimeSliceDefault)
	if len(w.holders()) != 0 || len(h.of(t, gpu0).Instances) != 0 {
		t.Errorf("left: %q, %s", w.holders(), steps.DescribeInstances(h.of(t, gpu0).State().MIG.Instances...))
	}
	checkClean(t, w)
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
				other, err := p.Locks.Acquire(t.Context(), gpu0)
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

// A claim with two GPUs waits for the second one, which hangs. The test expects that a claim on the
// first GPU is served meanwhile.
func TestClaimWaitingForGPUBlocksNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		withMPS(w)
		p := w.plugin(t)
		hanging, err := p.Locks.Acquire(t.Context(), gpu1)
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

func TestHungDaemonDelaysOnlyItsGPU(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	synctest.Test(t, func(t *testing.T) {
		w.daemons.hang["GPU-0"] = true
		p := w.plugin(t)
		const kubelets = 45 * time.Second
		done := make(chan error)
		start := time.Now()
		go func() {
			_, err := p.Prepare(t.Context(), newClaim("hanging", fraction("r", share0, "1Gi", "0")))
			done <- err
		}()
		synctest.Wait()
		mustPrepare(t, p, newClaim("neighbor", fraction("r", share1, "1Gi", "0")))
		mustPrepare(t, p, newClaim("admin", admin("r", gpu0)))
		if took := time.Since(start); took > 0 {
			t.Errorf("another GPU's claim waited for %s", took)
		}
		err := <-done
		if took := time.Since(start); took > kubelets-10*time.Second {
			t.Errorf("the answer came after %s", took)
		}
		for _, want := range []string{"default/hanging", gpu0, "not ready within 20s"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v does not say %q", err, want)
			}
		}
		if h.of(t, gpu0).ComputeMode != device.ComputeDefault || len(w.holders()) != 2 {
			t.Errorf("left: %s, %q", h.of(t, gpu0).ComputeMode, w.holders())
		}
		clear(w.daemons.hang)
		mustPrepare(t, p, newClaim("hanging", fraction("r", share0, "1Gi", "0")))
	})
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
