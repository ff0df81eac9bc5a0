package driver

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func acquire(t *testing.T, leader *leaderLock) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := leader.Acquire(ctx); err != nil {
		t.Fatalf("acquire the leader lock: %v", err)
	}
}

func TestOlderInstanceHandsOverToNewer(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	older, newer := newLeaderLock(dir, now), newLeaderLock(dir, now.Add(time.Second))
	acquire(t, older)

	acquired := make(chan struct{})
	go func() {
		acquire(t, newer)
		close(acquired)
	}()
	select {
	case <-older.HandoverRequested():
	case <-time.After(20 * time.Second):
		t.Fatal("the older instance got no hand-over request")
	}
	older.Release(t.Context())
	<-acquired

	// The older plugin instance must wait until the newer one ends, and must not ask it for the leader
	// lock.
	ctx, cancel := context.WithTimeout(t.Context(), standbyPause+5*lockPoll)
	defer cancel()
	if err := older.Acquire(ctx); err == nil {
		t.Fatal("two instances lead")
	}
	select {
	case <-newer.HandoverRequested():
		t.Fatal("the newer instance got a hand-over request from the older one")
	default:
	}
	if _, err := os.Stat(newer.requestPath); err == nil {
		t.Error("the older instance left a request file")
	}
	newer.Release(t.Context())
}

func TestKilledInstanceCostsLeaderOneHandover(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	holder, killed := newLeaderLock(dir, now), newLeaderLock(dir, now.Add(time.Second))
	acquire(t, holder)
	if err := killed.requestHandover(); err != nil {
		t.Fatal(err)
	}
	<-holder.HandoverRequested()
	holder.Release(t.Context())
	acquire(t, holder)
	select {
	case <-holder.HandoverRequested():
		t.Fatal("one request caused two hand-overs")
	case <-time.After(2 * requestPoll):
	}
	holder.Release(t.Context())
}

func TestGarbageInRequestFileIsIgnored(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "publisher.request"), []byte("soon"), 0o600); err != nil {
		t.Fatal(err)
	}
	leader := newLeaderLock(dir, time.Now())
	acquire(t, leader)
	defer leader.Release(t.Context())
	if got := leader.requestTime(); !got.IsZero() {
		t.Errorf("the garbage was read as a request from %v", got)
	}
}

func TestAcquireFailsWithoutLockDirectory(t *testing.T) {
	if err := newLeaderLock(filepath.Join(t.TempDir(), "missing"), time.Now()).Acquire(t.Context()); err == nil {
		t.Fatal("acquired a lock in a missing directory")
	}
}
