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

// Half of the memory is what the kernel gives a tmpfs, and NVIDIA's reference driver its clients.
func TestClientsHaveHalfOfTheNodesMemoryUnlessAValueSaysOtherwise(t *testing.T) {
	n := newNode(t)
	n.superviseApart()
	n.mustStart(mps.Daemon{ID: "a", Devices: []string{"GPU-a"}})
	var memory unix.Sysinfo_t
	must(t, unix.Sysinfo(&memory))
	half := memory.Totalram * uint64(memory.Unit) / 2
	var shm unix.Statfs_t
	must(t, unix.Statfs(n.paths.Shm("a"), &shm))
	if size := shm.Blocks * uint64(shm.Bsize); size > half || size < half-1<<20 {
		t.Errorf("clients have %d bytes, half of the memory is %d", size, half)
	}
	n.mustStop("a")
}

// What clients write to is theirs to fill, and nothing else of the node.
func TestClientsCanFillTheirOwnSpaceAlone(t *testing.T) {
	n := newNode(t)
	n.options.SharedMemory = 8
	n.superviseApart()
	one, other := mps.Daemon{ID: "a", Devices: []string{"GPU-a"}}, mps.Daemon{ID: "b", Devices: []string{"GPU-b"}}
	n.mustStart(one)
	n.mustStart(other)
	for dir, limit := range map[string]int64{n.paths.Pipes("a"): pipeSpace << 20, n.paths.Shm("a"): 8 << 20} {
		written, err := fill(filepath.Join(dir, "much"), 2*limit)
		if !errors.Is(err, unix.ENOSPC) || written > limit {
			t.Errorf("%s took %d bytes: %v", dir, written, err)
		}
		var made int
		for err = nil; err == nil && made <= shmFiles; made++ {
			err = os.WriteFile(filepath.Join(dir, "f"+itoa(made)), nil, 0o600)
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Errorf("%s took %d files: %v", dir, made, err)
		}
	}
	for _, dir := range []string{n.paths.Pipes("b"), n.paths.Shm("b"), n.paths.Logs("a"), n.paths.ShmDir()} {
		if err := os.WriteFile(filepath.Join(dir, "little"), []byte("x"), 0o600); err != nil {
			t.Errorf("with the spaces of a full: %v", err)
		}
		_ = os.Remove(filepath.Join(dir, "little"))
	}
	// A daemon that has to be started anew has its pipes for itself again.
	pid := n.status("a").PID
	n.killProcess(pid)
	n.await("it is ready again", func() bool { s := n.status("a"); return s.State == mps.Ready && s.PID != pid })
	// The space outlives the supervisor, as the daemon does, and is not made twice.
	before, err := os.Stat(n.paths.Shm("a"))
	must(t, err)
	n.kill()
	n.superviseApart()
	n.await("it is taken over", func() bool { return n.status("a").State == mps.Ready })
	if after, err := os.Stat(n.paths.Shm("a")); err != nil || !os.SameFile(before, after) {
		t.Errorf("another supervisor has given it another space: %v", err)
	}
	n.mustStop("a")
	n.mustStop("b")
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	if bytes.Contains(mounts, []byte(n.paths.PluginDir)) || bytes.Contains(mounts, []byte(n.paths.ShmRoot)) {
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

// Directories that are in use by those who were there before are not hidden from them.
func TestADirectoryThatHoldsSomethingIsNotCovered(t *testing.T) {
	needMounts(t)
	dir := filepath.Join(t.TempDir(), "pipe")
	must(t, os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "control"), nil, 0o600))
	s := space{size: "1m", files: 16}
	must(t, s.bound(dir))
	if is, err := mounted(dir); is || err != nil {
		t.Errorf("covered: %t, %v", is, err)
	}
	must(t, os.Remove(filepath.Join(dir, "control")), s.bound(dir), s.bound(dir))
	if is, err := mounted(dir); !is || err != nil {
		t.Errorf("an empty one is not bounded: %v", err)
	}
	must(t, unbound(dir), unbound(dir), os.Remove(dir), unbound(dir))
}

// A container that has the node's /dev has copies of what is mounted below it, which its own mount of the node's shared memory covers.
func TestADirectoryIsRemovedWhateverCoversACopyOfItsMount(t *testing.T) {
	needMounts(t)
	top := t.TempDir()
	dir, copies := filepath.Join(top, "shm", "a"), filepath.Join(top, "dev")
	must(t, os.MkdirAll(dir, 0o700), os.Mkdir(copies, 0o700))
	must(t, space{size: "1m", files: 16}.bound(dir))
	must(t, unix.Mount(filepath.Dir(dir), copies, "", unix.MS_BIND|unix.MS_REC, ""))
	t.Cleanup(func() { _ = unix.Unmount(copies, unix.MNT_DETACH) })
	must(t, unix.Mount("", copies, "", unix.MS_REC|unix.MS_PRIVATE, ""), unix.Mount("cover", copies, "tmpfs", 0, "size=64k"))
	t.Cleanup(func() { _ = unix.Unmount(copies, unix.MNT_DETACH) })
	must(t, unbound(dir))
	if err := os.Remove(dir); !errors.Is(err, unix.EBUSY) {
		t.Fatalf("nothing keeps it busy: %v", err)
	}
	must(t, removeBoth(dir), removeBoth(dir))
	if _, err := os.Lstat(dir); !os.IsNotExist(err) {
		t.Errorf("it is left: %v", err)
	}
}
