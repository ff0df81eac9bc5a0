package cdi

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/klog/v2"
)

const (
	// checkInterval is the time between two searches for damaged specs. A search reads all specs,
	// half a millisecond for 64 of them. Polling also sees a mount over the directory, and needs none
	// of the node's few inotify instances.
	checkInterval = 2 * time.Second
	// maxRepairPause is the longest pause between repairs that fail. The first pause is checkInterval,
	// and it doubles each time.
	maxRepairPause = 30 * time.Second
	// staleAge is the age at which a temporary file counts as left by a killed process.
	staleAge = time.Minute
)

// Watch checks the specs every two seconds until ctx ends. It calls repair after another program
// has removed or changed a spec. repair must write every spec that should exist. Changes through
// this Store cause no repair. Only one plugin instance may watch, because two would undo each
// other's base spec. The directory may vanish and come back.
//
// If repair fails, Watch retries it with growing pauses until it succeeds, so its errors must be
// transient.
//
// repaired receives the names of the damaged specs that were written again, by repair or by another
// caller of this Store.
func (s *Store) Watch(ctx context.Context, repair func(context.Context) error, repaired func(ctx context.Context, specs []string)) {
	w := &specWatch{store: s, repair: repair, repaired: repaired}
	tick, old := time.NewTicker(checkInterval), time.NewTicker(staleAge)
	defer tick.Stop()
	defer old.Stop()
	s.sweep()
	for {
		select {
		case <-ctx.Done():
			return
		case <-old.C:
			s.sweep()
		case <-tick.C:
			w.check(ctx, time.Now())
		}
	}
}

// specWatch is the state of one call of [Store.Watch].
type specWatch struct {
	store    *Store
	repair   func(context.Context) error
	repaired func(context.Context, []string)
	// retryPause is the pause after the last repair if that failed, otherwise zero. retryAt is the
	// time at which it ends.
	retryPause time.Duration
	retryAt    time.Time
}

// check calls repair if another program removed or changed specs since the last call of check, or
// if a failed repair is due for a retry.
func (w *specWatch) check(ctx context.Context, now time.Time) {
	lost := w.store.altered()
	if len(lost) > 0 {
		klog.FromContext(ctx).Info("Repairing CDI specs that another program removed or changed", "specs", lost)
	}
	if len(lost) > 0 || w.retryPause > 0 && !now.Before(w.retryAt) {
		w.repairSpecs(ctx, now)
	}
	if specs := w.store.takeRepaired(); len(specs) > 0 {
		w.repaired(ctx, specs)
	}
}

func (w *specWatch) repairSpecs(ctx context.Context, now time.Time) {
	err := w.repair(ctx)
	if err == nil {
		w.retryPause = 0
		return
	}
	w.retryPause = min(max(2*w.retryPause, checkInterval), maxRepairPause)
	w.retryAt = now.Add(w.retryPause)
	klog.FromContext(ctx).Error(err, "Failed to repair CDI specs, retrying", "after", w.retryPause)
}

// altered returns the specs that were removed or differ from known. It removes them from known, and
// repair adds those that should exist. A new spec of another plugin instance is added to known.
func (s *Store) altered() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for name, data := range s.known {
		if now, err := os.ReadFile(filepath.Join(s.root, name)); err != nil || !bytes.Equal(now, data) {
			names = append(names, name)
			delete(s.known, name)
			s.damaged[name] = true
		}
	}
	slices.Sort(names)
	there, _ := filepath.Glob(filepath.Join(s.root, Vendor+"-*"+suffix))
	for _, path := range there {
		name := filepath.Base(path)
		if _, ok := s.known[name]; ok || slices.Contains(names, name) {
			continue
		}
		if data, err := os.ReadFile(path); err == nil {
			s.known[name] = data
		}
	}
	return names
}

// takeRepaired returns the damaged specs that were written again since the last call.
func (s *Store) takeRepaired() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	names := s.repaired
	s.repaired = nil
	slices.Sort(names)
	return names
}

// sweep removes temporary files that killed processes left. It spares young files, because another
// plugin instance may be writing them.
func (s *Store) sweep() {
	left, _ := filepath.Glob(filepath.Join(s.root, "."+Vendor+"-*"+suffix+temporary+"*"))
	for _, path := range left {
		if info, err := os.Stat(path); err == nil && time.Since(info.ModTime()) > staleAge {
			_ = os.Remove(path)
		}
	}
}
