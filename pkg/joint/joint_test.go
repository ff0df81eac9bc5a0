package joint_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/joint"
)

var errBad = errors.New("bad")

func TestThoseWhoAskAtTheSameTimeShareTheWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var work joint.Work[string]
		begun := 0
		do := func() error {
			begun++ // never two at a time
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
		// The first begins before the others have come; those share the next.
		if begun != 2 || time.Since(start) != 2*time.Millisecond {
			t.Errorf("done %d times, in %s", begun, time.Since(start))
		}
		if err := work.Do("key", do); err != nil || begun != 3 {
			t.Errorf("what has ended counted: done %d times, %v", begun, err)
		}
	})
}

func TestOtherWorkIsNotWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var work joint.Work[string]
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

func TestAnErrorIsThatOfAllWhoShareItAndOfNobodyElse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var work joint.Work[string]
		step := make(chan error)
		answers := make([]error, 5)
		var all sync.WaitGroup
		call := func(i int) {
			all.Go(func() { answers[i] = work.Do("key", func() error { return <-step }) })
			synctest.Wait()
		}
		call(0)
		call(1) // while the first is under way, which does not count for these
		call(2)
		step <- nil
		synctest.Wait()
		call(3) // while theirs is under way
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

// Who has changed something and then asks that it be made to last has that, whatever others do at the same time.
func TestWhatWasDoneBeforeIsSeen(t *testing.T) {
	for seed := range uint64(100) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var work joint.Work[string]
				var mu sync.Mutex
				done, lasting := map[string]bool{}, map[string]bool{}
				pause := func(r *rand.Rand) { <-time.After(time.Duration(r.IntN(20)) * time.Millisecond) }
				var all sync.WaitGroup
				for i := range uint64(20) {
					r := rand.New(rand.NewPCG(seed, i))
					last := func() error {
						mu.Lock()
						seen := maps.Clone(done) // what comes later is not
						mu.Unlock()
						pause(r)
						if r.IntN(4) == 0 {
							return errBad
						}
						mu.Lock()
						defer mu.Unlock()
						maps.Copy(lasting, seen)
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
							if err == nil && !lasting[what] {
								t.Errorf("%s does not last", what)
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
