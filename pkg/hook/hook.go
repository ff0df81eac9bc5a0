// Package hook keeps a hook on the host: nvidia-cdi-hook, and gpu-mps for clients of MPS. The container runtime runs it when a container with a GPU is
// created, in the host's view of the file system, so the binary in the plugin's image is of no use to it: it has to be put where the host can run it.
//
// [Hook.Install] replaces the file atomically, because a container may be starting this moment, and only if its bytes differ. [Hook.Check] says
// what would keep the host from running it. The package does not decide which hooks there are: they come with the CDI edits.
package hook

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// stale is the age from which a copy is no longer being written by another instance of the plugin.
const stale = time.Minute

// Hook is the binary in the plugin's image and its place on the host. It is for one goroutine.
type Hook struct {
	source, target string
	// alike are what both files were when they were last found to have the same bytes: they are many, and are not read again and again.
	alike [2]durable.Stamp
}

// New names the binary at source and the place for it, a path that the plugin and the host share.
func New(source, target string) *Hook { return &Hook{source: source, target: target} }

// Install puts the binary to its place. changed says whether it had to.
func (h *Hook) Install() (changed bool, err error) {
	now := [2]durable.Stamp{durable.StampOf(h.source), durable.StampOf(h.target)}
	if now == h.alike && now[0] != (durable.Stamp{}) && now[1] != (durable.Stamp{}) {
		return false, nil
	}
	changed, err = h.install()
	h.alike = [2]durable.Stamp{}
	if err == nil && !changed {
		h.alike = now // from before they were read: what is done to them since makes them others
	}
	return changed, err
}

func (h *Hook) install() (changed bool, err error) {
	source, target := h.source, h.target
	want, err := digest(source)
	if err != nil {
		return false, fmt.Errorf("read the hook binary: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return false, fmt.Errorf("make the hook's directory on the host: %w", err)
	}
	// The container runtime runs it as root: nobody else may be able to replace it, nor to change it later.
	if err := durable.CheckDir(filepath.Dir(target)); err != nil {
		return false, fmt.Errorf("use the hook's directory on the host: %w", err)
	}
	if durable.CheckFile(target) == nil {
		if have, err := digest(target); err == nil && bytes.Equal(have, want) && executable(target) {
			return false, nil
		}
	}
	for _, path := range h.unfinished() {
		if info, err := os.Stat(path); err == nil && time.Since(info.ModTime()) > stale {
			_ = os.Remove(path) // The next installation tries again.
		}
	}
	if err := replace(source, target); err != nil {
		return false, fmt.Errorf("install the hook on the host as %s: %w", target, err)
	}
	return true, nil
}

// executable leaves a file as it is that everybody can run already.
func executable(path string) bool {
	const mode = 0o755
	info, err := os.Stat(path)
	return err == nil && (info.Mode().Perm() == mode || os.Chmod(path, mode) == nil)
}

// Check makes sure that the host can run the hook: it is there, a file, executable, and on a file system that allows execution.
func (h *Hook) Check() error {
	target := h.target
	info, err := os.Stat(target)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("hook %s is not on the host: check that its directory is mounted into the plugin's container under the same path", target)
	case err != nil:
		return fmt.Errorf("look at the hook on the host: %w", err)
	case !info.Mode().IsRegular():
		return fmt.Errorf("hook %s is not a file: remove it", target)
	case info.Mode().Perm()&0o111 == 0:
		return fmt.Errorf("hook %s is not executable: remove it, the plugin installs it when it starts", target)
	}
	if err := errors.Join(durable.CheckDir(filepath.Dir(target)), durable.CheckFile(target)); err != nil {
		return fmt.Errorf("the hook on the host: %w", err)
	}
	var mount unix.Statfs_t
	if err := unix.Statfs(target, &mount); err != nil {
		return fmt.Errorf("look at the hook's file system: %w", err)
	}
	if mount.Flags&unix.ST_NOEXEC != 0 {
		return fmt.Errorf("hook %s is on a file system mounted noexec, the container runtime cannot run it: set the hook path to a directory that allows execution", target)
	}
	return nil
}

// Remove takes the hook from the host, and what killed installations have left of it. One that is not there is no error. No other instance of the plugin may
// be installing it.
func (h *Hook) Remove() error {
	for _, path := range append(h.unfinished(), h.target) {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the hook from the host: %w", err)
		}
	}
	return nil
}

// unfinished are copies that are being written, or that a killed plugin left.
func (h *Hook) unfinished() []string {
	dir, name := filepath.Split(h.target)
	entries, err := os.ReadDir(filepath.Clean(dir))
	if err != nil {
		return nil // There is nothing to remove, or the installation says why it fails.
	}
	var paths []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), copyPrefix(name)) {
			paths = append(paths, dir+e.Name())
		}
	}
	return paths
}

// copyPrefix begins the names of copies that do not have their name yet.
func copyPrefix(name string) string { return "." + name + ".tmp-" }

func digest(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return nil, err
	}
	return h.Sum(nil), nil
}

// replace writes a copy beside the target and renames it: a half-written program is never run, and one that is running is not disturbed.
// The copy is synced before, so that a power cut does not leave an empty file under the good name.
func replace(source, target string) error {
	from, err := os.Open(source)
	if err != nil {
		return err
	}
	defer func() { _ = from.Close() }()
	to, err := os.CreateTemp(filepath.Dir(target), copyPrefix(filepath.Base(target))+"*")
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from)
	err = errors.Join(err, to.Chmod(0o755), to.Sync(), to.Close())
	if err == nil {
		err = os.Rename(to.Name(), target)
	}
	if err != nil {
		_ = os.Remove(to.Name())
	}
	return err
}
