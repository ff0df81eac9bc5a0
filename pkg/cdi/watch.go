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
	// settle lets a burst of changes (rm -rf of the directory) end before it is looked at.
	settle = 50 * time.Millisecond
	// lookAgain bounds how long a change can stay unseen while inotify cannot tell: the directory is not there to be watched, or inotify is not to be had on
	// the node. While it can, confirm does: somebody may mount something over the directory.
	lookAgain = 900 * time.Millisecond
	confirm   = 5 * time.Second
	// rest is the least time between two mendings, so that two who disagree about a spec don't keep the runtime busy with it.
	rest = 500 * time.Millisecond
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
// A mend that fails is repeated until it does not.
func (s *Store) Watch(ctx context.Context, mend func(context.Context) error) {
	log := klog.FromContext(ctx)
	seen := newLookout(s.root)
	defer seen.close()
	s.sweep()

	look := time.NewTimer(0)
	defer look.Stop()
	old := time.NewTicker(stale)
	defer old.Stop()
	dirty, failed := true, false
	var rested time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-seen.ended:
			seen.close() // the next look takes another
		case <-seen.changed:
			if !dirty {
				dirty = true
				look.Reset(max(settle, time.Until(rested)))
			}
		case <-old.C:
			s.sweep()
		case <-look.C:
			if unseen := seen.follow(log); unseen || failed || dirty {
				var lost []string
				if names, all := seen.touched.take(); unseen || failed || all {
					lost = s.altered()
				} else {
					lost = s.alteredAmong(names)
				}
				if len(lost) > 0 {
					log.Info("CDI specs were removed or altered by someone else, writing them again", "specs", lost)
				}
				if failed || len(lost) > 0 {
					err := mend(ctx)
					if failed = err != nil; failed {
						log.Error(err, "Could not write all CDI specs again; the next try follows")
					}
					rested = time.Now().Add(rest)
				}
			}
			dirty = false
			if seen.told && !failed {
				look.Reset(confirm)
			} else {
				look.Reset(lookAgain)
			}
		}
	}
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
		case !ours && err == nil:
			s.known[name] = on
		}
	}
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
