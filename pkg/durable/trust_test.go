package durable_test

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// otherUser is the ID of a user who is not root.
const otherUser = 65534

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can create another user's file")
	}
}

// planted are directory entries that an attacker may create, such as symlinks. plant creates one at
// path, and a symlink leads to the file elsewhere. The resulting error must contain reason.
var planted = map[string]struct {
	plant  func(t *testing.T, path, elsewhere string)
	reason string
}{
	"a file of another user": {func(t *testing.T, path, _ string) {
		t.Helper()
		needRoot(t)
		write(t, path, 0o600)
		must(t, os.Chown(path, otherUser, -1))
	}, "belongs to user 65534"},
	"a file writable by others": {func(t *testing.T, path, _ string) { t.Helper(); write(t, path, 0o602) }, "others may write"},
	"a file writable by another group": {func(t *testing.T, path, _ string) {
		t.Helper()
		needRoot(t)
		write(t, path, 0o660)
		must(t, os.Chown(path, -1, otherUser))
	}, "others may write"},
	"a symlink to a file": {func(t *testing.T, path, elsewhere string) { t.Helper(); must(t, os.Symlink(elsewhere, path)) }, "symbolic link"},
	"a dangling symlink": {func(t *testing.T, path, elsewhere string) {
		t.Helper()
		must(t, os.Symlink(elsewhere+"-not-there", path))
	}, "symbolic link"},
	"a directory": {func(t *testing.T, path, _ string) { t.Helper(); must(t, os.Mkdir(path, 0o700)) }, "a directory"},
	"a pipe without writer": {func(t *testing.T, path, _ string) { t.Helper(); must(t, syscall.Mkfifo(path, 0o600)) },
		"a device, pipe or socket"},
	"a socket": {func(t *testing.T, path, _ string) {
		t.Helper()
		must(t, syscall.Mknod(path, syscall.S_IFSOCK|0o600, 0))
	}, "a device, pipe or socket"},
	"an endless device": {func(t *testing.T, path, _ string) {
		t.Helper()
		needRoot(t)
		if err := syscall.Mknod(path, syscall.S_IFCHR|0o600, 1<<8|5); err != nil {
			t.Skipf("SKIPPED: cannot create a device here: %v", err)
		}
	}, "a device, pipe or socket"},
	"an endless file": {func(t *testing.T, path, _ string) {
		t.Helper()
		write(t, path, 0o600)
		must(t, os.Truncate(path, 1<<40))
	}, "1099511627776 bytes"},
}

func write(t *testing.T, path string, mode fs.FileMode) {
	t.Helper()
	must(t, os.WriteFile(path, []byte("theirs"), mode))
	must(t, os.Chmod(path, mode)) // despite the umask
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestPlantedFileIsNotRead(t *testing.T) {
	for name, c := range planted {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path, elsewhere := filepath.Join(dir, "record"), filepath.Join(t.TempDir(), "file")
			write(t, elsewhere, 0o600)
			c.plant(t, path, elsewhere)
			raw, err := durable.OS{}.ReadFile(path)
			var untrusted *durable.UntrustedError
			if !errors.As(err, &untrusted) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), c.reason) {
				t.Errorf("read %.20q, %v; want an error with %q", raw, err, c.reason)
			}
		})
	}
}

// The temporary file has a fixed name, where an attacker may plant an entry. The test expects that
// Replace removes this entry and does not write through it.
func TestPlantedFileIsReplacedNotWrittenThrough(t *testing.T) {
	for name, c := range planted {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path, elsewhere := filepath.Join(dir, ".tmp-record"), filepath.Join(t.TempDir(), "file")
			write(t, elsewhere, 0o600)
			c.plant(t, path, elsewhere)
			if err := durable.Replace(durable.OS{}, filepath.Join(dir, "record"), []byte("ours")); err != nil {
				t.Fatal(err)
			}
			if got, err := (durable.OS{}).ReadFile(filepath.Join(dir, "record")); err != nil || string(got) != "ours" {
				t.Errorf("read %q, %v", got, err)
			}
			if got, err := os.ReadFile(elsewhere); err != nil || string(got) != "theirs" {
				t.Errorf("the other file now has %q, %v", got, err)
			}
			if _, err := os.Lstat(elsewhere + "-not-there"); err == nil {
				t.Error("a symlink was followed to create a file")
			}
		})
	}
}

func TestUntrustedDirectoryIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		plant  func(t *testing.T, path string)
		reason string
	}{
		"a symlink to a directory": {func(t *testing.T, path string) { t.Helper(); must(t, os.Symlink(t.TempDir(), path)) }, "symbolic link"},
		"a file":                   {func(t *testing.T, path string) { t.Helper(); write(t, path, 0o600) }, ""},
		"a directory of another user": {func(t *testing.T, path string) {
			t.Helper()
			needRoot(t)
			must(t, os.Mkdir(path, 0o700))
			must(t, os.Chown(path, otherUser, -1))
		}, "belongs to user 65534"},
		"a world-writable directory": {func(t *testing.T, path string) {
			t.Helper()
			must(t, os.Mkdir(path, 0o700))
			must(t, os.Chmod(path, 0o777|fs.ModeSticky))
		}, "others may write"},
		"a socket": {func(t *testing.T, path string) {
			t.Helper()
			l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", path)
			must(t, err)
			t.Cleanup(func() { _ = l.Close() })
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "d")
			c.plant(t, dir)
			if names, err := (durable.OS{}).ReadDir(dir); err == nil || !strings.Contains(err.Error(), c.reason) {
				t.Errorf("listed %q, %v", names, err)
			}
			if err := durable.MakeDir(durable.OS{}, dir); err == nil || !strings.Contains(err.Error(), c.reason) {
				t.Errorf("MakeDir accepted it: %v", err)
			}
		})
	}
}

func TestOnlyAFileOfOthersIsOpened(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "hook")
	for name, c := range planted {
		if !strings.Contains(c.reason, "device") && !strings.Contains(c.reason, "directory") {
			continue
		}
		t.Run(name, func(t *testing.T) {
			c.plant(t, path, "")
			t.Cleanup(func() { must(t, os.Remove(path)) })
			if _, err := durable.OpenRegular(path); err == nil || !strings.Contains(err.Error(), path) {
				t.Error(err)
			}
		})
	}
	write(t, path+".1", 0o646)
	must(t, os.Symlink(path+".1", path))
	f, err := durable.OpenRegular(path)
	must(t, err)
	must(t, f.Close())
	must(t, os.Remove(path))
	if _, err := durable.OpenRegular(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without the file: %v", err)
	}
}
