package driver

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func take(t *testing.T, turn *turn) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := turn.Take(ctx); err != nil {
		t.Fatalf("take the turn: %v", err)
	}
}

func TestOlderInstanceYieldsToNewer(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	older, newer := newTurn(dir, now), newTurn(dir, now.Add(time.Second))
	take(t, older)

	taken := make(chan struct{})
	go func() {
		take(t, newer)
		close(taken)
	}()
	select {
	case <-older.Wanted():
	case <-time.After(20 * time.Second):
		t.Fatal("the older instance was never asked to yield")
	}
	older.Release(t.Context())
	<-taken

	// The older one waits behind, and does not ask the newer one to yield.
	ctx, cancel := context.WithTimeout(t.Context(), turnYield+5*turnPoll)
	defer cancel()
	if err := older.Take(ctx); err == nil {
		t.Fatal("two instances publish")
	}
	select {
	case <-newer.Wanted():
		t.Fatal("the newer instance was asked to yield to the older one")
	default:
	}
	if _, err := os.Stat(newer.request); err == nil {
		t.Error("the older instance left a request that nobody takes up")
	}
	newer.Release(t.Context())
}

func TestRequestOfAKilledInstanceCostsOnePause(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	holder, killed := newTurn(dir, now), newTurn(dir, now.Add(time.Second))
	take(t, holder)
	if err := killed.ask(); err != nil {
		t.Fatal(err)
	}
	<-holder.Wanted()
	holder.Release(t.Context())
	take(t, holder)
	select {
	case <-holder.Wanted():
		t.Fatal("asked to yield twice for one request")
	case <-time.After(2 * heldPoll):
	}
	holder.Release(t.Context())
}

func TestGarbageInTheRequestFileIsNoRequest(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "publisher.request"), []byte("soon"), 0o600); err != nil {
		t.Fatal(err)
	}
	turn := newTurn(dir, time.Now())
	take(t, turn)
	defer turn.Release(t.Context())
	if got := turn.requested(); !got.IsZero() {
		t.Errorf("read as a request from %v", got)
	}
}

func TestTurnThatCannotBeLockedIsAnError(t *testing.T) {
	if err := newTurn(filepath.Join(t.TempDir(), "missing"), time.Now()).Take(t.Context()); err == nil {
		t.Fatal("took a lock in a directory that does not exist")
	}
}
