package publish

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

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/util/workqueue"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fakeapi"
)

func TestPublishingRetriesWithBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fakeapi.New()
		var mu sync.Mutex // guards the variables below
		away, began := false, time.Now()
		var tries []time.Duration
		fakeapi.Prepend(client, "update", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
			mu.Lock()
			defer mu.Unlock()
			if !away {
				return false, nil, nil
			}
			tries = append(tries, time.Since(began))
			return true, nil, apierrors.NewServiceUnavailable("away")
		})
		u := startPublishingNode(t, client, readyWith("0000:1b:00.0"))
		advance(time.Minute)
		if n := len(fakeapi.Devices(t, client)); n != 1 {
			t.Fatalf("%d devices are published", n)
		}
		for range 2 { // twice, because a success must reset the pauses
			mu.Lock()
			away, began, tries = true, time.Now(), nil
			mu.Unlock()
			s := readyWith("0000:1b:00.0", "0000:43:00.0")
			s.Node.GPUs[0].UUID = "GPU-" + time.Now().String()
			u.setInventory(s)
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
			if n := len(fakeapi.Devices(t, client)); n != 2 {
				t.Errorf("%d devices are published", n)
			}
		}
		u.stop()
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

// startPublication starts u's publication after the test has changed it with the function prepare.
func startPublication(t *testing.T, u *publishingNode, prepare func(*publication)) {
	t.Helper()
	u.run(t, func(ctx context.Context) error {
		b, err := u.publisher.start(ctx)
		if err != nil {
			return err
		}
		defer func() { b.stopController() }()
		defer b.background.Wait()
		prepare(b)
		b.update(ctx)
		return b.loop(ctx)
	})
}

func TestRolloutPollsSeldomWhileAPIServerIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fakeapi.New()
		var away atomic.Bool
		fakeapi.Prepend(client, "update", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
			if away.Load() {
				return true, nil, apierrors.NewServiceUnavailable("away")
			}
			return false, nil, nil
		})
		u := newPublishingNode(t, client, manyGPUs())
		var polls atomic.Int64
		startPublication(t, u, func(b *publication) { b.retries = countingLimiter{b.retries, &polls} })
		advance(time.Minute)

		away.Store(true)
		u.node.Report(nodeview.Condition{Source: "release", Code: "hardware-released", Message: "released"})
		const outage = 10 * time.Minute
		advance(outage)
		if n, most := polls.Load(), int64(outage/rolloutPollMax)+50; n > most {
			t.Errorf("the publication woke %d times in %s, more than %d", n, outage, most)
		}
		away.Store(false)
		advance(publishRetryMax*3/2 + 2*rolloutPollMax)
		if n := u.taints(t); n != 70 {
			t.Errorf("%d taints are published after the API server is back", n)
		}
		u.node.Clear("release")
		advance(time.Second)
		if n := u.taints(t); n != 0 {
			t.Errorf("%d taints are still published a second after a change", n)
		}
		u.stop()
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
	p := newPublishingNode(t, client, readyWith("0000:1b:00.0")).publisher
	for name, ask := range map[string]func(ctx context.Context) error{
		"probe":   p.publish,
		"version": func(ctx context.Context) error { p.watchVersion(ctx, nil); return nil },
		"list": func(ctx context.Context) error {
			if _, err := p.adoptSlices(ctx); !errors.Is(err, context.Canceled) {
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
		client := fakeapi.New()
		var rejects atomic.Bool
		var probes atomic.Int64
		fakeapi.Prepend(client, "create", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
			if fakeapi.IsDryRun(a) && rejects.Load() {
				probes.Add(1)
				return true, nil, fakeapi.Invalid(field.Invalid(field.NewPath("spec"), "probe", "a policy refuses it"))
			}
			return false, nil, nil
		})
		u := newPublishingNode(t, client, readyWith("0000:1b:00.0"))
		startPublication(t, u, func(b *publication) {
			go func() {
				time.Sleep(time.Minute) //nolint:forbidigo // simulated time
				rejects.Store(true)
				b.probeAgain.Wake()
			}()
		})
		advance(time.Minute + time.Second)
		u.setXIDs(t, 79)
		advance(5 * time.Second)
		if n := u.taints(t); n != 1 {
			t.Errorf("after a change: %d taints", n)
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
		u.stop()
	})
}

// The pauses between probes grow while the API server asks for one after each write. After a quiet
// time the next probe must come soon.
func TestProbeAfterQuietTimeComesSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fakeapi.New()
		var probes atomic.Int64
		fakeapi.Prepend(client, "create", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
			if fakeapi.IsDryRun(a) {
				probes.Add(1)
			}
			return false, nil, nil
		})
		u := newPublishingNode(t, client, readyWith("0000:1b:00.0"))
		again := make(chan struct{})
		startPublication(t, u, func(b *publication) {
			go func() {
				for range again {
					b.probeAgain.Wake()
				}
			}()
		})
		defer close(again)
		synctest.Wait()
		probe := func(within time.Duration) bool {
			before := probes.Load()
			again <- struct{}{}
			advance(within)
			return probes.Load() > before
		}
		for range 10 {
			if !probe(2 * publishRetryMax) {
				t.Fatal("no probe")
			}
		}
		for probe(time.Second) { // the pause grows without a quiet time
		}
		advance(5 * publishRetryMax)
		if !probe(time.Second) {
			t.Error("after a quiet time the probe did not come within a second")
		}
		u.stop()
	})
}
