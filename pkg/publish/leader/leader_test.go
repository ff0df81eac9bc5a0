package leader

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
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
	older, newer := New(dir), New(dir)
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

	waitsForNewer(t, older, newer, fromNewer)
}

// waitsForNewer expects that the older instance neither leads nor asks to lead until the newer one,
// which leads, has ended. fromNewer is closed if the newer one gets a hand-over request.
func waitsForNewer(t *testing.T, older, newer *Lock, fromNewer <-chan struct{}) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*requestPoll)
	defer cancel()
	if _, err := older.Acquire(ctx); err == nil {
		t.Fatal("two instances lead")
	}
	select {
	case <-fromNewer:
		t.Fatal("the newer instance got a hand-over request from the older one")
	default:
	}
	select {
	case <-older.LeadsAgain():
		t.Error("the older instance leads again before the newer one has ended")
	default:
	}
	if !older.NewerLeads() {
		t.Error("the older instance would keep the files that the newer one keeps")
	}
	newer.Release(t.Context())
	acquire(t, older)
	defer older.Release(t.Context())
	<-older.LeadsAgain()
	if older.NewerLeads() {
		t.Error("a newer instance leads after it has ended")
	}
}

// What only the leader may write is written by one instance at a time, also while it hands over.
func TestOnlyTheLeaderKeepsFiles(t *testing.T) {
	dir := t.TempDir()
	older, newer := New(dir), New(dir)
	keeps := func(l *Lock) bool {
		t.Helper()
		ran, failed := false, errors.New("failed")
		leads, err := l.WhileLeading(func() error { ran = true; return failed })
		if ran != leads || leads != errors.Is(err, failed) {
			t.Errorf("leads %t, ran %t, %v", leads, ran, err)
		}
		return leads
	}
	if keeps(older) {
		t.Error("an instance keeps files before it leads")
	}
	acquire(t, older)
	<-older.Led()
	if !keeps(older) || keeps(newer) {
		t.Error("not the leader keeps files")
	}
	writing, written := make(chan struct{}), make(chan struct{})
	go func() {
		_, _ = older.WhileLeading(func() error { close(writing); <-written; return nil })
	}()
	<-writing
	released := make(chan struct{})
	go func() { older.Release(t.Context()); close(released) }()
	ctx, cancel := context.WithTimeout(t.Context(), 2*lockPoll)
	defer cancel()
	if _, err := newer.Acquire(ctx); err == nil {
		t.Error("another instance leads while the former leader writes")
	}
	close(written)
	<-released
	acquire(t, newer)
	defer newer.Release(t.Context())
	if keeps(older) || !keeps(newer) {
		t.Error("after the hand-over not the leader keeps files")
	}
}

// When a driver is installed during a rolling update, both instances ask for the first time, in any
// order.
func TestOlderInstanceThatAsksFirstTimeDoesNotReplaceNewer(t *testing.T) {
	dir := t.TempDir()
	older, newer := New(dir), New(dir)
	waitsForNewer(t, older, newer, acquire(t, newer))
}

func TestStoppedInstanceHasNoNewerLeader(t *testing.T) {
	l := New(t.TempDir())
	acquire(t, l)
	l.Release(t.Context())
	if l.NewerLeads() {
		t.Error("no instance asked for a hand-over")
	}
}

func TestKilledInstanceCostsLeaderNoHandover(t *testing.T) {
	dir := t.TempDir()
	leader, killed := New(dir), New(dir)
	handover := acquire(t, leader)
	defer leader.Release(t.Context())
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // the kernel releases a killed instance's request as Acquire does here
	if _, err := killed.Acquire(ctx); err == nil {
		t.Fatal("two instances lead")
	}
	select {
	case <-handover:
		t.Fatal("the request of an instance that has ended caused a hand-over")
	case <-time.After(2 * requestPoll):
	}
}

func TestFormerLeaderLeadsIfNewerEndsBeforeHandover(t *testing.T) {
	dir := t.TempDir()
	older := New(dir)
	handover := acquire(t, older)
	ctx, cancel := context.WithCancel(t.Context())
	asked := make(chan error)
	go func() { _, err := New(dir).Acquire(ctx); asked <- err }()
	<-handover
	cancel()
	if err := <-asked; err == nil {
		t.Fatal("two instances lead")
	}
	older.Release(t.Context())
	acquire(t, older)
	defer older.Release(t.Context())
	if older.NewerLeads() {
		t.Error("a newer instance leads after it has ended")
	}
}

func TestNewestOfThreeInstancesLeads(t *testing.T) {
	dir := t.TempDir()
	first, second, third := New(dir), New(dir), New(dir)
	fromFirst := acquire(t, first)
	acquired := make(chan (<-chan struct{}), 2)
	go func() { acquired <- acquire(t, second) }()
	<-fromFirst
	go func() { acquired <- acquire(t, third) }()
	first.Release(t.Context())
	<-<-acquired
	second.Release(t.Context())
	fromThird := <-acquired
	if !first.NewerLeads() || !second.NewerLeads() || third.NewerLeads() {
		t.Error("not the newest instance leads")
	}
	select {
	case <-fromThird:
		t.Fatal("a former leader asked the newest instance for the leader lock")
	case <-time.After(2 * requestPoll):
	}
	third.Release(t.Context())
}

func TestAcquireFailsWithoutLockDirectory(t *testing.T) {
	if _, err := New(filepath.Join(t.TempDir(), "missing")).Acquire(t.Context()); err == nil {
		t.Fatal("acquired a lock in a missing directory")
	}
}

func TestPipesInPlaceOfTheLockFilesDoNotStopAnInstance(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"publisher.lock", "publisher.request"} {
		durabletest.Pipe(t, filepath.Join(dir, name))
	}
	var err error
	l := New(dir)
	durabletest.Returns(t, func() {
		if _, err = l.Acquire(t.Context()); err == nil {
			l.Release(t.Context())
		}
	})
	if err != nil {
		t.Error(err)
	}
}
