package lock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// set returns the locks in the directory dir. Two sets in one directory act like two processes.
func set(t *testing.T, dir string) *Set {
	t.Helper()
	s, err := NewSet(filepath.Join(dir, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func acquire(t *testing.T, s *Set, names ...string) *Guard {
	t.Helper()
	g, err := s.Acquire(t.Context(), names...)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// acquireAsync acquires locks in its own goroutine. The channel delivers the guard.
func acquireAsync(t *testing.T, s *Set, names ...string) <-chan *Guard {
	t.Helper()
	got := make(chan *Guard, 1)
	go func() {
		defer close(got)
		g, err := s.Acquire(t.Context(), names...)
		if err != nil {
			t.Error(err)
			return
		}
		got <- g
	}()
	return got
}

// eachSet runs test for waiters in the process that has the lock, and in another one.
func eachSet(t *testing.T, test func(t *testing.T, mine, theirs *Set)) {
	t.Helper()
	for name, other := range map[string]bool{"in this process": false, "in another process": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				mine := set(t, dir)
				theirs := mine
				if other {
					theirs = set(t, dir)
				}
				test(t, mine, theirs)
			})
		})
	}
}

func TestLockExcludesOthers(t *testing.T) {
	eachSet(t, func(t *testing.T, mine, theirs *Set) {
		held := acquire(t, mine, "gpu")
		short, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		busy := new(BusyError)
		_, err := theirs.Acquire(short, "gpu")
		if !errors.As(err, &busy) || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "gpu") {
			t.Fatalf("two callers have one lock: %v", err)
		}
		got := acquireAsync(t, theirs, "gpu")
		synctest.Wait()
		held.Release()
		g := <-got
		if !g.Waited {
			t.Error("waited, but Waited is false")
		}
		g.Release()
		if again := acquire(t, mine, "gpu"); again.Waited {
			t.Error("waited for a lock that was free")
		}
	})
}

func TestFirstComeFirstServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := set(t, t.TempDir())
		first := acquire(t, s, "gpu")
		var order []int
		var mu sync.Mutex
		var wg sync.WaitGroup
		for i := range 5 {
			wg.Go(func() {
				g, err := s.Acquire(t.Context(), "gpu")
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
				g.Release()
			})
			synctest.Wait() // until this caller is in the queue, before the next one starts
		}
		began := time.Now()
		first.Release()
		wg.Wait()
		if !slices.IsSorted(order) || time.Since(began) > 0 {
			t.Errorf("served in the order %v, after %s", order, time.Since(began))
		}
	})
}

func TestDifferentNamesDoNotWait(t *testing.T) {
	eachSet(t, func(t *testing.T, mine, theirs *Set) {
		for i := range 100 {
			for who, s := range []*Set{mine, theirs} {
				g := acquire(t, s, fmt.Sprintf("%d/%d", i, who))
				if g.Waited {
					t.Error("waited for another's lock")
				}
				defer g.Release()
			}
		}
	})
}

func TestGuardKeepsItsLocksWhenMoreAreBusy(t *testing.T) {
	eachSet(t, func(t *testing.T, mine, theirs *Set) {
		gpu := acquire(t, theirs, "gpu")
		claim := acquire(t, mine, "claim")
		ended, end := context.WithCancel(t.Context())
		end()
		busy := new(BusyError)
		if err := claim.Add(ended, "gpu", "another"); !errors.As(err, &busy) || !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		if _, err := theirs.Acquire(ended, "claim"); !errors.As(err, &busy) {
			t.Errorf("the guard lost its lock: %v", err)
		}
		acquire(t, theirs, "another").Release()
		gpu.Release()
		if err := claim.Add(ended, "gpu"); err != nil { // it is free, so the call does not wait
			t.Error(err)
		}
		claim.Release()
		acquire(t, theirs, "claim", "gpu").Release()
	})
}

func TestWaiterForHungLockHoldsNoOther(t *testing.T) {
	eachSet(t, func(t *testing.T, mine, theirs *Set) {
		hanging := acquire(t, theirs, "b")
		both := acquireAsync(t, mine, "a", "b")
		<-time.After(2 * reservation)
		for range 3 {
			for _, s := range []*Set{mine, theirs} {
				g := acquire(t, s, "a")
				if g.Waited {
					t.Error("waited while another waiter waits for the hung lock")
				}
				<-time.After(2 * longestPause) // the waiter tries meanwhile
				g.Release()
			}
		}
		// A caller that asks for the hung lock b later must get it only after the earlier waiter.
		later := acquireAsync(t, mine, "b")
		synctest.Wait()
		hanging.Release()
		g := <-both
		select {
		case <-later:
			t.Error("a later caller got the lock first")
		default:
		}
		g.Release()
		(<-later).Release()
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
				count := func(names []string, by int) {
					mu.Lock()
					defer mu.Unlock()
					for _, n := range names {
						if holders[n] += by; holders[n] > 1 {
							t.Errorf("%s has %d holders", n, holders[n])
						}
					}
				}
				var wg sync.WaitGroup
				for worker := range 12 {
					random := rand.New(rand.NewPCG(seed, uint64(worker)))
					wg.Go(func() {
						for range 15 {
							var names []string
							for _, n := range random.Perm(4)[:1+random.IntN(3)] {
								names = append(names, fmt.Sprint("gpu", n))
							}
							ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
							impatient := random.IntN(5) == 0
							if impatient {
								cancel()
								ctx, cancel = context.WithTimeout(t.Context(), time.Duration(random.IntN(50))*time.Millisecond)
							}
							g, err := sets[worker%2].Acquire(ctx, names...)
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
								hold = time.Second // acts like a hung GPU
							}
							<-time.After(hold)
							count(names, -1)
							g.Release()
							cancel()
						}
					})
				}
				wg.Wait()
				acquire(t, sets[0], "gpu0", "gpu1", "gpu2", "gpu3").Release() // none is left locked
			})
		})
	}
}

// Someone removes the file while a caller has a lock and another one waits for it. The waiter must
// get the lock of the new file, which excludes later callers.
func TestLockFollowsReplacedFile(t *testing.T) {
	eachSet(t, func(t *testing.T, mine, theirs *Set) {
		first := acquire(t, mine, "gpu")
		got := acquireAsync(t, theirs, "gpu")
		synctest.Wait()
		if err := os.Remove(mine.path); err != nil {
			t.Fatal(err)
		}
		first.Release()
		second := <-got
		ended, end := context.WithCancel(t.Context())
		end()
		busy := new(BusyError)
		if _, err := mine.Acquire(ended, "gpu"); !errors.As(err, &busy) {
			t.Errorf("the lock has two owners (%v)", err)
		}
		if err := os.Remove(mine.path); err != nil {
			t.Fatal(err)
		}
		if err := second.Add(t.Context(), "another"); !errors.Is(err, errReplaced) {
			t.Errorf("locked a name in a removed file: %v", err)
		}
		second.Release()
		acquire(t, mine, "gpu", "another").Release()
		if n := len(mine.granted) + len(theirs.granted); n > 0 {
			t.Errorf("%d locks count as granted after all were released", n)
		}
	})
}

func TestUnusableDirectoryIsAnError(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := NewSet(filepath.Join(file, "lock")); err == nil {
		t.Error("accepted")
	}
	s := set(t, t.TempDir())
	if err := os.RemoveAll(filepath.Dir(s.path)); err != nil {
		t.Fatal(err)
	}
	busy := new(BusyError)
	if _, err := s.Acquire(t.Context(), "a"); err == nil || errors.As(err, &busy) || !strings.Contains(err.Error(), s.path) {
		t.Errorf("locked a file in a directory that is gone: %v", err)
	}
}

// Without a reservation, a caller for two locks waits as long as others compete for each of them.
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
					g := acquire(t, s, []string{"a", "b"}[i%2])
					<-time.After(each)
					g.Release()
				}
			})
		}
		<-time.After(10 * each)
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 100*each)
		defer cancel()
		g, err := s.Acquire(ctx, "a", "b")
		if waited := time.Since(began); err != nil || waited > 4*each {
			t.Errorf("waited %s where each holds a lock for %s and three were before: %v", waited, each, err)
		} else {
			g.Release()
		}
		close(stop)
		wg.Wait()
	})
}

// A forked child has a copy of the open file until its exec.
func TestReleasedLockIsFreeDespiteCopyOfFile(t *testing.T) {
	s := set(t, t.TempDir())
	g := acquire(t, s, "gpu")
	copied, err := unix.Dup(int(g.file.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(copied) }()
	g.Release()
	g.Release()
	if again := acquire(t, s, "gpu"); again.Waited {
		t.Error("waited for a released lock")
	}
}
