package driver

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
)

func TestPublishingIsTriedLessAndLessOftenWhileItFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, inv := apiServer(), &fakeInventory{}
		inv.set(readyWith("0000:1b:00.0"))
		var mu sync.Mutex // guards what follows
		away, began := false, time.Now()
		var tries []time.Duration
		client.PrependReactor("update", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
			mu.Lock()
			defer mu.Unlock()
			if !away {
				return false, nil, nil
			}
			tries = append(tries, time.Since(began))
			return true, nil, apierrors.NewServiceUnavailable("away")
		})
		p := &publisher{
			client: client, nodeName: "node", inv: inv, slices: wholeGPUs, mark: unmarked,
			onError: func(_ context.Context, err error, _ string) {
				if !isRecoverable(err) {
					t.Error(err)
				}
			},
		}
		ctx, stop := context.WithCancel(t.Context())
		changed, done := make(chan struct{}, 1), make(chan error, 1)
		go func() { done <- p.publish(ctx, changed) }()
		passes(time.Minute)
		if n := len(published(t, client)); n != 1 {
			t.Fatalf("%d devices are published", n)
		}
		for range 2 { // what failed once does not slow down what fails later
			mu.Lock()
			away, began, tries = true, time.Now(), nil
			mu.Unlock()
			s := readyWith("0000:1b:00.0", "0000:43:00.0")
			s.Node.GPUs[0].UUID = "GPU-" + time.Now().String()
			inv.set(s)
			changed <- struct{}{}
			passes(10 * time.Minute)
			mu.Lock()
			for i := 1; i < len(tries); i++ {
				if pause := tries[i] - tries[i-1]; pause > publishRetryMost*3/2 {
					t.Errorf("try %d came after %s", i, pause)
				}
			}
			if n := len(tries); n < 5 || tries[4] > 10*time.Second || n > 50 {
				t.Errorf("tried %d times: %s", n, tries)
			}
			away = false
			mu.Unlock()
			passes(publishRetryMost * 3 / 2)
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

func TestAnAPIServerThatDoesNotAnswerKeepsNoPluginFromEnding(t *testing.T) {
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
	p := &publisher{client: client, nodeName: "node", inv: inv, slices: wholeGPUs, mark: unmarked, onError: func(_ context.Context, err error, _ string) { t.Error(err) }}
	for name, ask := range map[string]func(ctx context.Context) error{
		"which fields it keeps": func(ctx context.Context) error { return p.publish(ctx, nil) },
		"for its version":       func(ctx context.Context) error { p.followVersion(ctx, nil); return nil },
		"for what there is": func(ctx context.Context) error {
			if _, _, err := p.first(ctx, nil); !errors.Is(err, context.Canceled) {
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
				t.Error("it still waits for the API server")
			}
		})
	}
}
