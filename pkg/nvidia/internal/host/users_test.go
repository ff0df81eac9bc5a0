package host

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

func TestErrorWaitsForNoProcessThatHangs(t *testing.T) {
	proc := t.TempDir()
	maps := filepath.Join(proc, "7", "maps")
	if err := os.Mkdir(filepath.Dir(maps), 0o700); err != nil {
		t.Fatal(err)
	}
	// The read of a pipe without a writer blocks, as that of a locked memory map does.
	if err := syscall.Mkfifo(maps, 0o600); err != nil {
		t.Fatal(err)
	}
	defer func() { // ends the read
		if writer, err := os.OpenFile(maps, os.O_WRONLY, 0); err == nil {
			_ = writer.Close()
		}
	}()
	asked := time.Now()
	for range 2 { // the second call starts no goroutine that hangs, too
		if users := UsersForError(nvidia.Paths{Proc: proc}, GPUNodes(nvidia.Paths{}, "0000:1b:00.0", 0)); len(users) > 0 {
			t.Errorf("got users %v of a /proc that does not answer", users)
		}
	}
	if took := time.Since(asked); took > 10*time.Second {
		t.Errorf("gave up after %s", took)
	}
}

// deafFile is a file of a file server that no longer answers how the file is, as an NFS server that
// is down.
type deafFile struct {
	fs.Inode
	deaf  *atomic.Bool
	asked chan<- struct{}
	over  <-chan struct{}
}

func (d *deafFile) Getattr(context.Context, fs.FileHandle, *fuse.AttrOut) syscall.Errno {
	if d.deaf.Load() {
		select {
		case d.asked <- struct{}{}:
		default:
		}
		<-d.over
	}
	return 0
}

func (d *deafFile) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	return nil, 0, 0
}

func TestAFileServerThatIsDownDoesNotStopTheLookForUsers(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: mounts a file system")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("needs /dev/fuse: ", err)
	}
	mount := filepath.Join(t.TempDir(), "nvidia-data")
	if err := os.Mkdir(mount, 0o700); err != nil {
		t.Fatal(err)
	}
	asked, over := make(chan struct{}, 1), make(chan struct{})
	file := &deafFile{deaf: new(atomic.Bool), asked: asked, over: over}
	root := &fs.Inode{}
	server, err := fs.Mount(mount, root, &fs.Options{
		MountOptions: fuse.MountOptions{DirectMountStrict: true},
		OnAdd: func(ctx context.Context) {
			root.AddChild("nvidia0", root.NewPersistentInode(ctx, file, fs.StableAttr{Mode: fuse.S_IFREG}), false)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		close(over)
		if err := server.Unmount(); err != nil {
			t.Error(err)
		}
	})
	opened, err := os.Open(filepath.Join(mount, "nvidia0"))
	if err != nil {
		t.Fatal(err)
	}
	job := exec.Command("cat")
	input, err := job.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	job.ExtraFiles = []*os.File{opened}
	if err := job.Start(); err != nil {
		t.Fatal(err)
	}
	_ = opened.Close()
	t.Cleanup(func() {
		_ = input.Close()
		_ = job.Wait()
	})
	file.deaf.Store(true)
	looked := make(chan bool, 1)
	go func() {
		looked <- Uses(nvidia.Paths{Proc: "/proc"}, uint32(job.Process.Pid), GPUNodes(nvidia.Paths{}, "0000:1b:00.0", 0))
	}()
	select {
	case uses := <-looked:
		if uses {
			t.Error("a file counts as a device node")
		}
	case <-asked:
		t.Error("the look for users asks the file server, which does not answer")
	}
}
