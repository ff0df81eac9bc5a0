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

// Watched is the real file system, which lists a directory once and knows its names from then on, so that a directory with hundreds of files costs a call as
// little as an empty one.
//
// It is as true as a look at the directory, also for what other processes do: the kernel puts a change into inotify's queue before the call that made it
// returns, and the queue is emptied before each answer. So whoever has got a lock sees all that was done by those who had it before. Where inotify is not to be
// had, has lost something or tells of anything but names, the directory is read.
type Watched struct {
	OS

	mu sync.Mutex
	// queue is inotify's; -1 until there is one.
	queue  int
	dirs   map[string]*listing
	buffer [4 << 10]byte
}

// listing is what is known of a directory.
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

// NewWatched watches nothing yet: a directory is from when it is first listed. It is closed with the process.
func NewWatched() *Watched { return &Watched{queue: -1, dirs: map[string]*listing{}} }

var _ FS = &Watched{}

// told are the changes of names, and what ends a watch.
const told = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR | unix.IN_DONT_FOLLOW

// ReadDir is [OS.ReadDir], with the same distrust.
func (w *Watched) ReadDir(dir string) ([]string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.catchUp(); err != nil {
		w.forget()
	}
	if known := w.dirs[dir]; known != nil {
		// Another directory may have got the name, or been mounted there; and whom it belongs to, no event tells.
		now, err := os.Lstat(dir)
		if err == nil && os.SameFile(now, known.dir) && trustedDir(dir, now) == nil {
			return known.list(), nil
		}
		w.forget()
	}
	return w.list(dir)
}

// list reads the directory, watched from before that.
func (w *Watched) list(dir string) ([]string, error) {
	before, _ := os.Lstat(dir)
	watch, watchErr := w.watch(dir)
	names, err := w.OS.ReadDir(dir)
	if err != nil || watchErr != nil {
		return names, err
	}
	if after, err := os.Lstat(dir); err != nil || !os.SameFile(before, after) {
		w.forget()
		return names, nil //nolint:nilerr // what was read was there
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
	watch, err := unix.InotifyAddWatch(w.queue, dir, told)
	return int32(watch), err //nolint:gosec // the kernel's own are of this size
}

// forget has every directory read again.
func (w *Watched) forget() {
	if w.queue >= 0 {
		_ = unix.Close(w.queue)
	}
	w.queue = -1
	clear(w.dirs)
}

var errLost = errors.New("not all changes of names are known")

// catchUp takes in what has changed.
func (w *Watched) catchUp() error {
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
			return errLost
		}
		if err := w.take(w.buffer[:n]); err != nil {
			return err
		}
	}
}

// take reads events, each of a fixed part and a name; see inotify(7).
func (w *Watched) take(events []byte) error {
	for len(events) >= unix.SizeofInotifyEvent {
		watch := int32(binary.NativeEndian.Uint32(events)) //nolint:gosec // that is what it is
		mask := binary.NativeEndian.Uint32(events[4:])
		end := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(events[12:]))
		if end > len(events) || mask&(unix.IN_CREATE|unix.IN_DELETE|unix.IN_MOVED_FROM|unix.IN_MOVED_TO) == 0 {
			return errLost
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
