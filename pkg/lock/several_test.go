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

// asking is somebody who wants locks, in a goroutine of his own.
func asking(t *testing.T, s *Set, names ...Name) <-chan *Held {
	t.Helper()
	got := make(chan *Held, 1)
	go func() {
		h, err := s.Acquire(t.Context(), names...)
		if err != nil {
			t.Error(err)
		}
		got <- h
	}()
	return got
}

// asked is one who waits, or has what he wants, when it returns.
func asked(t *testing.T, s *Set, names ...Name) <-chan *Held {
	t.Helper()
	got := asking(t, s, names...)
	synctest.Wait()
	return got
}

func TestWhoWaitsForALockThatHangsHoldsNoOther(t *testing.T) {
	for name, hangs := range map[string]func(*testing.T, *Set, string) *Held{
		"in this process":    func(t *testing.T, s *Set, _ string) *Held { t.Helper(); return acquire(t, s, b) },
		"in another process": func(t *testing.T, _ *Set, dir string) *Held { t.Helper(); return acquire(t, set(t, dir), b) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				s := set(t, dir)
				hanging := hangs(t, s, dir)
				both := asked(t, s, ab...)
				began := time.Now()
				for range 3 { // one after the other, and nobody notices those who wait for both
					acquire(t, s, a).Release()
					acquire(t, set(t, dir), a).Release()
				}
				if waited := time.Since(began); waited > patience {
					t.Errorf("waited %s with somebody who waits for what hangs", waited)
				}
				// Whoever comes for what hangs gets in line behind.
				later := asked(t, s, b)
				hanging.Release()
				h := <-both
				select {
				case <-later:
					t.Error("who came later was served with the other")
				default:
				}
				h.Release()
				(<-later).Release()
			})
		})
	}
}

// Locks of which always one or another is held, and always somebody waits: who wants both is served when all have been who came before.
func TestWhoWantsSeveralDoesNotStarve(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := set(t, t.TempDir())
		const each = 20 * time.Millisecond
		stop := make(chan struct{})
		var wg sync.WaitGroup
		for i := range 6 { // three for each, so that two always wait, and the two locks change hands at different times
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

func TestWhoGivesUpLetsThoseBehindHimPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := set(t, t.TempDir())
		holder := acquire(t, s, b)
		ctx, cancel := context.WithCancel(t.Context())
		gaveUp := make(chan error, 1)
		go func() { _, err := s.Acquire(ctx, ab...); gaveUp <- err }()
		synctest.Wait()
		behind := asked(t, s, a)
		began := time.Now()
		cancel()
		if err := <-gaveUp; !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "a, b") {
			t.Error(err)
		}
		(<-behind).Release()
		if time.Since(began) > 0 {
			t.Error("who waits behind one that gave up waits for his patience")
		}
		holder.Release()
	})
}

// Whatever sets of locks are wanted, in whatever processes, held for however long and given up or not: no lock has two holders, and everybody who does not
// give up is served.
func TestAnySetsOfLocksExcludeEachOtherAndEnd(t *testing.T) {
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
								hold = 2 * patience // it hangs for a while
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
					if len(s.queue.taken) > 0 || len(s.queue.waiting) > 0 {
						t.Errorf("left: %v, %v", s.queue.taken, s.queue.waiting)
					}
				}
			})
		})
	}
}

func TestThePlaceInTheQueueIsKept(t *testing.T) {
	q := queue{taken: map[string]time.Time{"a": {}}}
	for _, place := range []uint64{2, 5, 1, 4, 3} {
		q.add(&waiter{place: place})
	}
	if !slices.IsSortedFunc(q.waiting, func(x, y *waiter) int { return int(x.place) - int(y.place) }) {
		t.Error("not in order")
	}
}
