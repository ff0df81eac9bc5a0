package leader

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// acquire returns a channel that is closed when l no longer leads.
func acquire(t *testing.T, l *Lock) (handover <-chan struct{}) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	limit := time.AfterFunc(20*time.Second, cancel)
	leading, err := l.Acquire(ctx)
	if err != nil || !limit.Stop() {
		t.Fatalf("acquire the leader lock: %v", err)
	}
	return leading.Done()
}

func TestOlderInstanceHandsOverToNewer(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	older, newer := New(dir, now), New(dir, now.Add(time.Second))
	fromOlder := acquire(t, older)

	acquired := make(chan (<-chan struct{}))
	go func() { acquired <- acquire(t, newer) }()
	select {
	case <-fromOlder:
	case <-time.After(20 * time.Second):
		t.Fatal("the older instance got no hand-over request")
	}
	if older.NewerLeads() {
		t.Error("the newer instance leads before the older one has released the lock")
	}
	older.Release(t.Context())
	fromNewer := <-acquired
	if !older.NewerLeads() || newer.NewerLeads() {
		t.Errorf("after the hand-over a newer one leads: %v for the older, %v for the newer", older.NewerLeads(), newer.NewerLeads())
	}

	// The older plugin instance must wait until the newer one ends, and must not ask it for the leader
	// lock.
	ctx, cancel := context.WithTimeout(t.Context(), standbyPause+5*lockPoll)
	defer cancel()
	if _, err := older.Acquire(ctx); err == nil {
		t.Fatal("two instances lead")
	}
	select {
	case <-fromNewer:
		t.Fatal("the newer instance got a hand-over request from the older one")
	default:
	}
	if _, err := os.Stat(newer.requestPath); err == nil {
		t.Error("the older instance left a request file")
	}
	select {
	case <-older.LeadsAgain():
		t.Error("the older instance leads again before the newer one has ended")
	default:
	}
	newer.Release(t.Context())
	acquire(t, older)
	defer older.Release(t.Context())
	<-older.LeadsAgain()
	if older.NewerLeads() {
		t.Error("a newer instance leads after it has ended")
	}
}

func TestStoppedInstanceHasNoNewerLeader(t *testing.T) {
	l := New(t.TempDir(), time.Now())
	acquire(t, l)
	l.Release(t.Context())
	if l.NewerLeads() {
		t.Error("no instance asked for a hand-over")
	}
}

func TestKilledInstanceCostsLeaderOneHandover(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	holder, killed := New(dir, now), New(dir, now.Add(time.Second))
	handover := acquire(t, holder)
	if err := killed.requestHandover(); err != nil {
		t.Fatal(err)
	}
	<-handover
	holder.Release(t.Context())
	handover = acquire(t, holder)
	select {
	case <-handover:
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
	l := New(dir, time.Now())
	acquire(t, l)
	defer l.Release(t.Context())
	if got := l.requestTime(); !got.IsZero() {
		t.Errorf("the garbage was read as a request from %v", got)
	}
}

func TestAcquireFailsWithoutLockDirectory(t *testing.T) {
	if _, err := New(filepath.Join(t.TempDir(), "missing"), time.Now()).Acquire(t.Context()); err == nil {
		t.Fatal("acquired a lock in a missing directory")
	}
}
