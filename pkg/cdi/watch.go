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
	// settleDelay is the wait between a change in the CDI directory and the search for damaged specs.
	// So one search covers a burst of changes, such as an rm -rf of the directory, and searches do not
	// delay calls of the kubelet.
	settleDelay = 300 * time.Millisecond
	// pollInterval is the time between two searches for damaged specs while inotify or the CDI
	// directory is missing.
	pollInterval = 900 * time.Millisecond
	// confirmInterval is the time between two searches for damaged specs while inotify works. They
	// detect a mount over the CDI directory, which inotify does not report.
	confirmInterval = 5 * time.Second
	// minRepairInterval is the shortest time between two repairs. Otherwise the container runtime
	// would reload the specs all the time if another program undoes each repair.
	minRepairInterval = 500 * time.Millisecond
	// maxRepairPause is the longest pause between repairs that fail. The first pause is pollInterval,
	// and it doubles each time.
	maxRepairPause = 30 * time.Second
	// staleAge is the age at which a temporary file counts as left by a killed process.
	staleAge = time.Minute
)

// Watch checks the specs until ctx ends. It calls repair within a second after another program has
// removed or changed a spec. repair must write every spec that should exist. Changes through this
// Store cause no repair. Only one plugin instance may watch, because two would undo each other's
// base spec.
//
// The directory may vanish and come back. While inotify works and reports nothing, checks are rare
// and read no file. Without inotify, each check reads the files.
//
// If repair fails, Watch retries it with growing pauses until it succeeds, so its errors must be
// transient.
//
// repaired receives the names of the damaged specs that were written again, by repair or by another
// caller of this Store.
func (s *Store) Watch(ctx context.Context, repair func(context.Context) error, repaired func(ctx context.Context, specs []string)) {
	w := &specWatch{store: s, dir: newDirWatcher(s.root), repair: repair, repaired: repaired, now: time.Now}
	defer w.dir.close()
	s.sweep()

	check := time.NewTimer(0)
	defer check.Stop()
	old := time.NewTicker(staleAge)
	defer old.Stop()
	pending := true // a check is due, and later changes do not postpone it
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.dir.ended:
			w.dir.close() // the next check starts inotify again
		case <-w.dir.changed:
			if !pending {
				pending = true
				check.Reset(max(settleDelay, time.Until(w.nextRepair)))
			}
		case <-old.C:
			s.sweep()
		case <-check.C:
			pending = false
			check.Reset(w.check(ctx))
		}
	}
}

// specWatch is the state of one call of [Store.Watch].
type specWatch struct {
	store    *Store
	dir      *dirWatcher
	repair   func(context.Context) error
	repaired func(context.Context, []string)
	now      func() time.Time
	// nextRepair is the earliest time of the next repair.
	nextRepair time.Time
	// retryPause is the pause after the last repair if that failed, otherwise zero.
	retryPause time.Duration
	// retryAt is the time at which retryPause ends.
	retryAt time.Time
}

// check calls repair if another program removed or changed specs since the last call of check, or
// if a failed repair is due for a retry. It returns the time until the next call of check, unless a
// change triggers one earlier.
func (w *specWatch) check(ctx context.Context) time.Duration {
	lost := w.damaged(klog.FromContext(ctx))
	if len(lost) > 0 {
		klog.FromContext(ctx).Info("Repairing CDI specs that another program removed or changed", "specs", lost)
	}
	if len(lost) > 0 || w.retryPause > 0 && !w.now().Before(w.retryAt) {
		w.repairSpecs(ctx)
	}
	if specs := w.store.takeRepaired(); len(specs) > 0 {
		w.repaired(ctx, specs)
	}
	next := pollInterval
	if w.dir.complete {
		next = confirmInterval
	}
	if w.retryPause > 0 {
		next = min(next, w.retryAt.Sub(w.now()))
	}
	return next
}

// damaged returns the names of the specs that another program removed or changed since the last
// call.
func (w *specWatch) damaged(log klog.Logger) []string {
	missed := w.dir.renew(log)
	switch names, all := w.dir.specs.take(); {
	case missed || all:
		return w.store.altered()
	case len(names) > 0:
		return w.store.alteredAmong(names)
	default:
		return nil
	}
}

func (w *specWatch) repairSpecs(ctx context.Context) {
	err := w.repair(ctx)
	w.nextRepair = w.now().Add(minRepairInterval)
	if err == nil {
		w.retryPause = 0
		return
	}
	w.retryPause = min(max(2*w.retryPause, pollInterval), maxRepairPause)
	w.retryAt = w.now().Add(w.retryPause)
	klog.FromContext(ctx).Error(err, "Failed to repair CDI specs, retrying", "after", w.retryPause)
}

// altered returns the specs that were removed or differ from known. It removes them from known, and
// repair adds those that should exist. A new spec of another plugin instance is added to known.
func (s *Store) altered() []string {
	s.files.Lock() // no file is being changed
	defer s.files.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for name, data := range s.known {
		if on, err := os.ReadFile(filepath.Join(s.root, name)); err != nil || !bytes.Equal(on, data) {
			names = append(names, name)
			delete(s.known, name)
			s.damaged[name] = true
		}
	}
	entries, err := os.ReadDir(s.root)
	if err != nil {
		return names
	}
	for _, e := range entries {
		if _, ok := s.known[e.Name()]; ok || !isSpec(e.Name()) || slices.Contains(names, e.Name()) {
			continue
		}
		if data, err := os.ReadFile(filepath.Join(s.root, e.Name())); err == nil {
			s.known[e.Name()] = data
		}
	}
	slices.Sort(names)
	return names
}

// alteredAmong does the same as altered, but only for the specs in changed, which inotify reported.
// Otherwise the plugin would read all specs after each new claim, while the kubelet waits.
func (s *Store) alteredAmong(changed map[string]bool) []string {
	s.files.Lock() // no file is being changed
	defer s.files.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for name := range changed {
		on, err := os.ReadFile(filepath.Join(s.root, name))
		data, ours := s.known[name]
		switch {
		case ours && (err != nil || !bytes.Equal(on, data)):
			names = append(names, name)
			delete(s.known, name)
			s.damaged[name] = true
		case !ours && err == nil:
			s.known[name] = on
		}
	}
	slices.Sort(names)
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
