package durable

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Watched is the real file system with cached directory listings, so that listing hundreds of files
// costs little.
//
// A cached listing is as current as a new one, even if other processes change the directory. The
// kernel queues an inotify event before the call that made the change returns, and Watched applies
// all queued events before each answer. So a process that gets a lock sees all changes that earlier
// owners of the lock made. Watched reads the directory again if inotify is unavailable, has lost
// events, or reports another kind of event.
type Watched struct {
	OS

	mu sync.Mutex
	// queue is the descriptor of the inotify event queue, -1 until it is opened.
	queue  int
	dirs   map[string]*listing
	buffer [4 << 10]byte
}

// listing is the cached list of a directory's names.
type listing struct {
	watch int32
	dir   fs.FileInfo
	names map[string]struct{}
}

func (l *listing) list() []string {
	names := make([]string, 0, len(l.names))
	for name := range l.names {
		names = append(names, name)
	}
	return names
}

// NewWatched returns a Watched. From the first listing of a directory on, Watched watches this
// directory until the process ends.
func NewWatched() *Watched { return &Watched{queue: -1, dirs: map[string]*listing{}} }

var _ FS = &Watched{}

// nameEvents are the inotify events to receive: changes of names, and changes that end a watch.
const nameEvents = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO |
	unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR | unix.IN_DONT_FOLLOW

// ReadDir does the same as [OS.ReadDir], including the check of owner and permissions.
func (w *Watched) ReadDir(dir string) ([]string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.drainEvents(); err != nil {
		w.forget()
	}
	if known := w.dirs[dir]; known != nil {
		// Check the directory itself: another one may have been mounted or renamed to this path, and
		// inotify does not report a change of the owner.
		now, err := os.Lstat(dir)
		if err == nil && os.SameFile(now, known.dir) && trustedDir(dir, now) == nil {
			return known.list(), nil
		}
		w.forget()
	}
	return w.list(dir)
}

// list starts to watch the directory and then reads it, so that no change between both is missed.
func (w *Watched) list(dir string) ([]string, error) {
	before, _ := os.Lstat(dir)
	watch, watchErr := w.watch(dir)
	names, err := w.OS.ReadDir(dir)
	if err != nil || watchErr != nil {
		return names, err
	}
	if after, err := os.Lstat(dir); err != nil || !os.SameFile(before, after) {
		w.forget()
		return names, nil //nolint:nilerr // the names were read
	}
	known := &listing{watch: watch, dir: before, names: make(map[string]struct{}, len(names))}
	for _, name := range names {
		known.names[name] = struct{}{}
	}
	w.dirs[dir] = known
	return names, nil
}

func (w *Watched) watch(dir string) (int32, error) {
	if w.queue < 0 {
		queue, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
		if err != nil {
			return 0, err
		}
		w.queue = queue
	}
	watch, err := unix.InotifyAddWatch(w.queue, dir, nameEvents)
	return int32(watch), err //nolint:gosec // the kernel's descriptors have this size
}

// forget drops all listings and watches, so that the next call reads the directory again.
func (w *Watched) forget() {
	if w.queue >= 0 {
		_ = unix.Close(w.queue)
	}
	w.queue = -1
	clear(w.dirs)
}

var errIncomplete = errors.New("some name changes were missed")

// drainEvents applies all queued inotify events to the cached listings.
func (w *Watched) drainEvents() error {
	if w.queue < 0 {
		return nil
	}
	for {
		n, err := unix.Read(w.queue, w.buffer[:])
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return nil
		case err != nil:
			return err
		case n < unix.SizeofInotifyEvent:
			return errIncomplete
		}
		if err := w.applyEvents(w.buffer[:n]); err != nil {
			return err
		}
	}
}

// applyEvents applies inotify events to the cached listings. Each event has a fixed part and a
// name: see inotify(7).
func (w *Watched) applyEvents(events []byte) error {
	for len(events) >= unix.SizeofInotifyEvent {
		watch := int32(binary.NativeEndian.Uint32(events)) //nolint:gosec // the field's size
		mask := binary.NativeEndian.Uint32(events[4:])
		end := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(events[12:]))
		if end > len(events) || mask&(unix.IN_CREATE|unix.IN_DELETE|unix.IN_MOVED_FROM|unix.IN_MOVED_TO) == 0 {
			return errIncomplete
		}
		name := strings.TrimRight(string(events[unix.SizeofInotifyEvent:end]), "\x00")
		events = events[end:]
		for _, known := range w.dirs {
			switch {
			case known.watch != watch:
			case mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
				known.names[name] = struct{}{}
			default:
				delete(known.names, name)
			}
		}
	}
	return nil
}
