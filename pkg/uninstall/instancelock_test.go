package uninstall

import (
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

func lockInstance(t *testing.T, dir string) *InstanceLock {
	t.Helper()
	p, err := AcquireInstanceLock(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Release)
	return p
}

func tryExclusive(t *testing.T, p *InstanceLock) bool {
	t.Helper()
	is, err := p.TryExclusive()
	if err != nil {
		t.Error(err)
	}
	return is
}

func TestOnlyTheLastInstanceGetsExclusiveLock(t *testing.T) {
	dir := t.TempDir()
	first, second := lockInstance(t, dir), lockInstance(t, dir)
	if tryExclusive(t, first) {
		t.Error("exclusive although another instance runs")
	}
	if !tryExclusive(t, second) {
		t.Error("the last instance did not get the exclusive lock")
	}
}

func TestOneOfSeveralEndingInstancesCleansUp(t *testing.T) {
	for range 200 {
		dir := filepath.Join(t.TempDir(), "plugin")
		instances := []*InstanceLock{lockInstance(t, dir), lockInstance(t, dir), lockInstance(t, dir)}
		var cleaning, cleaned atomic.Int32
		var all sync.WaitGroup
		for _, p := range instances {
			all.Go(func() {
				defer p.Release()
				if !tryExclusive(t, p) {
					return
				}
				if cleaning.Add(1) != 1 {
					t.Error("two instances have the exclusive lock")
				}
				if _, err := removePluginDir(dir, filepath.Join(dir, "state")); err != nil {
					t.Error(err)
				}
				cleaned.Add(1)
				cleaning.Add(-1)
			})
		}
		all.Wait()
		if _, err := os.Stat(dir); !os.IsNotExist(err) || cleaned.Load() == 0 {
			t.Fatalf("%d instances cleaned up; the directory: %v", cleaned.Load(), err)
		}
	}
}

func TestInstanceStartedDuringCleanupHasDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "plugin")
	leaves := lockInstance(t, dir)
	if !tryExclusive(t, leaves) {
		t.Fatal("did not get the exclusive lock")
	}
	started := make(chan *InstanceLock)
	go func() {
		p, err := AcquireInstanceLock(t.Context(), dir)
		if err != nil {
			t.Error(err)
		}
		started <- p
	}()
	if _, err := removePluginDir(dir, filepath.Join(dir, "state")); err != nil {
		t.Fatal(err)
	}
	leaves.Release()
	newcomer := <-started
	defer newcomer.Release()
	if !newcomer.inPlace() {
		t.Fatal("the new instance's lock file is not in place")
	}
	if other := lockInstance(t, dir); tryExclusive(t, other) {
		t.Error("exclusive although the new instance runs")
	}
}

func TestPipeInPlaceOfTheLockFileDoesNotStopAnInstance(t *testing.T) {
	dir := t.TempDir()
	durabletest.Pipe(t, filepath.Join(dir, instanceLockFile))
	durabletest.Returns(t, func() {
		if l, err := AcquireInstanceLock(t.Context(), dir); err != nil {
			t.Error(err)
		} else {
			_ = tryExclusive(t, l)
			l.Release()
		}
	})
}
