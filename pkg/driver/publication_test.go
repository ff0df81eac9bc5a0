package driver

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

func TestPublishingRetriesWithBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, inv := apiServer(), &fakeInventory{}
		inv.set(readyWith("0000:1b:00.0"))
		var mu sync.Mutex // guards the variables below
		away, began := false, time.Now()
		var tries []time.Duration
		prependReactor(client, "update", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
			mu.Lock()
			defer mu.Unlock()
			if !away {
				return false, nil, nil
			}
			tries = append(tries, time.Since(began))
			return true, nil, apierrors.NewServiceUnavailable("away")
		})
		p := &publisher{
			client: client, nodeName: "node", inv: inv, slices: wholeGPUs, onVersion: func(string) {}, mark: unmarked,
			onError: func(_ context.Context, err error, _ string) {
				if !isRecoverable(err) {
					t.Error(err)
				}
			},
		}
		ctx, stop := context.WithCancel(t.Context())
		changed, done := make(chan struct{}, 1), make(chan error, 1)
		go func() { done <- p.publish(ctx, changed) }()
		advance(time.Minute)
		if n := len(published(t, client)); n != 1 {
			t.Fatalf("%d devices are published", n)
		}
		for range 2 { // twice, because a success must reset the pauses
			mu.Lock()
			away, began, tries = true, time.Now(), nil
			mu.Unlock()
			s := readyWith("0000:1b:00.0", "0000:43:00.0")
			s.Node.GPUs[0].UUID = "GPU-" + time.Now().String()
			inv.set(s)
			changed <- struct{}{}
			advance(10 * time.Minute)
			mu.Lock()
			for i := 1; i < len(tries); i++ {
				if pause := tries[i] - tries[i-1]; pause > publishRetryMax*3/2 {
					t.Errorf("try %d came after %s", i, pause)
				}
			}
			if n := len(tries); n < 5 || tries[4] > 10*time.Second || n > 50 {
				t.Errorf("tried %d times: %s", n, tries)
			}
			away = false
			mu.Unlock()
			advance(publishRetryMax * 3 / 2)
			if n := len(published(t, client)); n != 2 {
				t.Errorf("%d devices are published", n)
			}
		}
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// countingLimiter counts how often the publication looks whether the slice controller has written a
// slice.
type countingLimiter struct {
	workqueue.TypedRateLimiter[string]
	polls *atomic.Int64
}

func (c countingLimiter) NumRequeues(pool string) int {
	c.polls.Add(1)
	return c.TypedRateLimiter.NumRequeues(pool)
}

func TestRolloutPollsSeldomWhileAPIServerIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, inv := apiServer(), &fakeInventory{}
		inv.set(manyGPUs())
		var away, ill atomic.Bool
		prependReactor(client, "update", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
			if away.Load() {
				return true, nil, apierrors.NewServiceUnavailable("away")
			}
			return false, nil, nil
		})
		p := &publisher{
			client: client, nodeName: "node", inv: inv, slices: wholeGPUs, onVersion: func(string) {},
			onError: func(context.Context, error, string) {},
			mark: func(all []resourceslice.Slice, _ inventory.Snapshot, _ Features) ([]resourceslice.Slice, bool) {
				for i := range all {
					if ill.Load() {
						all[i].Devices[0].Taints = []resourceapi.DeviceTaint{{
							Key: "gpu.nvidia.com/unhealthy", Effect: resourceapi.DeviceTaintEffectNoSchedule,
						}}
					}
				}
				return all, true
			},
		}
		taints := func() (n int) {
			for _, s := range mustList(t, client) {
				n += len(s.Spec.Devices[0].Taints)
			}
			return n
		}
		ctx, stop := context.WithCancel(t.Context())
		changed := make(chan struct{}, 1)
		b, err := p.start(ctx, changed)
		if err != nil {
			t.Fatal(err)
		}
		var polls atomic.Int64
		b.retries = countingLimiter{b.retries, &polls}
		done := make(chan struct{})
		go func() { defer close(done); b.loop(ctx, changed) }()
		advance(time.Minute)

		away.Store(true)
		ill.Store(true)
		changed <- struct{}{}
		const outage = 10 * time.Minute
		advance(outage)
		if n, most := polls.Load(), int64(outage/rolloutPollMax)+50; n > most {
			t.Errorf("the publication woke %d times in %s, more than %d", n, outage, most)
		}
		away.Store(false)
		advance(publishRetryMax*3/2 + 2*rolloutPollMax)
		if n := taints(); n != 2 {
			t.Errorf("%d taints are published after the API server is back", n)
		}
		ill.Store(false)
		changed <- struct{}{}
		advance(time.Second)
		if n := taints(); n != 0 {
			t.Errorf("%d taints are still published a second after a change", n)
		}
		stop()
		<-done
		b.controller.Stop()
	})
}

func TestSilentAPIServerDoesNotBlockStop(t *testing.T) {
	asked, over := make(chan struct{}, 100), make(chan struct{})
	silent := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		asked <- struct{}{}
		<-over
	}))
	defer silent.Close()
	defer close(over)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: silent.URL})
	if err != nil {
		t.Fatal(err)
	}
	inv := &fakeInventory{}
	inv.set(readyWith("0000:1b:00.0"))
	p := &publisher{
		client: client, nodeName: "node", inv: inv, slices: wholeGPUs, onVersion: func(string) {}, mark: unmarked,
		onError: func(_ context.Context, err error, _ string) { t.Error(err) },
	}
	for name, ask := range map[string]func(ctx context.Context) error{
		"probe":   func(ctx context.Context) error { return p.publish(ctx, nil) },
		"version": func(ctx context.Context) error { p.watchVersion(ctx, nil); return nil },
		"list": func(ctx context.Context) error {
			if _, _, err := p.publishFirst(ctx, nil); !errors.Is(err, context.Canceled) {
				return err
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- ask(ctx) }()
			<-asked
			stop()
			select {
			case err := <-done:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(20 * time.Second):
				t.Error("the call still waits for the API server")
			}
		})
	}
}

// Taints must be published even while the API server rejects every probe of its features.
func TestTaintsArePublishedWhileProbesFail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, inv := apiServer(), &fakeInventory{}
		inv.set(readyWith("0000:1b:00.0"))
		var rejects, ill atomic.Bool
		var probes atomic.Int64
		prependReactor(client, "create", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
			if create, ok := a.(clienttesting.CreateActionImpl); ok && len(create.CreateOptions.DryRun) > 0 && rejects.Load() {
				probes.Add(1)
				return true, nil, invalid(field.Invalid(field.NewPath("spec"), "probe", "a policy refuses it"))
			}
			return false, nil, nil
		})
		p := &publisher{
			client: client, nodeName: "node", inv: inv, slices: wholeGPUs, onVersion: func(string) {},
			onError: func(context.Context, error, string) {},
			mark: func(all []resourceslice.Slice, _ inventory.Snapshot, _ Features) ([]resourceslice.Slice, bool) {
				if ill.Load() {
					all[0].Devices[0].Taints = []resourceapi.DeviceTaint{{
						Key: "gpu.nvidia.com/unhealthy", Effect: resourceapi.DeviceTaintEffectNoSchedule,
					}}
				}
				return all, true
			},
		}
		ctx, stop := context.WithCancel(t.Context())
		changed := make(chan struct{}, 1)
		b, err := p.start(ctx, changed)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() { defer close(done); b.loop(ctx, changed) }()
		advance(time.Minute)

		rejects.Store(true)
		wake(b.probeAgain)
		advance(time.Second)
		ill.Store(true)
		wake(changed)
		advance(5 * time.Second)
		if taints := mustList(t, client)[0].Spec.Devices[0].Taints; len(taints) != 1 {
			t.Errorf("after a change: %+v", taints)
		}
		const outage = 10 * time.Minute
		advance(outage)
		if n, most := probes.Load(), int64(outage/(publishRetryMax/2))+20; n < 10 || n > most {
			t.Errorf("%d probes in %s", n, outage)
		}
		rejects.Store(false)
		advance(2 * publishRetryMax)
		before := probes.Load()
		advance(outage)
		if n := probes.Load() - before; n > 0 {
			t.Errorf("%d probes after one was answered", n)
		}
		stop()
		<-done
		b.controller.Stop()
	})
}
