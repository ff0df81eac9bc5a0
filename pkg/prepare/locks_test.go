package prepare_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/claimlock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// breakLock replaces a lock file by a link to nowhere, so that it cannot be opened.
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

// lockedOperations are operations that wait for a lock, each with the name of the lock's file.
var lockedOperations = map[string]struct {
	file string
	call func(*testing.T, *world, *plugin) error
	said string // part of the error while another call has the lock
}{
	"reconcile a claim": {claimLocks, func(t *testing.T, _ *world, p *plugin) error {
		return p.Reconcile(t.Context())
	}, ""},
	"unprepare an orphan": {claimLocks, func(t *testing.T, _ *world, p *plugin) error {
		_, err := p.UnprepareOrphan(t.Context(), "uid-c", confirmAlways)
		return err
	}, ""},
	"remove the spec of a recordless claim": {claimLocks, func(t *testing.T, w *world, p *plugin) error {
		if err := w.specs.WriteClaim("uid-dead", nil); err != nil {
			t.Fatal(err)
		}
		return p.Reconcile(t.Context())
	}, ""},
	"restore shared state without holders": {gpu0, func(t *testing.T, _ *world, p *plugin) error {
		if err := p.Records.SaveHolder(checkpoint.Holder{Key: steps.SharedKey(gpu0, steps.TimeSliceKind), GPUs: []string{gpu0}}); err != nil {
			t.Fatal(err)
		}
		return p.Reconcile(t.Context())
	}, "a claim is being prepared or unprepared"},
	"stop a leftover daemon": {gpu0, func(t *testing.T, w *world, p *plugin) error {
		w.daemons.running[gpu0] = mps.Daemon{ID: gpu0}
		return p.Reconcile(t.Context())
	}, "a claim is being prepared or unprepared"},
}

func TestReconcileReportsLockErrors(t *testing.T) {
	for name, c := range lockedOperations {
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

// If another call has the lock, the operations on one claim must return nil, because that call
// takes care of the claim. The operations on a GPU must return an error that says what they waited
// for, since the call may be for any claim.
func TestReconcileSkipsClaimWithCallInFlight(t *testing.T) {
	for name, c := range lockedOperations {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			withMPS(w)
			mustPrepare(t, w.plugin(t), newClaim("c", allocated("r", gpu0)))
			synctest.Test(t, func(t *testing.T) {
				p := w.plugin(t)
				held, err := p.Locks.Acquire(t.Context(),
					append(claimlock.GPUNames(gpu0), claimlock.ClaimName("uid-c"), claimlock.ClaimName("uid-dead"))...)
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
