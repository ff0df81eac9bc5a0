package hook

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// host returns a hook with a source in the directory "image" and a target in the directory "host",
// both temporary.
func host(t *testing.T) (h *Hook, source, target string) {
	t.Helper()
	dir := t.TempDir()
	source, target = filepath.Join(dir, "image", "nvidia-cdi-hook"), filepath.Join(dir, "host", "bin", "nvidia-cdi-hook")
	write(t, source, "version 1")
	return New(source, target), source, target
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func install(t *testing.T, h *Hook) bool {
	t.Helper()
	changed, err := h.Install()
	if err != nil {
		t.Fatal(err)
	}
	return changed
}

func TestInstallWritesExecutable(t *testing.T) {
	h, _, target := host(t)
	if !install(t, h) {
		t.Error("the first installation changed nothing")
	}
	if err := h.Check(); err != nil {
		t.Error(err)
	}
	info, err := os.Stat(target)
	if err != nil || info.Mode().Perm() != 0o755 {
		t.Error(info, err)
	}
	entries, _ := os.ReadDir(filepath.Dir(target))
	if len(entries) != 1 {
		t.Error("leftover files:", entries)
	}
}

func TestInstallWritesOnlyChangedBinary(t *testing.T) {
	h, source, target := host(t)
	install(t, h)
	first, _ := os.Stat(target)
	if install(t, h) {
		t.Error("an equal file was installed again")
	}
	if second, _ := os.Stat(target); !os.SameFile(first, second) {
		t.Error("the file was replaced")
	}
	write(t, source, "version 2")
	running, err := os.Open(target) // like a runtime that executes the hook now
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = running.Close() }()
	if !install(t, h) {
		t.Error("a changed binary was not installed")
	}
	old := make([]byte, 20)
	if n, _ := running.Read(old); string(old[:n]) != "version 1" {
		t.Errorf("the running program reads %q", old[:n])
	}
	if data, _ := os.ReadFile(target); string(data) != "version 2" {
		t.Errorf("installed: %q", data)
	}
}

func TestInstallReadsOnlyChangedFiles(t *testing.T) {
	h, source, target := host(t)
	install(t, h)
	install(t, h)
	known := h.identical
	if known[0] == (durable.Stamp{}) || known[1] == (durable.Stamp{}) {
		t.Fatal("the files' equality was not remembered")
	}
	if install(t, h) || h.identical != known {
		t.Error("checking changed a file")
	}
	for name, touch := range map[string]func(){
		"other bytes of the same size and time": func() {
			info, err := os.Stat(target)
			if err == nil {
				err = errors.Join(os.WriteFile(target, []byte("version 9"), 0o600), os.Chtimes(target, info.ModTime(), info.ModTime()))
			}
			if err != nil {
				t.Fatal(err)
			}
		},
		"removed":                     func() { _ = os.Remove(target) },
		"another binary in the image": func() { write(t, source, "version 3") },
	} {
		touch()
		if !install(t, h) || install(t, h) {
			t.Errorf("%s: it was not installed exactly once more", name)
		}
		want, _ := os.ReadFile(source)
		if have, _ := os.ReadFile(target); string(have) != string(want) {
			t.Errorf("%s: %q", name, have)
		}
	}
}

func TestInstallRestoresExecutePermission(t *testing.T) {
	h, _, target := host(t)
	install(t, h)
	if err := os.Chmod(target, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := h.Check(); err == nil || !strings.Contains(err.Error(), "not executable") {
		t.Error(err)
	}
	install(t, h)
	if err := h.Check(); err != nil {
		t.Error(err)
	}
}

func TestInstallErrorNamesPath(t *testing.T) {
	h, source, target := host(t)
	write(t, filepath.Dir(target), "a file in place of the directory")
	if _, err := h.Install(); err == nil || !strings.Contains(err.Error(), "directory on the host") {
		t.Error(err)
	}
	if err := os.Remove(filepath.Dir(target)); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(target, "x"), "the hook's path is a directory")
	if _, err := h.Install(); err == nil || !strings.Contains(err.Error(), target) {
		t.Error(err)
	}
	if err := h.Check(); err == nil || !strings.Contains(err.Error(), "is not a file") {
		t.Error(err)
	}
	if err := os.Remove(source); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Install(); err == nil || !strings.Contains(err.Error(), "read the hook binary") {
		t.Error(err)
	}
}

// The node view compares errors by their text: one that lasts must not look like a new one.
func TestInstallErrorIsTheSameEachTime(t *testing.T) {
	dir := t.TempDir()
	target := filepath.Join(dir, "hook")
	if err := os.MkdirAll(filepath.Join(target, "in the way"), 0o755); err != nil {
		t.Fatal(err)
	}
	h := New("/bin/true", target)
	_, first := h.Install()
	_, second := h.Install()
	if first == nil || second == nil || first.Error() != second.Error() || !strings.Contains(first.Error(), target) {
		t.Errorf("%v\n%v", first, second)
	}
}

func TestCheckNamesMissingHook(t *testing.T) {
	h, _, target := host(t)
	if err := h.Check(); err == nil || !strings.Contains(err.Error(), target+" is not on the host") {
		t.Error(err)
	}
}

func TestCheckRejectsNoexecFileSystem(t *testing.T) {
	dir := t.TempDir()
	switch err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOEXEC, "size=64k,mode=755"); {
	case errors.Is(err, unix.EPERM):
		t.Skip("needs permission to mount")
	case err != nil:
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	_, source, _ := host(t)
	h := New(source, filepath.Join(dir, "nvidia-cdi-hook"))
	install(t, h)
	if err := h.Check(); err == nil || !strings.Contains(err.Error(), "noexec") {
		t.Error(err)
	}
}

func TestInstallRemovesOldUnfinishedCopies(t *testing.T) {
	h, _, target := host(t)
	old, young := filepath.Join(filepath.Dir(target), ".nvidia-cdi-hook.tmp-1"), filepath.Join(filepath.Dir(target), ".nvidia-cdi-hook.tmp-2")
	write(t, old, "half a ho")
	write(t, young, "half")
	hourAgo := time.Now().Add(-time.Hour)
	if err := os.Chtimes(old, hourAgo, hourAgo); err != nil {
		t.Fatal(err)
	}
	install(t, h)
	if _, err := os.Stat(old); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the old copy still exists: %v", err)
	}
	if _, err := os.Stat(young); err != nil {
		t.Errorf("the young copy, which another instance may be writing, is gone: %v", err)
	}
}

// The runtime runs the hook as root. The test expects that Check refuses a file that another user
// can change, and that Install replaces or refuses it.
func TestInstallReplacesOrRefusesUntrustedHook(t *testing.T) {
	for name, plant := range map[string]func(target, elsewhere string) error{
		"a world-writable file": func(target, _ string) error { return os.Chmod(target, 0o777) },
		"a symlink to an equal file": func(target, elsewhere string) error {
			return errors.Join(os.Rename(target, elsewhere), os.Symlink(elsewhere, target))
		},
		"a pipe": func(target, _ string) error { return errors.Join(os.Remove(target), unix.Mkfifo(target, 0o755)) },
	} {
		t.Run(name, func(t *testing.T) {
			h, _, target := host(t)
			install(t, h)
			if err := plant(target, filepath.Join(t.TempDir(), "elsewhere")); err != nil {
				t.Fatal(err)
			}
			if err := h.Check(); err == nil {
				t.Error("Check accepted it")
			}
			if !install(t, h) {
				t.Error("it was not replaced")
			}
			if info, err := os.Lstat(target); err != nil || !info.Mode().IsRegular() || info.Mode().Perm() != 0o755 {
				t.Error(info, err)
			}
			if err := h.Check(); err != nil {
				t.Error(err)
			}
		})
	}
	for name, above := range map[string]string{"a world-writable directory": ".", "a world-writable directory above": ".."} {
		t.Run(name, func(t *testing.T) {
			h, _, target := host(t)
			install(t, h)
			if err := os.Chmod(filepath.Join(filepath.Dir(target), above), 0o777); err != nil {
				t.Fatal(err)
			}
			for what, err := range map[string]error{"installed": func() error { _, err := h.Install(); return err }(), "checked": h.Check()} {
				if err == nil || !strings.Contains(err.Error(), "others may write") {
					t.Errorf("%s: %v", what, err)
				}
			}
		})
	}
}
