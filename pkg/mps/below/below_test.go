package below

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func TestOpenStaysInRootDuringRenames(t *testing.T) {
	base := t.TempDir()
	root, elsewhere := filepath.Join(base, "root"), filepath.Join(base, "elsewhere")
	for _, dir := range []string{filepath.Join(root, "a", "b"), filepath.Join(root, "etc"), elsewhere, filepath.Join(base, "etc")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("../../../etc", filepath.Join(root, "a", "b", "link")); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	stop := make(chan struct{})
	var renaming sync.WaitGroup
	defer renaming.Wait()
	defer close(stop)
	renaming.Go(func() {
		one, other := filepath.Join(elsewhere, "one"), filepath.Join(elsewhere, "other")
		if err := os.Mkdir(one, 0o700); err != nil {
			t.Error(err)
		}
		for {
			select {
			case <-stop:
				return
			default:
			}
			_ = os.Rename(one, other)
			_ = os.Rename(other, one)
		}
	})
	for range 2000 {
		found, err := Open(fd, "a/b/link", unix.O_DIRECTORY)
		if err != nil {
			t.Fatal(err)
		}
		at, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", found))
		_ = unix.Close(found)
		if err != nil || at != filepath.Join(root, "etc") {
			t.Fatalf("found %s: %v", at, err)
		}
	}
	if _, err := Open(fd, "nothing", 0); err == nil {
		t.Error("a missing path was found")
	}
}
