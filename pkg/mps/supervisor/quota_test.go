package supervisor

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// By default a daemon's /dev/shm is half of the node's memory. The kernel's tmpfs and NVIDIA's DRA
// driver have the same default.
func TestDefaultSharedMemoryIsHalfOfNodeMemory(t *testing.T) {
	n := newNode(t)
	n.superviseSeparately()
	n.mustStart(mps.Daemon{ID: "a", Devices: []string{"GPU-a"}})
	var memory unix.Sysinfo_t
	must(t, unix.Sysinfo(&memory))
	half := memory.Totalram * uint64(memory.Unit) / 2
	var shm unix.Statfs_t
	must(t, unix.Statfs(n.paths.Shm("a"), &shm))
	page := uint64(os.Getpagesize()) // the kernel rounds up to whole pages
	if size := shm.Blocks * uint64(shm.Bsize); size >= half+page || size < half-1<<20 {
		t.Errorf("clients have %d bytes, want half of the memory, %d", size, half)
	}
	n.mustStop("a")
}

// A client may fill its own daemon's directories, but must not be able to fill another file system
// of the node.
func TestClientsCannotFillTheNode(t *testing.T) {
	n := newNode(t)
	n.options.SharedMemory = 8
	n.superviseSeparately()
	one, other := mps.Daemon{ID: "a", Devices: []string{"GPU-a"}}, mps.Daemon{ID: "b", Devices: []string{"GPU-b"}}
	n.mustStart(one)
	n.mustStart(other)
	for dir, limit := range map[string]int64{n.paths.Pipes("a"): pipeMebibytes << 20, n.paths.Shm("a"): 8 << 20} {
		written, err := fill(filepath.Join(dir, "much"), 2*limit)
		if !errors.Is(err, unix.ENOSPC) || written > limit {
			t.Errorf("%s accepted %d bytes: %v", dir, written, err)
		}
		var made int
		for err = nil; err == nil && made <= shmFiles; made++ {
			err = os.WriteFile(filepath.Join(dir, "f"+itoa(made)), nil, 0o600)
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Errorf("%s accepted %d files: %v", dir, made, err)
		}
	}
	for _, dir := range []string{n.paths.Pipes("b"), n.paths.Shm("b"), n.paths.Logs("a"), n.paths.Root()} {
		if err := os.WriteFile(filepath.Join(dir, "little"), []byte("x"), 0o600); err != nil {
			t.Errorf("with the file systems of daemon a full: %v", err)
		}
		_ = os.Remove(filepath.Join(dir, "little"))
	}
	// A daemon that restarts must be able to create its pipes although its clients have filled the
	// pipe directory.
	pid := n.status("a").PID
	n.killProcess(pid)
	n.await("the daemon is ready again", func() bool { s := n.status("a"); return s.State == mps.Ready && s.PID != pid })
	// The mounted file system outlives the supervisor, because containers use it. The next supervisor
	// must not mount a second one over it.
	before, err := os.Stat(n.paths.Shm("a"))
	must(t, err)
	n.kill()
	n.superviseSeparately()
	n.await("the daemon is ready again", func() bool { return n.status("a").State == mps.Ready })
	if after, err := os.Stat(n.paths.Shm("a")); err != nil || !os.SameFile(before, after) {
		t.Errorf("the next supervisor mounted another file system: %v", err)
	}
	n.mustStop("a")
	n.mustStop("b")
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	if bytes.Contains(mounts, []byte(n.paths.PluginDir)) {
		t.Error("a mount is left")
	}
}

func fill(path string, most int64) (written int64, err error) {
	f, err := os.Create(path)
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }()
	block := make([]byte, 1<<20)
	for err == nil && written < most {
		var n int
		n, err = f.Write(block)
		written += int64(n)
	}
	return written, err
}

func TestMountMountsOnce(t *testing.T) {
	needMounts(t)
	dir := filepath.Join(t.TempDir(), "pipe")
	s := quota{size: "1m", files: 16}
	must(t, os.Mkdir(dir, 0o700), s.mount(dir), s.mount(dir))
	if is, err := mounted(dir); !is || err != nil {
		t.Errorf("the directory is not mounted: %v", err)
	}
	must(t, unix.Unmount(dir, 0))
	if is, err := mounted(dir); is || err != nil {
		t.Errorf("the directory was mounted twice: %v", err)
	}
	must(t, unmountAll(dir), unmountAll(dir), os.Remove(dir), unmountAll(dir))
}

// A plugin whose driver root is the host's / has a copy of the daemon's mount there, maybe hidden
// under other mounts. Forget must still be able to remove the directory.
func TestRemoveDirectoryWithHiddenMountCopy(t *testing.T) {
	needMounts(t)
	top := t.TempDir()
	dir, copies := filepath.Join(top, "mps", "a"), filepath.Join(top, "driver-root")
	must(t, os.MkdirAll(dir, 0o700), os.Mkdir(copies, 0o700))
	must(t, quota{size: "1m", files: 16}.mount(dir))
	must(t, unix.Mount(filepath.Dir(dir), copies, "", unix.MS_BIND|unix.MS_REC, ""))
	t.Cleanup(func() { _ = unix.Unmount(copies, unix.MNT_DETACH) })
	must(t, unix.Mount("", copies, "", unix.MS_REC|unix.MS_PRIVATE, ""), unix.Mount("cover", copies, "tmpfs", 0, "size=64k"))
	t.Cleanup(func() { _ = unix.Unmount(copies, unix.MNT_DETACH) })
	must(t, unmountAll(dir))
	if err := os.Remove(dir); !errors.Is(err, unix.EBUSY) {
		t.Fatalf("setup: the directory is not busy: %v", err)
	}
	must(t, removeUnmounted(dir), removeUnmounted(dir))
	if _, err := os.Lstat(dir); !os.IsNotExist(err) {
		t.Errorf("the directory is left: %v", err)
	}
}
