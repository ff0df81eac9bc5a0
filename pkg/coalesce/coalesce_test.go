package coalesce_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/coalesce"
)

var errBad = errors.New("bad")

func TestConcurrentCallsShareOneRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var work coalesce.Group[string]
		started := 0
		do := func() error {
			started++ // runs never overlap
			<-time.After(time.Millisecond)
			return nil
		}
		start := time.Now()
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				if err := work.Do("key", do); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		// Two runs must start: the first one before the other calls arrive, and a second one that all the
		// other calls share.
		if started != 2 || time.Since(start) != 2*time.Millisecond {
			t.Errorf("got %d runs in %s", started, time.Since(start))
		}
		if err := work.Do("key", do); err != nil || started != 3 {
			t.Errorf("want a new run after the last one ended: %d runs, %v", started, err)
		}
	})
}

func TestKeysDoNotWaitForEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var work coalesce.Group[string]
		hang := make(chan struct{})
		var first sync.WaitGroup
		first.Go(func() { _ = work.Do("hangs", func() error { <-hang; return nil }) })
		synctest.Wait()
		if err := work.Do("key", func() error { return nil }); err != nil {
			t.Error(err)
		}
		close(hang)
		first.Wait()
	})
}

func TestErrorGoesToAllCallersOfTheRunOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var work coalesce.Group[string]
		step := make(chan error)
		answers := make([]error, 5)
		var all sync.WaitGroup
		call := func(i int) {
			all.Go(func() { answers[i] = work.Do("key", func() error { return <-step }) })
			synctest.Wait()
		}
		call(0)
		call(1) // during the first run, which call 1 and call 2 must not share
		call(2)
		step <- nil
		synctest.Wait()
		call(3) // during the run of calls 1 and 2
		step <- errBad
		synctest.Wait()
		step <- nil
		synctest.Wait()
		call(4)
		step <- nil
		all.Wait()
		for i, bad := range []bool{false, true, true, false, false} {
			if errors.Is(answers[i], errBad) != bad {
				t.Errorf("call %d: %v", i, answers[i])
			}
		}
	})
}

// When Do returns without an error, everything that its caller changed before the call must have
// been saved by the run that Do waited for.
func TestRunSeesWhatItsCallersDidBefore(t *testing.T) {
	for seed := range uint64(100) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var work coalesce.Group[string]
				var mu sync.Mutex
				done, persisted := map[string]bool{}, map[string]bool{}
				pause := func(r *rand.Rand) { <-time.After(time.Duration(r.IntN(20)) * time.Millisecond) }
				var all sync.WaitGroup
				for i := range uint64(20) {
					r := rand.New(rand.NewPCG(seed, i))
					last := func() error {
						mu.Lock()
						seen := maps.Clone(done) // later changes are not persisted by this run
						mu.Unlock()
						pause(r)
						if r.IntN(4) == 0 {
							return errBad
						}
						mu.Lock()
						defer mu.Unlock()
						maps.Copy(persisted, seen)
						return nil
					}
					all.Go(func() {
						for n := range 5 {
							pause(r)
							what := fmt.Sprint(i, "-", n)
							mu.Lock()
							done[what] = true
							mu.Unlock()
							err := work.Do("key", last)
							mu.Lock()
							if err == nil && !persisted[what] {
								t.Errorf("%s was not persisted", what)
							}
							mu.Unlock()
						}
					})
				}
				all.Wait()
			})
		})
	}
}
