package cdi

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// repairLimit is the time in which Watch promises to call repair. The tests with Watch run in
// bubbles of package synctest, where only the clock is fake and the files are real.
const repairLimit = checkInterval + time.Second

// watch runs s.Watch until the test ends.
func watch(ctx context.Context, t *testing.T, s *Store, repair func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.Watch(ctx, repair, func(context.Context, []string) {})
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
}

// watched returns a store with a base spec and a claim's spec, for which Watch runs. Each repair
// writes both specs and then sends a value to the returned channel.
func watched(ctx context.Context, t *testing.T) (*Store, <-chan struct{}) {
	t.Helper()
	s := newStore(t)
	write := func() error { return errors.Join(s.WriteBase(commonEdits()), writeClaim(s, claimUID)) }
	must(t, write())
	repaired := make(chan struct{}, 100)
	watch(ctx, t, s, func(context.Context) error {
		err := write() // fails if the directory is removed meanwhile
		if err == nil {
			repaired <- struct{}{}
		}
		return err
	})
	return s, repaired
}

// expectRepair waits for a repair after which both specs exist, and returns the time that it took.
// The first repair may run while the test still removes files.
func expectRepair(t *testing.T, s *Store, repaired <-chan struct{}) time.Duration {
	t.Helper()
	start, timeout := time.Now(), time.After(time.Minute)
	for {
		select {
		case <-repaired:
			_, baseErr := os.Stat(filepath.Join(s.root, baseFile))
			_, claimErr := os.Stat(filepath.Join(s.root, claimPrefix+string(claimUID)+suffix))
			if baseErr == nil && claimErr == nil {
				return time.Since(start)
			}
		case <-timeout:
			t.Fatal("not repaired")
		}
	}
}

// removeDirectory removes the directory. It retries, because a repair may create files in it
// meanwhile.
func removeDirectory(root string) error {
	var err error
	for range 100 {
		if err = os.RemoveAll(root); err == nil {
			return nil
		}
	}
	return err
}

func TestWatchRepairsRemovedOrChangedSpecs(t *testing.T) {
	claim := claimPrefix + string(claimUID) + suffix
	for name, damage := range map[string]func(root string) error{
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
		"directory removed and created again": func(root string) error {
			if err := removeDirectory(root); err != nil {
				return err
			}
			return os.MkdirAll(root, 0o750)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, repaired := watched(t.Context(), t)
				for range 3 { // also after a repair
					must(t, damage(s.root))
					if took := expectRepair(t, s, repaired); took > repairLimit {
						t.Errorf("repaired in %s, want %s", took, repairLimit)
					}
				}
			})
		})
	}
}

func TestWatchIgnoresOwnChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, repaired := watched(t.Context(), t)
		must(t, writeClaim(s, "another"))
		must(t, s.RemoveClaim("another"))
		must(t, s.RemoveClaim(claimUID))
		must(t, os.WriteFile(filepath.Join(s.root, "stranger.json"), []byte("{}"), 0o600))
		must(t, os.Remove(filepath.Join(s.root, "stranger.json")))
		// Remove a spec as another program would. When Watch has repaired this, it has also seen the
		// earlier changes by the store. So the test expects only this one repair.
		must(t, os.Remove(filepath.Join(s.root, baseFile)))
		expectRepair(t, s, repaired)
		if len(repaired) > 0 {
			t.Error("repaired again")
		}
	})
}

func TestWatchCoversSpecsOfAnotherInstance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, repaired := watched(t.Context(), t)
		other := types.UID("made-by-another")
		must(t, writeClaim(NewStore(s.root), other))
		// At its next check, Watch adds the spec of the other plugin instance to the expected specs.
		// Removing the base spec triggers this check.
		must(t, os.Remove(filepath.Join(s.root, baseFile)))
		expectRepair(t, s, repaired)
		must(t, os.Remove(filepath.Join(s.root, claimPrefix+string(other)+suffix)))
		expectRepair(t, s, repaired)
	})
}

func TestWatchRemovesOldTemporaryFiles(t *testing.T) {
	s := newStore(t)
	must(t, s.WriteBase(commonEdits()))
	old, young := filepath.Join(s.root, "."+baseFile+temporary+"1"), filepath.Join(s.root, "."+baseFile+temporary+"2")
	for _, path := range []string{old, young} {
		must(t, os.WriteFile(path, nil, 0o600))
	}
	must(t, os.Chtimes(old, time.Now(), time.Now().Add(-time.Hour)))
	s.sweep()
	if _, err := os.Stat(old); err == nil {
		t.Error("the old file still exists")
	}
	if _, err := os.Stat(young); err != nil {
		t.Error("the young file was removed, which another instance may be writing:", err)
	}
}

func TestClaimsListsUnfinishedSpecs(t *testing.T) {
	s := newStore(t)
	must(t, s.WriteBase(commonEdits()))
	uid := types.UID("killed")
	left := filepath.Join(s.root, "."+claimPrefix+string(uid)+suffix+ofClaim)
	leave := func() { must(t, os.WriteFile(left, []byte("{"), 0o600)) }
	gone := func(after string) {
		t.Helper()
		if _, err := os.Stat(left); err == nil {
			t.Error("the file still exists after", after)
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

func TestWriteDoesNotFollowPlantedSymlink(t *testing.T) {
	s := newStore(t)
	must(t, s.WriteBase(commonEdits()))
	elsewhere := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(elsewhere, []byte("theirs"), 0o600))
	must(t, os.Symlink(elsewhere, filepath.Join(s.root, "."+claimPrefix+string(claimUID)+suffix+ofClaim)))
	must(t, writeClaim(s, claimUID))
	if got, err := os.ReadFile(elsewhere); err != nil || string(got) != "theirs" {
		t.Errorf("the symlink's target now has %q, %v", got, err)
	}
	if info, err := os.Lstat(filepath.Join(s.root, claimPrefix+string(claimUID)+suffix)); err != nil || !info.Mode().IsRegular() {
		t.Errorf("the spec is %v, %v", info, err)
	}
}

func TestFailedRepairIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t)
		must(t, s.WriteBase(commonEdits()))
		repaired := make(chan struct{})
		tries := 0
		watch(t.Context(), t, s, func(context.Context) error {
			if tries++; tries < 3 {
				return errors.New("no space left on device")
			}
			close(repaired)
			return s.WriteBase(commonEdits())
		})
		must(t, os.Remove(filepath.Join(s.root, baseFile)))
		select {
		case <-repaired:
		case <-time.After(time.Minute):
			t.Error("no retry after a failure")
		}
	})
}

func TestRepairRetriesBackOff(t *testing.T) {
	s := newStore(t)
	must(t, s.WriteBase(commonEdits()))
	clock := time.Now()
	tries, failing := 0, errors.New("no space left on device")
	w := &specWatch{store: s, repaired: func(context.Context, []string) {}, repair: func(context.Context) error {
		tries++
		return errors.Join(failing, s.WriteBase(commonEdits()))
	}}
	// passes advances the fake clock by d, with a check every checkInterval. It changes no spec. The
	// result is how often repair was called.
	passes := func(d time.Duration) int {
		before := tries
		for end := clock.Add(d); clock.Before(end); clock = clock.Add(checkInterval) {
			w.check(t.Context(), clock)
		}
		return tries - before
	}
	if n := passes(time.Minute); n != 0 {
		t.Errorf("repaired %d times without a change", n)
	}
	remove := func() { must(t, os.Remove(filepath.Join(s.root, baseFile))) }
	remove()
	if n := passes(time.Minute); n != 5 { // after 0, 2, 6, 14 and 30 seconds
		t.Errorf("tried %d times in the first minute", n)
	}
	if n := passes(10 * time.Minute); n != 20 {
		t.Errorf("tried %d times in the ten minutes after", n)
	}
	remove()
	failing = nil
	if n := passes(time.Hour); n != 1 {
		t.Errorf("tried %d times after a success", n)
	}
}

// A touch, or a rewrite with the same content, leaves the spec as it was.
func TestWatchToleratesUnchangedContent(t *testing.T) {
	s := newStore(t)
	must(t, s.WriteBase(commonEdits()))
	path := filepath.Join(s.root, baseFile)
	data, err := os.ReadFile(path)
	must(t, err)
	for what, touch := range map[string]func() error{
		"touched":   func() error { return os.Chtimes(path, time.Now(), time.Now().Add(time.Hour)) },
		"rewritten": func() error { return os.WriteFile(path, data, 0o600) },
		"replaced":  func() error { return errors.Join(os.Remove(path), os.WriteFile(path, data, 0o600)) },
	} {
		must(t, touch())
		if lost := s.altered(); len(lost) > 0 {
			t.Errorf("%s: %v count as damaged", what, lost)
		}
	}
}

func TestWatchReportsOnlyRewrittenSpecs(t *testing.T) {
	s := newStore(t)
	write := func() error { return errors.Join(s.WriteBase(commonEdits()), writeClaim(s, claimUID)) }
	must(t, write())
	var reported []string
	w := &specWatch{
		store: s, repair: func(context.Context) error { return nil },
		repaired: func(_ context.Context, specs []string) { reported = append(reported, specs...) },
	}
	says := func(when string, want ...string) {
		t.Helper()
		w.check(t.Context(), time.Now())
		if !slices.Equal(reported, want) {
			t.Errorf("%s: reported %q", when, reported)
		}
		reported = nil
	}
	claim := claimPrefix + string(claimUID) + suffix
	says("nothing was damaged")
	must(t, os.Remove(filepath.Join(s.root, claim)))
	must(t, os.WriteFile(filepath.Join(s.root, baseFile), []byte("{}"), 0o600))
	says("nothing was written yet")
	must(t, write())
	says("both were written", baseFile, claim)
	must(t, write())
	says("nothing was damaged any more")

	must(t, os.Remove(filepath.Join(s.root, claim)))
	says("the claim's spec is gone again")
	must(t, s.RemoveClaim(claimUID))
	must(t, write())
	says("the claim was unprepared and prepared again")

	must(t, os.Remove(filepath.Join(s.root, claim)))
	says("the claim's spec is gone a third time")
	must(t, writeClaim(NewStore(s.root), claimUID))
	must(t, write())
	says("another instance wrote it")
}
