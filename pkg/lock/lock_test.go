package lock

import (
	"context"
	"errors"
	"fmt"
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

func acquire(t *testing.T, s *Set, names ...Name) *Guard {
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
					t.Error("waited, but Waited is false")
				}
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
			})
			synctest.Wait() // until this caller is in the queue, before the next one starts
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

func TestDifferentNamesDoNotWait(t *testing.T) {
	s := set(t, t.TempDir())
	defer acquire(t, s, Name{File: "a"}).Release()
	h := acquire(t, s, Name{File: "b"})
	defer h.Release()
	if h.Waited {
		t.Error("waited for a lock that was free")
	}
}

func TestWaitEndsWithTheContext(t *testing.T) {
	s := set(t, t.TempDir())
	a, b := Name{File: "a"}, Name{File: "b"}
	holder := acquire(t, s, b)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := s.Acquire(ctx, a, b)
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "b") {
		t.Fatalf("got %v", err)
	}
	acquire(t, s, a).Release() // the canceled waiter holds nothing
	holder.Release()
	acquire(t, s, b).Release()
}

func TestWaiterInTheMiddleCanGiveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := set(t, t.TempDir())
		gpu := Name{File: "gpu"}
		first := acquire(t, s, gpu)
		ctx, cancel := context.WithCancel(t.Context())
		gaveUp := make(chan error, 1)
		go func() { _, err := s.Acquire(ctx, gpu); gaveUp <- err }()
		synctest.Wait()
		served := make(chan *Guard, 1)
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

var kinds = map[string]Name{"a file": {File: "gpu"}, "a part of one": {File: "claims", Part: "claim"}}

// The test uses two sets over one directory, which act like two processes. While one has a lock,
// the other must not get it.
func TestLockExcludesOtherProcesses(t *testing.T) {
	for kind, name := range kinds {
		t.Run(kind, func(t *testing.T) {
			dir := t.TempDir()
			mine, theirs := set(t, dir), set(t, dir)
			held := acquire(t, mine, name)
			short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			if _, err := theirs.Acquire(short, name); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), name.String()) {
				t.Fatalf("two processes hold one lock: %v", err)
			}
			got := acquireAsync(t, theirs, name)
			held.Release()
			h := <-got
			if h == nil {
				t.FailNow()
			}
			h.Release()
		})
	}
}

// Someone removes the file of a lock that a process has. Later callers must still get the lock, but
// never two of them at once.
func TestLockFollowsReplacedFile(t *testing.T) {
	for kind, name := range kinds {
		t.Run(kind, func(t *testing.T) {
			dir := t.TempDir()
			mine, theirs := set(t, dir), set(t, dir)
			first := acquire(t, mine, name)
			got := acquireAsync(t, theirs, name)
			if err := os.Remove(filepath.Join(dir, name.File)); err != nil {
				t.Fatal(err)
			}
			h := <-got
			if h == nil {
				t.FailNow()
			}
			first.Release()
			third, err := set(t, dir).tryFlock(name)
			if err != nil || third != nil {
				t.Errorf("the lock has two owners (%v)", err)
			}
			h.Release()
		})
	}
}

func TestPartsOfAFileLockIndependently(t *testing.T) {
	dir := t.TempDir()
	mine, theirs := set(t, dir), set(t, dir)
	for i := range 100 {
		for _, s := range []*Set{mine, theirs} {
			h := acquire(t, s, Name{File: "claims", Part: fmt.Sprintf("%p/%d", s, i)})
			if h.Waited {
				t.Error("waited for another's lock")
			}
			defer h.Release()
		}
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 1 {
		t.Errorf("%v (%v)", files, err)
	}
}

func TestConcurrentProcessesExcludeEachOther(t *testing.T) {
	dir := t.TempDir()
	claim := Name{File: "claims", Part: "claim"}
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

func TestUnusableDirectoryIsAnError(t *testing.T) {
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

func TestNameOutsideTheDirectoryIsRefused(t *testing.T) {
	s := set(t, t.TempDir())
	for _, bad := range []string{"", ".", "..", "../a", "a/b", "/a"} {
		if _, err := s.Acquire(t.Context(), Name{File: bad}); err == nil {
			t.Errorf("%q accepted", bad)
		}
	}
}

func TestFailedFlockReleasesTheQueue(t *testing.T) {
	for kind, name := range kinds {
		t.Run(kind, func(t *testing.T) {
			dir := t.TempDir()
			s := set(t, dir)
			file := filepath.Join(dir, name.File)
			if err := os.Symlink("nowhere/at/all", file); err != nil {
				t.Fatal(err)
			}
			_, err := s.Acquire(t.Context(), name)
			if err == nil || !strings.Contains(err.Error(), file) {
				t.Fatal(err)
			}
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
			acquire(t, s, name).Release()
		})
	}
}

func TestBusyErrorOnlyForContendedLocks(t *testing.T) {
	for kind, name := range kinds {
		t.Run(kind, func(t *testing.T) {
			dir := t.TempDir()
			s := set(t, dir)
			ended, end := context.WithCancel(t.Context())
			end()
			busy := new(BusyError)
			held := acquire(t, s, name)
			for process, other := range map[string]*Set{"this process": s, "another process": set(t, dir)} {
				if _, err := other.Acquire(ended, name); !errors.As(err, &busy) || !errors.Is(err, context.Canceled) {
					t.Errorf("locked by %s: %v", process, err)
				}
			}
			held.Release()
			file := filepath.Join(dir, name.File)
			if err := errors.Join(os.Remove(file), os.Symlink("nowhere/at/all", file)); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Acquire(ended, name); err == nil || errors.As(err, &busy) {
				t.Errorf("a file that cannot be opened: %v", err)
			}
		})
	}
}
