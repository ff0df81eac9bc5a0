package prepare

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// breakLock makes a lock file one that cannot be opened.
func (w *world) breakLock(t *testing.T, file string) (path string) {
	t.Helper()
	path = filepath.Join(w.locks, file)
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("nowhere/at/all", path); err != nil {
		t.Fatal(err)
	}
	return path
}

// comparisons are what stops at a lock, each with the lock file that it needs.
var comparisons = map[string]struct {
	file string
	call func(*testing.T, *world, *Preparer) error
	said string // while a call holds the lock
}{
	"a claim is compared": {claimLocks, func(t *testing.T, _ *world, p *Preparer) error {
		return p.reconcileClaim(t.Context(), nil, "uid-c")
	}, ""},
	"a claim is given back": {claimLocks, func(t *testing.T, _ *world, p *Preparer) error {
		_, err := p.GiveBack(t.Context(), "uid-c", allow)
		return err
	}, ""},
	"the spec of a claim without a record is removed": {claimLocks, func(t *testing.T, w *world, p *Preparer) error {
		if err := w.specs.WriteClaim("uid-dead", nil); err != nil {
			t.Fatal(err)
		}
		return p.orphans(t.Context())
	}, ""},
	"what nobody holds any more is set back": {gpu0, func(t *testing.T, _ *world, p *Preparer) error {
		if err := p.Records.SaveHolder(checkpoint.Holder{Key: sharedKey(gpu0, timeSliceKind), GPUs: []string{gpu0}}); err != nil {
			t.Fatal(err)
		}
		return p.orphans(t.Context())
	}, "a claim is being prepared or unprepared"},
	"a daemon that nobody holds is ended": {gpu0, func(t *testing.T, w *world, p *Preparer) error {
		w.daemons.running[gpu0] = mps.Daemon{ID: gpu0}
		return p.orphans(t.Context())
	}, "a claim is being prepared or unprepared"},
}

func TestALockThatCannotBeHadIsAnErrorOfTheComparison(t *testing.T) {
	for name, c := range comparisons {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			withMPS(w)
			p := w.plugin(t)
			mustPrepare(t, p, newClaim("c", allocated("r", gpu0)))
			path := w.breakLock(t, c.file)
			if err := c.call(t, w, p); err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "no such file") {
				t.Errorf("want an error that names %s and the cause, got %v", path, err)
			}
		})
	}
}

// What is the claim's own is left to the call. Who has a GPU may be at work on another claim.
func TestAClaimThatACallWorksOnIsLeftToIt(t *testing.T) {
	for name, c := range comparisons {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			withMPS(w)
			mustPrepare(t, w.plugin(t), newClaim("c", allocated("r", gpu0)))
			synctest.Test(t, func(t *testing.T) {
				p := w.plugin(t)
				held, err := p.Locks.Acquire(t.Context(), append(gpuLocks(gpu0), claimLock("uid-c"), claimLock("uid-dead"))...)
				if err != nil {
					t.Fatal(err)
				}
				defer held.Release()
				if err := c.call(t, w, p); (err != nil) != (c.said != "") || err != nil && !strings.Contains(err.Error(), c.said) {
					t.Errorf("want %q, got %v", c.said, err)
				}
			})
		})
	}
}
