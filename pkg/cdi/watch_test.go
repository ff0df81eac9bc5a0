package cdi

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// within is the promise that Watch makes; patience is for a machine that is busy with something else meanwhile.
const (
	within   = time.Second
	patience = 20 * time.Second
)

// watch runs Watch until the test has ended.
func watch(ctx context.Context, t *testing.T, s *Store, mend func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.Watch(ctx, mend, func(context.Context, []string) {})
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
}

// watched is a store with a base and a claim spec under watch, whose mend writes both again and says so.
func watched(ctx context.Context, t *testing.T) (*Store, <-chan struct{}) {
	t.Helper()
	s := newStore(t)
	write := func() error { return errors.Join(s.WriteBase(commonEdits()), writeClaim(s, claimUID)) }
	must(t, write())
	mended := make(chan struct{}, 100)
	watch(ctx, t, s, func(context.Context) error {
		err := write() // fails where the directory goes meanwhile
		if err == nil {
			mended <- struct{}{}
		}
		return err
	})
	return s, mended
}

// expectMending waits until specs are mended and there, and says how long that took: the first mending may have come while the harm was still being done.
func expectMending(t *testing.T, s *Store, mended <-chan struct{}) time.Duration {
	t.Helper()
	start, timeout := time.Now(), time.After(patience)
	for {
		select {
		case <-mended:
			_, baseErr := os.Stat(filepath.Join(s.root, baseFile))
			_, claimErr := os.Stat(filepath.Join(s.root, claimPrefix+string(claimUID)+suffix))
			if baseErr == nil && claimErr == nil {
				return time.Since(start)
			}
		case <-timeout:
			t.Fatalf("not mended within %s", patience)
		}
	}
}

// removeDirectory is stubborn: mending may fill the directory while it is being emptied.
func removeDirectory(root string) error {
	var err error
	for range 100 {
		if err = os.RemoveAll(root); err == nil {
			return nil
		}
	}
	return err
}

func TestSpecsThatOthersRemoveOrAlterAreMended(t *testing.T) {
	claim := claimPrefix + string(claimUID) + suffix
	for name, harm := range map[string]func(root string) error{
		"base removed":  func(root string) error { return os.Remove(filepath.Join(root, baseFile)) },
		"claim removed": func(root string) error { return os.Remove(filepath.Join(root, claim)) },
		"claim altered": func(root string) error { return os.WriteFile(filepath.Join(root, claim), []byte("{}"), 0o600) },
		"claim emptied": func(root string) error { return os.Truncate(filepath.Join(root, claim), 0) },
		"claim replaced": func(root string) error {
			if err := os.WriteFile(filepath.Join(root, "x"), []byte("{}"), 0o600); err != nil {
				return err
			}
			return os.Rename(filepath.Join(root, "x"), filepath.Join(root, claim))
		},
		"directory removed": removeDirectory,
		"directory removed and made again": func(root string) error {
			if err := removeDirectory(root); err != nil {
				return err
			}
			return os.MkdirAll(root, 0o750)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, mended := watched(t.Context(), t)
			quickest := patience
			for range 3 { // also after it was mended once
				must(t, harm(s.root))
				quickest = min(quickest, expectMending(t, s, mended))
			}
			if quickest > within {
				t.Errorf("mended in %s at best, promised is %s", quickest, within)
			}
		})
	}
}

func TestOwnChangesAreNotMended(t *testing.T) {
	s, mended := watched(t.Context(), t)
	must(t, writeClaim(s, "another"))
	must(t, s.RemoveClaim("another"))
	must(t, s.RemoveClaim(claimUID))
	must(t, os.WriteFile(filepath.Join(s.root, "stranger.json"), []byte("{}"), 0o600))
	must(t, os.Remove(filepath.Join(s.root, "stranger.json")))
	// A change of a stranger after them is the proof that they have been seen: there is one mending, not more.
	must(t, os.Remove(filepath.Join(s.root, baseFile)))
	expectMending(t, s, mended)
	if len(mended) > 0 {
		t.Error("mended again")
	}
}

func TestSpecsOfAnotherInstanceAreWatchedToo(t *testing.T) {
	s, mended := watched(t.Context(), t)
	other := types.UID("made-by-another")
	must(t, writeClaim(NewStore(s.root), other))
	// Watch takes it in when it looks, as it does here for another reason.
	must(t, os.Remove(filepath.Join(s.root, baseFile)))
	expectMending(t, s, mended)
	must(t, os.Remove(filepath.Join(s.root, claimPrefix+string(other)+suffix)))
	expectMending(t, s, mended)
}

func TestTemporaryFilesOfAKilledInstanceAreSweptUp(t *testing.T) {
	s := newStore(t)
	must(t, s.WriteBase(commonEdits()))
	old, young := filepath.Join(s.root, "."+baseFile+temporary+"1"), filepath.Join(s.root, "."+baseFile+temporary+"2")
	for _, path := range []string{old, young} {
		must(t, os.WriteFile(path, nil, 0o600))
	}
	must(t, os.Chtimes(old, time.Now(), time.Now().Add(-time.Hour)))
	s.sweep()
	if _, err := os.Stat(old); err == nil {
		t.Error("the old one is still there")
	}
	if _, err := os.Stat(young); err != nil {
		t.Error("another instance may be writing the young one:", err)
	}
}

func TestWhatAKilledCallLeftOfAClaimsSpecIsItsClaims(t *testing.T) {
	s := newStore(t)
	must(t, s.WriteBase(commonEdits()))
	uid := types.UID("killed")
	left := filepath.Join(s.root, "."+claimPrefix+string(uid)+suffix+ofClaim)
	leave := func() { must(t, os.WriteFile(left, []byte("{"), 0o600)) }
	gone := func(after string) {
		t.Helper()
		if _, err := os.Stat(left); err == nil {
			t.Error("it is still there after", after)
		}
	}
	leave()
	if uids, err := s.Claims(); err != nil || !slices.Equal(uids, []types.UID{uid}) {
		t.Errorf("claims %v, %v", uids, err)
	}
	must(t, s.RemoveClaim(uid))
	gone("the removal of the claim's spec")
	leave()
	must(t, writeClaim(s, uid))
	gone("writing the claim's spec")
	if uids, err := s.Claims(); err != nil || !slices.Equal(uids, []types.UID{uid}) {
		t.Errorf("claims %v, %v", uids, err)
	}
}

func TestASpecIsNotWrittenThroughALinkThatWasPlanted(t *testing.T) {
	s := newStore(t)
	must(t, s.WriteBase(commonEdits()))
	elsewhere := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(elsewhere, []byte("theirs"), 0o600))
	must(t, os.Symlink(elsewhere, filepath.Join(s.root, "."+claimPrefix+string(claimUID)+suffix+ofClaim)))
	must(t, writeClaim(s, claimUID))
	if got, err := os.ReadFile(elsewhere); err != nil || string(got) != "theirs" {
		t.Errorf("elsewhere there is %q now, %v", got, err)
	}
	if info, err := os.Lstat(filepath.Join(s.root, claimPrefix+string(claimUID)+suffix)); err != nil || !info.Mode().IsRegular() {
		t.Errorf("the spec is %v, %v", info, err)
	}
}

func TestAMendingThatFailsIsTriedAgain(t *testing.T) {
	s := newStore(t)
	must(t, s.WriteBase(commonEdits()))
	mended := make(chan struct{})
	tries := 0
	watch(t.Context(), t, s, func(context.Context) error {
		if tries++; tries < 3 {
			return errors.New("no space left on device")
		}
		close(mended)
		return s.WriteBase(commonEdits())
	})
	must(t, os.Remove(filepath.Join(s.root, baseFile)))
	select {
	case <-mended:
	case <-time.After(patience):
		t.Error("given up after a failure")
	}
}

func TestAMendingThatGoesOnFailingIsTriedLessAndLessOften(t *testing.T) {
	s := newStore(t)
	must(t, s.WriteBase(commonEdits()))
	clock := time.Now()
	tries, failing := 0, errors.New("no space left on device")
	w := &watching{store: s, seen: newLookout(s.root), now: func() time.Time { return clock }, mended: func(context.Context, []string) {}, mend: func(context.Context) error {
		tries++
		return errors.Join(failing, s.WriteBase(commonEdits()))
	}}
	defer w.seen.close()
	// passes is how often is tried within a time in which nothing changes.
	passes := func(d time.Duration) int {
		before := tries
		for end := clock.Add(d); clock.Before(end); {
			clock = clock.Add(w.look(t.Context()))
		}
		return tries - before
	}
	if n := passes(time.Minute); n != 0 {
		t.Errorf("mended %d times although nothing was wrong", n)
	}
	// removed waits until the removal was told, and mended, without time passing.
	removed := func() {
		must(t, os.Remove(filepath.Join(s.root, baseFile)))
		for before := tries; tries == before; w.look(t.Context()) {
			<-w.seen.changed
		}
	}
	removed()
	if n := passes(time.Minute); n < 5 || n > 8 {
		t.Errorf("tried %d times in the first minute", n)
	}
	if n := passes(10 * time.Minute); n < 18 || n > 21 {
		t.Errorf("tried %d times in the ten minutes after", n)
	}
	removed()
	failing = nil
	if n := passes(time.Hour); n != 1 {
		t.Errorf("tried %d times although that has worked", n)
	}
}

func TestOnlyWhatWasWrittenAgainIsToldAsMended(t *testing.T) {
	s := newStore(t)
	write := func() error { return errors.Join(s.WriteBase(commonEdits()), writeClaim(s, claimUID)) }
	must(t, write())
	var told []string
	w := &watching{
		store: s, seen: newLookout(s.root), now: time.Now, mend: func(context.Context) error { return nil },
		mended: func(_ context.Context, specs []string) { told = append(told, specs...) },
	}
	defer w.seen.close()
	says := func(when string, want ...string) {
		t.Helper()
		w.seen.touched.addAll()
		w.look(t.Context())
		if !slices.Equal(told, want) {
			t.Errorf("%s: told %q", when, told)
		}
		told = nil
	}
	claim := claimPrefix + string(claimUID) + suffix
	says("nothing was wrong")
	must(t, os.Remove(filepath.Join(s.root, claim)))
	must(t, os.WriteFile(filepath.Join(s.root, baseFile), []byte("{}"), 0o600))
	says("nothing is written yet")
	must(t, write())
	says("both were written", baseFile, claim)
	must(t, write())
	says("nothing was wrong any more")

	must(t, os.Remove(filepath.Join(s.root, claim)))
	says("the claim's is gone again")
	must(t, s.RemoveClaim(claimUID))
	must(t, write())
	says("the claim was given back, and prepared anew")

	must(t, os.Remove(filepath.Join(s.root, claim)))
	says("the claim's is gone a third time")
	must(t, writeClaim(NewStore(s.root), claimUID))
	must(t, write())
	says("another instance has written it")
}
