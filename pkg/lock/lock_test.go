package lock

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func set(t *testing.T, dir string) *Set {
	t.Helper()
	s, err := NewSet(dir)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func acquire(t *testing.T, s *Set, names ...Name) *Held {
	t.Helper()
	h, err := s.Acquire(t.Context(), names...)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestFirstComeFirstServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := set(t, t.TempDir())
		gpu := Name{File: "gpu"}
		first := acquire(t, s, gpu)
		var order []int
		var mu sync.Mutex
		var wg sync.WaitGroup
		for i := range 5 {
			wg.Go(func() {
				h, err := s.Acquire(t.Context(), gpu)
				if err != nil {
					t.Error(err)
					return
				}
				defer h.Release()
				if !h.Waited {
					t.Error("waited, and was not told")
				}
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
			})
			synctest.Wait() // the i-th is in the queue before the next comes
		}
		first.Release()
		wg.Wait()
		for i, got := range order {
			if got != i {
				t.Fatalf("served in the order %v", order)
			}
		}
	})
}

func TestOtherNamesDoNotWait(t *testing.T) {
	s := set(t, t.TempDir())
	defer acquire(t, s, Name{File: "a"}).Release()
	h := acquire(t, s, Name{File: "b"})
	defer h.Release()
	if h.Waited {
		t.Error("waited for a lock that was free")
	}
}

func TestWaitingEndsWithTheContext(t *testing.T) {
	s := set(t, t.TempDir())
	a, b := Name{File: "a"}, Name{File: "b"}
	holder := acquire(t, s, b)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := s.Acquire(ctx, a, b)
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "b") {
		t.Fatalf("got %v", err)
	}
	acquire(t, s, a).Release() // the one that gave up left nothing locked
	holder.Release()
	acquire(t, s, b).Release()
}

func TestAWaiterInTheMiddleGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := set(t, t.TempDir())
		gpu := Name{File: "gpu"}
		first := acquire(t, s, gpu)
		ctx, cancel := context.WithCancel(t.Context())
		gaveUp := make(chan error, 1)
		go func() { _, err := s.Acquire(ctx, gpu); gaveUp <- err }()
		synctest.Wait()
		served := make(chan *Held, 1)
		go func() { h, _ := s.Acquire(t.Context(), gpu); served <- h }()
		synctest.Wait()
		cancel()
		if err := <-gaveUp; !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		first.Release()
		(<-served).Release()
		acquire(t, s, gpu).Release()
	})
}

// Two sets over one directory stand for two processes: each opens its own files, as processes do.
func TestAnotherProcessIsKeptOut(t *testing.T) {
	dir := t.TempDir()
	mine, theirs := set(t, dir), set(t, dir)
	claim := Name{File: "claim", Temporary: true}
	held := acquire(t, mine, claim)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := theirs.Acquire(short, claim); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("two processes hold one claim: %v", err)
	}
	got := make(chan *Held)
	go func() {
		h, err := theirs.Acquire(t.Context(), claim)
		if err != nil {
			t.Error(err)
		}
		got <- h
	}()
	held.Release() // removes the file that the other one may be waiting on
	h := <-got
	if h == nil {
		t.FailNow()
	}
	if _, err := os.Stat(filepath.Join(dir, "claim")); err != nil {
		t.Errorf("the other process holds a file that has no name: %v", err)
	}
	h.Release()
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestManyProcessesExcludeEachOther(t *testing.T) {
	dir := t.TempDir()
	claim := Name{File: "claim", Temporary: true}
	var inside, most int
	var mu sync.Mutex
	count := func(d int) {
		mu.Lock()
		defer mu.Unlock()
		inside += d
		most = max(most, inside)
	}
	var wg sync.WaitGroup
	for range 4 {
		s := set(t, dir)
		wg.Go(func() {
			for range 25 {
				h, err := s.Acquire(t.Context(), claim)
				if err != nil {
					t.Error(err)
					return
				}
				count(1)
				count(-1)
				h.Release()
			}
		})
	}
	wg.Wait()
	if most != 1 {
		t.Errorf("%d held the lock at once", most)
	}
}

func TestADirectoryThatCannotBeMadeIsAnError(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := NewSet(filepath.Join(file, "locks")); err == nil {
		t.Error("accepted")
	}
	s := set(t, t.TempDir())
	if err := os.RemoveAll(s.dir); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Acquire(t.Context(), Name{File: "a"}); err == nil {
		t.Error("locked a file in a directory that is gone")
	}
}

func TestANameThatLeadsElsewhereIsRefused(t *testing.T) {
	s := set(t, t.TempDir())
	for _, bad := range []string{"", ".", "..", "../a", "a/b", "/a"} {
		if _, err := s.Acquire(t.Context(), Name{File: bad}); err == nil {
			t.Errorf("%q accepted", bad)
		}
	}
}

func TestTheFileOfAKilledHolderIsFoundAndFree(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "claim"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s := set(t, dir)
	h := acquire(t, s, Name{File: "claim", Temporary: true}, Name{File: "gpu"})
	if files, err := s.Files(); err != nil || strings.Join(files, " ") != "claim gpu" {
		t.Error(files, err)
	}
	h.Release()
	if files, err := s.Files(); err != nil || strings.Join(files, " ") != "gpu" {
		t.Error(files, err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Files(); err == nil {
		t.Error("listed a directory that is gone")
	}
}

func TestAFailedFlockLeavesTheQueueToTheNext(t *testing.T) {
	dir := t.TempDir()
	s := set(t, dir)
	file := filepath.Join(dir, "gpu")
	if err := os.Symlink("nowhere/at/all", file); err != nil {
		t.Fatal(err)
	}
	_, err := s.Acquire(t.Context(), Name{File: "gpu"})
	if err == nil || !strings.Contains(err.Error(), file) {
		t.Fatal(err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	acquire(t, s, Name{File: "gpu"}).Release()
}
