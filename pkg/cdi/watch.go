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
	// settle lets a burst of changes end before it is looked at: an rm -rf of the directory, or calls of the kubelet, which a look would keep waiting.
	settle = 300 * time.Millisecond
	// lookAgain bounds how long a change can stay unseen while inotify cannot tell: the directory is not there to be watched, or inotify is not to be had on
	// the node. While it can, confirm does: somebody may mount something over the directory.
	lookAgain = 900 * time.Millisecond
	confirm   = 5 * time.Second
	// rest is the least time between two mendings, so that two who disagree about a spec don't keep the runtime busy with it.
	rest = 500 * time.Millisecond
	// failingMost is the longest pause between two mendings while they fail. The first is lookAgain.
	failingMost = 30 * time.Second
	// stale is the age from which a temporary file is no longer in use by another instance.
	stale = time.Minute
)

// Watch calls mend within a second after someone else removed or altered a spec of ours, until ctx ends. mend is expected to write
// every spec again that should be there. Changes that this Store made itself are not reported. Of several instances of the plugin only one
// should watch: they would take each other's base spec for altered.
//
// The directory may vanish and come back meanwhile. Looks are seldom and cheap while inotify is quiet and in place: nothing is read. On a node that has
// no inotify left the files are read at every look.
//
// A mend that fails is repeated until it does not, less and less often. Its error must be one that may pass by itself.
//
// mended is told of the specs that were written again, by mend or by whoever else did.
func (s *Store) Watch(ctx context.Context, mend func(context.Context) error, mended func(ctx context.Context, specs []string)) {
	w := &watching{store: s, seen: newLookout(s.root), mend: mend, mended: mended, now: time.Now}
	defer w.seen.close()
	s.sweep()

	look := time.NewTimer(0)
	defer look.Stop()
	old := time.NewTicker(stale)
	defer old.Stop()
	soon := true // a look is due soon already, and is not put off by what comes before it
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.seen.ended:
			w.seen.close() // the next look takes another
		case <-w.seen.changed:
			if !soon {
				soon = true
				look.Reset(max(settle, time.Until(w.rested)))
			}
		case <-old.C:
			s.sweep()
		case <-look.C:
			soon = false
			look.Reset(w.look(ctx))
		}
	}
}

// watching is one run of [Store.Watch].
type watching struct {
	store  *Store
	seen   *lookout
	mend   func(context.Context) error
	mended func(context.Context, []string)
	now    func() time.Time
	// rested is until when nothing is mended again.
	rested time.Time
	// failing is how long is waited after a mending that failed, and zero where the last one did not; retry is when that time is over.
	failing time.Duration
	retry   time.Time
}

// look has mended what was removed or altered since the last look, and what could not be mended until now if its time has come. It says how long the next look
// has time, unless something changes before.
func (w *watching) look(ctx context.Context) time.Duration {
	lost := w.lost(klog.FromContext(ctx))
	if len(lost) > 0 {
		klog.FromContext(ctx).Info("CDI specs were removed or altered by someone else, writing them again", "specs", lost)
	}
	if len(lost) > 0 || w.failing > 0 && !w.now().Before(w.retry) {
		w.again(ctx)
	}
	if specs := w.store.takeMended(); len(specs) > 0 {
		w.mended(ctx, specs)
	}
	next := lookAgain
	if w.seen.told {
		next = confirm
	}
	if w.failing > 0 {
		next = min(next, w.retry.Sub(w.now()))
	}
	return next
}

// lost are the specs that are not as they should be any more, as far as that is not known yet.
func (w *watching) lost(log klog.Logger) []string {
	unseen := w.seen.follow(log)
	switch names, all := w.seen.touched.take(); {
	case unseen || all:
		return w.store.altered()
	case len(names) > 0:
		return w.store.alteredAmong(names)
	default:
		return nil
	}
}

func (w *watching) again(ctx context.Context) {
	err := w.mend(ctx)
	w.rested = w.now().Add(rest)
	if err == nil {
		w.failing = 0
		return
	}
	w.failing = min(max(2*w.failing, lookAgain), failingMost)
	w.retry = w.now().Add(w.failing)
	klog.FromContext(ctx).Error(err, "Could not write all CDI specs again; the next try follows", "after", w.failing)
}

// altered lists the specs that are not on disk as they should be, and forgets them: mend says anew what should be there.
// A spec that another instance of the plugin has made meanwhile is taken as it is.
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
			s.lost[name] = true
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

// alteredAmong is altered where inotify has told which specs may be: a claim that comes or goes on a node with hundreds of them is no reason to read
// all, while calls of the kubelet wait.
func (s *Store) alteredAmong(touched map[string]bool) []string {
	s.files.Lock() // no file is being changed
	defer s.files.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for name := range touched {
		on, err := os.ReadFile(filepath.Join(s.root, name))
		data, ours := s.known[name]
		switch {
		case ours && (err != nil || !bytes.Equal(on, data)):
			names = append(names, name)
			delete(s.known, name)
			s.lost[name] = true
		case !ours && err == nil:
			s.known[name] = on
		}
	}
	slices.Sort(names)
	return names
}

// takeMended are the specs that were written again since the last call.
func (s *Store) takeMended() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	names := s.mended
	s.mended = nil
	slices.Sort(names)
	return names
}

// sweep removes temporary files that a killed instance left. A young one may be in use by another instance.
func (s *Store) sweep() {
	left, _ := filepath.Glob(filepath.Join(s.root, "."+Vendor+"-*"+suffix+temporary+"*"))
	for _, path := range left {
		if info, err := os.Stat(path); err == nil && time.Since(info.ModTime()) > stale {
			_ = os.Remove(path)
		}
	}
}
