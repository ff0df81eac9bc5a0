package e2e

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	toolswatch "k8s.io/client-go/tools/watch"
)

// offer is how many whole GPUs a node published from the time at until the next offer in the list.
type offer struct {
	at time.Time
	// gpus is the number of whole GPUs. It is 0 while the pool is incomplete, because the scheduler
	// ignores an incomplete pool.
	gpus    int
	because string
}

// sliceWatch records every state of a node's ResourceSlices that the API server reports.
type sliceWatch struct {
	t      *testing.T
	world  *world
	node   string
	mu     sync.Mutex
	slices map[string]*resourceapi.ResourceSlice
	offers []offer
	failed error
	// each is called with the devices of every complete pool, while mu is locked. It may be nil.
	each func(pool map[string]resourceapi.Device)
}

// watchSlices watches a node's ResourceSlices until the test ends. The test fails if the watch
// breaks off, because the watch would then prove nothing.
func (w *world) watchSlices(t *testing.T, node string) *sliceWatch {
	t.Helper()
	selector := "spec.driver=gpu.nvidia.com,spec.nodeName=" + node
	client := w.Client.ResourceV1().ResourceSlices()
	list, err := client.List(t.Context(), metav1.ListOptions{FieldSelector: selector})
	if err != nil {
		t.Fatal(err)
	}
	s := &sliceWatch{t: t, world: w, node: node, slices: map[string]*resourceapi.ResourceSlice{}}
	for i := range list.Items {
		s.slices[list.Items[i].Name] = &list.Items[i]
	}
	s.note("the watch began")
	watcher, err := toolswatch.NewRetryWatcherWithContext(t.Context(), list.ResourceVersion, &cache.ListWatch{
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.FieldSelector = selector
			return client.Watch(ctx, options)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for event := range watcher.ResultChan() {
			s.see(event)
		}
	}()
	t.Cleanup(func() {
		watcher.Stop()
		<-done
		if s.failed != nil {
			t.Errorf("the watch of the ResourceSlices broke off: %v", s.failed)
		}
	})
	return s
}

func (s *sliceWatch) see(event watch.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	slice, ok := event.Object.(*resourceapi.ResourceSlice)
	if !ok {
		s.failed = fmt.Errorf("%s: %v", event.Type, event.Object)
		return
	}
	switch event.Type {
	case watch.Added, watch.Modified:
		s.slices[slice.Name] = slice
	case watch.Deleted:
		delete(s.slices, slice.Name)
	default:
		return
	}
	s.note(fmt.Sprintf("%s %s generation %d", event.Type, slice.Name, slice.Spec.Pool.Generation))
}

// note adds an offer with the number of whole GPUs in the pool's newest generation, or with 0 if
// slices of that generation are missing. The parameter because says what has changed.
func (s *sliceWatch) note(because string) {
	var newest, want int64
	var have int64
	gpus := 0
	for _, slice := range s.slices {
		pool := slice.Spec.Pool
		if pool.Generation > newest || have == 0 {
			newest, want, have, gpus = pool.Generation, pool.ResourceSliceCount, 0, 0
		}
		if pool.Generation == newest {
			have++
			for i := range slice.Spec.Devices {
				if isWhole(&slice.Spec.Devices[i]) {
					gpus++
				}
			}
		}
	}
	if have != want {
		gpus = 0
	} else if s.each != nil {
		s.each(s.pool(newest))
	}
	s.offers = append(s.offers, offer{time.Now(), gpus, because})
}

// pool returns the devices of one generation of the pool, by name.
func (s *sliceWatch) pool(generation int64) map[string]resourceapi.Device {
	pool := map[string]resourceapi.Device{}
	for _, slice := range s.slices {
		if slice.Spec.Pool.Generation != generation {
			continue
		}
		for _, d := range slice.Spec.Devices {
			pool[d.Name] = d
		}
	}
	return pool
}

// history waits until the watch has seen the node's current slices. It returns the offers from the
// given time on, and first the one that was valid at that time.
func (s *sliceWatch) history(since time.Time) []offer {
	s.t.Helper()
	eventually(s.t, 30*time.Second, "the watch has seen the node's ResourceSlices as they are", func() (bool, string) {
		list := s.world.slices(s.t, s.node)
		s.mu.Lock()
		defer s.mu.Unlock()
		for i := range list {
			if seen, ok := s.slices[list[i].Name]; !ok || seen.ResourceVersion != list[i].ResourceVersion {
				return false, list[i].Name
			}
		}
		return len(list) == len(s.slices), fmt.Sprint(len(list), " slices, seen ", len(s.slices))
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	first := 0
	for i, o := range s.offers {
		if !o.at.After(since) {
			first = i
		}
	}
	return append([]offer(nil), s.offers[first:]...)
}

// alwaysOffered fails the test unless the node published exactly n whole GPUs at every moment from
// the given time on.
func (s *sliceWatch) alwaysOffered(n int, since time.Time) {
	s.t.Helper()
	for _, o := range s.history(since) {
		if o.gpus != n {
			s.t.Errorf("node %s offered %d GPUs instead of %d from %s on: %s", s.node, o.gpus, n, o.at.Format(time.StampMilli), o.because)
		}
	}
}
