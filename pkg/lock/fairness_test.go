package lock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

var (
	a, b = Name{File: "a"}, Name{File: "b"}
	ab   = []Name{a, b}
)

// acquireAsync acquires locks in its own goroutine. The channel delivers the guard.
func acquireAsync(t *testing.T, s *Set, names ...Name) <-chan *Guard {
	t.Helper()
	got := make(chan *Guard, 1)
	go func() {
		h, err := s.Acquire(t.Context(), names...)
		if err != nil {
			t.Error(err)
		}
		got <- h
	}()
	return got
}

// acquireQueued is acquireAsync, but returns only when the caller waits in the queue or already has
// its locks.
func acquireQueued(t *testing.T, s *Set, names ...Name) <-chan *Guard {
	t.Helper()
	got := acquireAsync(t, s, names...)
	synctest.Wait()
	return got
}

func TestWaiterForHungLockHoldsNoOther(t *testing.T) {
	for name, hangs := range map[string]func(*testing.T, *Set, string) *Guard{
		"in this process":    func(t *testing.T, s *Set, _ string) *Guard { t.Helper(); return acquire(t, s, b) },
		"in another process": func(t *testing.T, _ *Set, dir string) *Guard { t.Helper(); return acquire(t, set(t, dir), b) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				s := set(t, dir)
				hanging := hangs(t, s, dir)
				both := acquireQueued(t, s, ab...)
				began := time.Now()
				for range 3 { // the waiter for both locks does not delay callers of the free one
					acquire(t, s, a).Release()
					acquire(t, set(t, dir), a).Release()
				}
				if waited := time.Since(began); waited > reservationTime {
					t.Errorf("waited %s while another waiter waits for the hung lock", waited)
				}
				// A caller that asks for the hung lock b later must get it only after the earlier waiter for
				// both locks had it.
				later := acquireQueued(t, s, b)
				hanging.Release()
				h := <-both
				select {
				case <-later:
					t.Error("a later caller got the lock first")
				default:
				}
				h.Release()
				(<-later).Release()
			})
		})
	}
}

// Other callers keep at least one of the two locks busy all the time, and more callers wait for
// each. A waiter for both locks must still get them, once the callers that came before it are
// served.
func TestWaiterForSeveralLocksDoesNotStarve(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := set(t, t.TempDir())
		const each = 20 * time.Millisecond
		stop := make(chan struct{})
		var wg sync.WaitGroup
		// Three callers compete for each lock, so two always wait. Their different start times make the
		// two locks change hands at different times.
		for i := range 6 {
			wg.Go(func() {
				<-time.After(time.Duration(i) * 3 * time.Millisecond)
				for {
					select {
					case <-stop:
						return
					default:
					}
					h, err := s.Acquire(t.Context(), ab[i%2])
					if err != nil {
						t.Error(err)
						return
					}
					<-time.After(each)
					h.Release()
				}
			})
		}
		<-time.After(10 * each)
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 100*each)
		defer cancel()
		h, err := s.Acquire(ctx, ab...)
		if waited := time.Since(began); err != nil || waited > 4*each {
			t.Errorf("waited %s where each holds a lock for %s and three were before: %v", waited, each, err)
		} else {
			h.Release()
		}
		close(stop)
		wg.Wait()
	})
}

func TestCanceledWaiterLetsOthersPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := set(t, t.TempDir())
		holder := acquire(t, s, b)
		ctx, cancel := context.WithCancel(t.Context())
		gaveUp := make(chan error, 1)
		go func() { _, err := s.Acquire(ctx, ab...); gaveUp <- err }()
		synctest.Wait()
		behind := acquireQueued(t, s, a)
		began := time.Now()
		cancel()
		if err := <-gaveUp; !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "a, b") {
			t.Error(err)
		}
		(<-behind).Release()
		if time.Since(began) > 0 {
			t.Error("a waiter waits for a canceled waiter's reservation")
		}
		holder.Release()
	})
}

// The test expects, for random sets of locks in two sets that act as processes, that no lock has
// two owners, and that every waiter that does not give up gets its locks.
func TestRandomLockSetsExcludeEachOther(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				sets := []*Set{set(t, dir), set(t, dir)}
				var mu sync.Mutex
				holders := map[string]int{}
				count := func(names []Name, by int) {
					mu.Lock()
					defer mu.Unlock()
					for _, n := range names {
						if holders[n.File] += by; holders[n.File] > 1 {
							t.Errorf("%s has %d holders", n.File, holders[n.File])
						}
					}
				}
				var wg sync.WaitGroup
				for worker := range 12 {
					random := rand.New(rand.NewPCG(seed, uint64(worker)))
					wg.Go(func() {
						for range 15 {
							var names []Name
							for _, n := range random.Perm(4)[:1+random.IntN(3)] {
								names = append(names, Name{File: fmt.Sprint("gpu", n)})
							}
							ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
							impatient := random.IntN(5) == 0
							if impatient {
								cancel()
								ctx, cancel = context.WithTimeout(t.Context(), time.Duration(random.IntN(50))*time.Millisecond)
							}
							h, err := sets[worker%2].Acquire(ctx, names...)
							if err != nil {
								if !impatient {
									t.Errorf("%v was not served: %v", names, err)
								}
								cancel()
								continue
							}
							count(names, 1)
							hold := time.Duration(random.IntN(20)) * time.Millisecond
							if random.IntN(10) == 0 {
								hold = 2 * reservationTime // acts like a hung GPU
							}
							<-time.After(hold)
							count(names, -1)
							h.Release()
							cancel()
						}
					})
				}
				wg.Wait()
				for _, s := range sets {
					if len(s.queue.since) > 0 || len(s.queue.waiting) > 0 {
						t.Errorf("left: %v, %v", s.queue.since, s.queue.waiting)
					}
				}
			})
		})
	}
}

func TestQueuePositionIsKept(t *testing.T) {
	q := queue{since: map[string]time.Time{"a": {}}}
	for _, place := range []uint64{2, 5, 1, 4, 3} {
		q.add(&waiter{ticket: place})
	}
	if !slices.IsSortedFunc(q.waiting, func(x, y *waiter) int { return int(x.ticket) - int(y.ticket) }) {
		t.Error("not in order")
	}
}
