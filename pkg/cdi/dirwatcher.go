package cdi

import (
	"errors"
	"os"
	"path/filepath"
	"sync"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// dirWatcher watches the CDI directory with inotify. The root user may have few inotify instances
// per node (128 by default) and shares them with all containers, so inotify may be unavailable.
// Then dirWatcher logs that once, reports no changes, and retries at each call of renew.
type dirWatcher struct {
	root string
	// changed gets a value when a spec has changed or events were lost. The names of the changed specs
	// are in specs.
	changed chan struct{}
	specs   *changedSpecs
	// ended is closed when inotify has ended. It is nil while inotify is not in use.
	ended   chan struct{}
	inotify *fsnotify.Watcher
	// dir is the file info of the watched directory, by which renew notices another directory under
	// the same path. It is nil if no directory is watched.
	dir os.FileInfo
	// complete says that inotify reports every change of the directory.
	complete bool
	// degraded says that the error of inotify was already logged.
	degraded bool
}

func newDirWatcher(root string) *dirWatcher {
	return &dirWatcher{root: root, changed: make(chan struct{}, 1), specs: &changedSpecs{}}
}

// changedSpecs collects the names of the files that inotify has reported.
type changedSpecs struct {
	mu    sync.Mutex
	names map[string]bool
	// all says that events were lost, so any spec may have changed.
	all bool
}

func (t *changedSpecs) add(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.names == nil {
		t.names = map[string]bool{}
	}
	t.names[name] = true
}

func (t *changedSpecs) addAll() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all = true
}

// take returns the collected file names and whether events were lost, and then clears both.
func (t *changedSpecs) take() (names map[string]bool, all bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	names, all = t.names, t.all
	t.names, t.all = nil, false
	return names, all
}

// close stops inotify. A later call of renew starts it again.
func (l *dirWatcher) close() {
	if l.inotify != nil {
		_ = l.inotify.Close()
	}
	l.inotify, l.ended, l.dir, l.complete = nil, nil, nil, false
}

// renew makes inotify watch the directory that root names now, and its parent, so that a recreated
// directory is seen. missed says that inotify may not have reported all changes since the last
// call, for example because another directory is at root now.
func (l *dirWatcher) renew(log klog.Logger) (missed bool) {
	now, err := l.addWatches()
	switch {
	case err == nil && l.degraded:
		l.degraded = false
		log.Info("Watching the CDI directory with inotify again", "directory", l.root)
	case err != nil && !errors.Is(err, os.ErrNotExist) && !l.degraded:
		l.degraded = true
		log.Error(err, "Failed to watch the CDI directory with inotify, reading its files instead", "directory", l.root,
			"interval", pollInterval, "remedy", inotifyRemedy(err))
	}
	missed = now == nil || !os.SameFile(now, l.dir)
	l.dir, l.complete = now, err == nil
	return missed
}

// inotifyRemedy returns what an operator can do about an error of inotify.
func inotifyRemedy(err error) string {
	switch {
	case errors.Is(err, unix.EMFILE):
		return "raise the node's sysctl fs.inotify.max_user_instances"
	case errors.Is(err, unix.ENOSPC):
		return "raise the node's sysctl fs.inotify.max_user_watches"
	default:
		return "none is known"
	}
}

func (l *dirWatcher) addWatches() (os.FileInfo, error) {
	if l.inotify == nil {
		w, err := fsnotify.NewWatcher()
		if err != nil {
			return nil, err
		}
		l.inotify, l.ended = w, make(chan struct{})
		go drainInotify(w, l.root, l.specs, l.changed, l.ended)
	}
	parentErr := l.inotify.Add(filepath.Dir(l.root)) // adding a watch again is no error
	if err := l.inotify.Add(l.root); err != nil {
		return nil, err
	}
	now, err := os.Stat(l.root)
	return now, errors.Join(parentErr, err)
}

// drainInotify reads inotify's events and errors until inotify is closed. It must not call methods
// of w: they wait for a lock that fsnotify holds while it waits for this reader.
func drainInotify(w *fsnotify.Watcher, root string, specs *changedSpecs, changed chan<- struct{}, ended chan<- struct{}) {
	defer close(ended)
	notify := func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	events, errs := w.Events, w.Errors
	for events != nil || errs != nil {
		select {
		case event, ok := <-events:
			switch name := filepath.Base(event.Name); {
			case !ok:
				events = nil
			case event.Name == root, event.Name == filepath.Dir(root) && !event.Has(fsnotify.Chmod):
				specs.addAll()
				notify()
			case filepath.Dir(event.Name) == root && isSpec(name):
				specs.add(name)
				notify()
			}
		case _, ok := <-errs:
			if !ok {
				errs = nil
			} else {
				specs.addAll() // events were lost
				notify()
			}
		}
	}
}
