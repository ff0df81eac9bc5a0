package sysfs

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"log"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// pageSize is the size of a file of sysfs, and of the longest write.
const pageSize = 4096

// Server serves the sysfs of a node.
type Server struct {
	bus  *bus
	fuse *fuse.Server
	once sync.Once

	mu    sync.Mutex // guards the tree; taken before the bus's
	tree  tree
	drawn stamp
}

// Mount mounts the sysfs of the node whose layout is in root at the layout's folder sys, and serves
// it until it is unmounted. The node must have passthrough. A boot of the node needs a new mount.
func Mount(root string) (*Server, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, err
	}
	config, err := layout.Load(root)
	if err != nil {
		return nil, err
	}
	if !config.Node.Passthrough {
		return nil, fmt.Errorf("the node of %s has no passthrough: write passthrough: true in its node file", root)
	}
	f, err := state.Open(layout.StatePath(root))
	if err != nil {
		return nil, err
	}
	s := &Server{}
	loaded := atomic.LoadUint32(&f.Header().VFIOLoaded) != 0
	if s.bus, err = newBus(config, f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if err := s.mount(config.SysPath()); err != nil {
		return nil, errors.Join(fmt.Errorf("mount the simulated sysfs at %s: %w", config.SysPath(), err), f.Close())
	}
	go s.bus.follow(loaded)
	return s, nil
}

// mount mounts without any caching in the kernel, so that every process sees a change at once.
func (s *Server) mount(at string) error {
	before, err := connections()
	if err != nil {
		return err
	}
	none := time.Duration(0)
	server, err := fs.Mount(at, &node{server: s, path: "."}, &fs.Options{
		EntryTimeout: &none, AttrTimeout: &none, NegativeTimeout: &none, RootStableAttr: &fs.StableAttr{Ino: inode(".", 0)},
		MountOptions: fuse.MountOptions{
			AllowOther: true, DirectMountStrict: true, FsName: "sysfs", Name: "nvmlsim", Options: []string{"default_permissions"},
			Logger:           log.New(io.Discard, "", 0), // it names every write that the end of the mount interrupts
			DirectMountFlags: syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC,
		},
	})
	if err != nil {
		return err
	}
	s.fuse = server
	after, err := connections()
	for _, fd := range after {
		if !slices.Contains(before, fd) {
			syscall.CloseOnExec(fd) // a copy in a child would keep writes waiting after the end of this process
			go s.watch(fd)
		}
	}
	return err
}

// connections returns this process's descriptors of /dev/fuse.
func connections() (descriptors []int, _ error) {
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return nil, err
	}
	for _, descriptor := range open {
		target, _ := os.Readlink(filepath.Join("/proc/self/fd", descriptor.Name()))
		if number, err := strconv.Atoi(descriptor.Name()); err == nil && filepath.Base(target) == "fuse" {
			descriptors = append(descriptors, number)
		}
	}
	return descriptors, nil
}

// watch ends every wait as soon as the kernel has closed the connection. go-fuse itself waits for
// the calls that are in progress.
func (s *Server) watch(connection int) {
	for {
		events := []unix.PollFd{{Fd: int32(connection)}}
		if n, err := unix.Poll(events, -1); n == 1 || (err != nil && !errors.Is(err, unix.EINTR)) {
			s.once.Do(func() { close(s.bus.stop) })
			return
		}
	}
}

// Wait returns when the file system was unmounted. Writes that hang then end. The state file stays
// mapped for them.
func (s *Server) Wait() { s.fuse.Wait() }

// lookup returns the entry at a path, or nil.
func (s *Server) lookup(name string) *entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bus.mu.Lock()
	defer s.bus.mu.Unlock()
	if now := s.bus.stamp(); s.tree == nil || now != s.drawn {
		s.tree, s.drawn = s.bus.draw(), now
	}
	return s.tree[name]
}

// node is a file, link or folder in the kernel's hands. It finds its entry again at each call.
type node struct {
	fs.Inode
	server *Server
	path   string
}

var (
	_ fs.NodeLookuper   = &node{}
	_ fs.NodeReaddirer  = &node{}
	_ fs.NodeGetattrer  = &node{}
	_ fs.NodeSetattrer  = &node{}
	_ fs.NodeReadlinker = &node{}
	_ fs.NodeOpener     = &node{}
	_ fs.NodeReader     = &node{}
	_ fs.NodeWriter     = &node{}
	_ fs.NodeCreater    = &node{}
)

func inode(name string, incarnation uint32) uint64 {
	sum := fnv.New64a()
	_, _ = fmt.Fprintf(sum, "%s %d", name, incarnation)
	return sum.Sum64() >> 2 // go-fuse numbers other inodes from 1<<63
}

func (e *entry) attributes(to *fuse.Attr) {
	to.Mode = e.mode
	to.Nlink = 1
	switch e.mode & syscall.S_IFMT {
	case syscall.S_IFLNK:
		to.Size = uint64(len(e.content))
	case syscall.S_IFREG:
		to.Size = pageSize
	}
}

// Lookup gives a folder and a link a lasting inode, and a file a new one at each lookup. The kernel
// lets only one write at a time into an inode, and sysfs has no such limit.
func (n *node) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	full := path.Join(n.path, name)
	e := n.server.lookup(full)
	if e == nil {
		return nil, syscall.ENOENT
	}
	e.attributes(&out.Attr)
	stable := fs.StableAttr{Mode: e.mode & syscall.S_IFMT}
	if stable.Mode != syscall.S_IFREG {
		stable.Ino = inode(full, e.incarnation)
	}
	return n.NewInode(ctx, &node{server: n.server, path: full}, stable), 0
}

// Readdir lists a folder.
func (n *node) Readdir(context.Context) (fs.DirStream, syscall.Errno) {
	e := n.server.lookup(n.path)
	if e == nil {
		return nil, syscall.ENOENT
	}
	var entries []fuse.DirEntry
	for _, name := range e.children {
		if child := n.server.lookup(path.Join(n.path, name)); child != nil {
			entries = append(entries, fuse.DirEntry{Name: name, Mode: child.mode & syscall.S_IFMT})
		}
	}
	return fs.NewListDirStream(entries), 0
}

// Getattr returns mode and size. A file has a page, whatever it contains.
func (n *node) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	e := n.server.lookup(n.path)
	if e == nil {
		return syscall.ENOENT
	}
	e.attributes(&out.Attr)
	return 0
}

// Setattr changes nothing. A program that truncates a file before it writes needs its success.
func (n *node) Setattr(ctx context.Context, h fs.FileHandle, _ *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	return n.Getattr(ctx, h, out)
}

// Readlink returns the target of a link.
func (n *node) Readlink(context.Context) ([]byte, syscall.Errno) {
	e := n.server.lookup(n.path)
	if e == nil {
		return nil, syscall.ENOENT
	}
	return []byte(e.content), 0
}

// Open refuses to open a file without read or write permission even for root, as sysfs does.
func (n *node) Open(_ context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	e := n.server.lookup(n.path)
	if e == nil {
		return nil, 0, syscall.ENOENT
	}
	access := flags & syscall.O_ACCMODE
	if (access != syscall.O_WRONLY && e.mode&0o444 == 0) || (access != syscall.O_RDONLY && e.mode&0o222 == 0) {
		return nil, 0, syscall.EACCES
	}
	return nil, fuse.FOPEN_DIRECT_IO, 0
}

// Create fails, because no process can create files in sysfs.
func (n *node) Create(context.Context, string, uint32, uint32, *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	return nil, nil, 0, syscall.EACCES
}

// Read returns the content from an offset.
func (n *node) Read(_ context.Context, _ fs.FileHandle, buffer []byte, offset int64) (fuse.ReadResult, syscall.Errno) {
	e := n.server.lookup(n.path)
	if e == nil {
		return nil, syscall.ENODEV
	}
	content := e.content
	if e.read != nil {
		var errno syscall.Errno
		if content, errno = e.read(); errno != 0 {
			return nil, errno
		}
	}
	if offset >= int64(len(content)) {
		return fuse.ReadResultData(nil), 0
	}
	return fuse.ReadResultData([]byte(content[offset:])[:min(len(buffer), len(content)-int(offset))]), 0
}

// Write does what the written text asks for. It ends when that is done, whatever signals the writer
// gets.
func (n *node) Write(ctx context.Context, _ fs.FileHandle, data []byte, _ int64) (uint32, syscall.Errno) {
	e := n.server.lookup(n.path)
	if e == nil || e.write == nil {
		return 0, syscall.ENODEV
	}
	c := call{text: string(data)}
	if caller, known := fuse.FromContext(ctx); known {
		c.pid = int(caller.Pid)
	}
	if errno := e.write(c); errno != 0 {
		return 0, errno
	}
	return uint32(len(data)), 0
}
