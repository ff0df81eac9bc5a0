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

// nobody is some other user of the node.
const nobody = 65534

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can make another user's file")
	}
}

// planted makes one thing at path that is not to be believed, beside a file that it may lead to.
var planted = map[string]struct {
	plant  func(t *testing.T, path, elsewhere string)
	reason string
}{
	"a file of another user": {func(t *testing.T, path, _ string) {
		t.Helper()
		needRoot(t)
		write(t, path, 0o600)
		must(t, os.Chown(path, nobody, -1))
	}, "belongs to user 65534"},
	"a file that others may write": {func(t *testing.T, path, _ string) { t.Helper(); write(t, path, 0o602) }, "others may write"},
	"a file of another group, which may write": {func(t *testing.T, path, _ string) {
		t.Helper()
		needRoot(t)
		write(t, path, 0o660)
		must(t, os.Chown(path, -1, nobody))
	}, "others may write"},
	"a link to a file": {func(t *testing.T, path, elsewhere string) { t.Helper(); must(t, os.Symlink(elsewhere, path)) }, "symbolic link"},
	"a link to nowhere": {func(t *testing.T, path, elsewhere string) {
		t.Helper()
		must(t, os.Symlink(elsewhere+"-not-there", path))
	}, "symbolic link"},
	"a directory":                  {func(t *testing.T, path, _ string) { t.Helper(); must(t, os.Mkdir(path, 0o700)) }, "a directory"},
	"a pipe that nobody writes to": {func(t *testing.T, path, _ string) { t.Helper(); must(t, syscall.Mkfifo(path, 0o600)) }, "a device, pipe or socket"},
	"a device without end": {func(t *testing.T, path, _ string) {
		t.Helper()
		needRoot(t)
		if err := syscall.Mknod(path, syscall.S_IFCHR|0o600, 1<<8|5); err != nil {
			t.Skipf("SKIPPED: no device can be made here: %v", err)
		}
	}, "a device, pipe or socket"},
	"a file without end": {func(t *testing.T, path, _ string) {
		t.Helper()
		write(t, path, 0o600)
		must(t, os.Truncate(path, 1<<40))
	}, "1099511627776 bytes"},
}

func write(t *testing.T, path string, mode fs.FileMode) {
	t.Helper()
	must(t, os.WriteFile(path, []byte("theirs"), mode))
	must(t, os.Chmod(path, mode)) // past the umask
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestWhatWasPlantedIsNotRead(t *testing.T) {
	for name, c := range planted {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path, elsewhere := filepath.Join(dir, "record"), filepath.Join(t.TempDir(), "file")
			write(t, elsewhere, 0o600)
			c.plant(t, path, elsewhere)
			raw, err := durable.OS{}.ReadFile(path)
			var untrusted *durable.UntrustedError
			if !errors.As(err, &untrusted) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), c.reason) {
				t.Errorf("read %.20q, %v; want a refusal that says %q", raw, err, c.reason)
			}
		})
	}
}

// The temporary file has a fixed name, at which something may lie already.
func TestWhatWasPlantedIsReplacedAndNotWrittenTo(t *testing.T) {
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
				t.Errorf("elsewhere there is %q now, %v", got, err)
			}
			if _, err := os.Lstat(elsewhere + "-not-there"); err == nil {
				t.Error("a link was followed to make a file")
			}
		})
	}
}

func TestADirectoryThatOthersCanChangeIsNotUsed(t *testing.T) {
	for name, c := range map[string]struct {
		plant  func(t *testing.T, path string)
		reason string
	}{
		"a link to a directory": {func(t *testing.T, path string) { t.Helper(); must(t, os.Symlink(t.TempDir(), path)) }, "symbolic link"},
		"a file":                {func(t *testing.T, path string) { t.Helper(); write(t, path, 0o600) }, ""},
		"one of another user": {func(t *testing.T, path string) {
			t.Helper()
			needRoot(t)
			must(t, os.Mkdir(path, 0o700))
			must(t, os.Chown(path, nobody, -1))
		}, "belongs to user 65534"},
		"one that everyone may write to": {func(t *testing.T, path string) {
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
				t.Errorf("took it as made: %v", err)
			}
		})
	}
}
