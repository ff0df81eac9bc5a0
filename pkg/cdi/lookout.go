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

// lookout is inotify's eye on the CDI directory. A user has few inotify instances on a node (128, unless someone raised that), and root in a container
// is that same user: others may have taken them all. Then the lookout sees nothing, says so once, and tries again whenever it is asked.
type lookout struct {
	root string
	// changed gets a value when inotify has told of a change of a spec, or has lost events; touched says of which.
	changed chan struct{}
	touched *touched
	// ended is closed when the watcher tells no more; nil while there is none.
	ended   chan struct{}
	watcher *fsnotify.Watcher
	// watched is the incarnation of the directory that the watcher looks at; nil while there is none.
	watched os.FileInfo
	// told says that inotify tells of all that becomes of the directory.
	told bool
	// blind: it was said that inotify cannot be had.
	blind bool
}

func newLookout(root string) *lookout {
	return &lookout{root: root, changed: make(chan struct{}, 1), touched: &touched{}}
}

// touched collects the specs that inotify has told of.
type touched struct {
	mu    sync.Mutex
	names map[string]bool
	// all says that it may be any.
	all bool
}

func (t *touched) add(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.names == nil {
		t.names = map[string]bool{}
	}
	t.names[name] = true
}

func (t *touched) addAll() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all = true
}

// take empties it.
func (t *touched) take() (names map[string]bool, all bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	names, all = t.names, t.all
	t.names, t.all = nil, false
	return names, all
}

// close lets go of the watcher; follow takes another.
func (l *lookout) close() {
	if l.watcher != nil {
		_ = l.watcher.Close()
	}
	l.watcher, l.ended, l.watched, l.told = nil, nil, nil, false
}

// follow has inotify watch the directory that has the name now, and its parent to see it come back. It reports whether changes since the last call
// may have gone unseen.
func (l *lookout) follow(log klog.Logger) (unseen bool) {
	now, err := l.watch()
	switch {
	case err == nil && l.blind:
		l.blind = false
		log.Info("The CDI directory is watched through inotify again", "directory", l.root)
	case err != nil && !errors.Is(err, os.ErrNotExist) && !l.blind:
		l.blind = true
		log.Error(err, "Could not watch the CDI directory through inotify; its files are read instead", "directory", l.root,
			"interval", lookAgain, "wayOut", wayOut(err))
	}
	unseen = now == nil || !os.SameFile(now, l.watched)
	l.watched, l.told = now, err == nil
	return unseen
}

// wayOut is what an operator can do about inotify's refusal.
func wayOut(err error) string {
	switch {
	case errors.Is(err, unix.EMFILE):
		return "raise the node's sysctl fs.inotify.max_user_instances"
	case errors.Is(err, unix.ENOSPC):
		return "raise the node's sysctl fs.inotify.max_user_watches"
	default:
		return "none is known"
	}
}

func (l *lookout) watch() (os.FileInfo, error) {
	if l.watcher == nil {
		w, err := fsnotify.NewWatcher()
		if err != nil {
			return nil, err
		}
		l.watcher, l.ended = w, make(chan struct{})
		go listen(w, l.root, l.touched, l.changed, l.ended)
	}
	outside := l.watcher.Add(filepath.Dir(l.root)) // adding twice is no error
	if err := l.watcher.Add(l.root); err != nil {
		return nil, err
	}
	now, err := os.Stat(l.root)
	return now, errors.Join(outside, err)
}

// listen empties inotify's channels until they are closed. It does nothing else: the watcher holds its own lock while it waits for its reader,
// so a reader that also called the watcher could wait for itself.
func listen(w *fsnotify.Watcher, root string, seen *touched, changed chan<- struct{}, ended chan<- struct{}) {
	defer close(ended)
	tell := func() {
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
				seen.addAll()
				tell()
			case filepath.Dir(event.Name) == root && isSpec(name):
				seen.add(name)
				tell()
			}
		case _, ok := <-errs:
			if !ok {
				errs = nil
			} else {
				seen.addAll() // events were lost
				tell()
			}
		}
	}
}
