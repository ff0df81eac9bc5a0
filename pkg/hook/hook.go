// Package hook keeps a hook program on the host: nvidia-cdi-hook, or gpu-mps for clients of MPS.
// The container runtime runs the program on the host when it creates a container with a GPU, so the
// plugin must copy it there from its image.
//
// [Choose] finds a directory of the host in which every user can run the program, and [DirName]
// names a directory in it by the programs' contents. So plugin instances of two versions each have
// their own file, and a running container's CDI spec names the file with which it was made.
//
// [Hook.Install] replaces the file only if its bytes differ, and atomically, because a container
// may be starting. [Hook.Check] returns what would keep the host from running the program. The CDI
// edits name the hooks to run.
package hook

import (
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// stale is the age at which an unfinished copy counts as left by a killed plugin instance.
const stale = time.Minute

// Hook is a hook program: a file in the plugin's image and its copy on the host. It is not safe for
// concurrent use.
type Hook struct {
	source, target string
	// temporary is the path of an unfinished copy. It is random because several plugin instances may
	// install at once, and stays the same so that an error that lasts has the same text each time.
	temporary string
	// identical are the stamps that source and target had when their bytes were equal. While the
	// stamps stay equal, Install does not read the large files again.
	identical [2]durable.Stamp
}

// New returns a Hook. source is the path in the image. target is the path on the host, at which the
// plugin sees the file too.
func New(source, target string) *Hook {
	return &Hook{source: source, target: target, temporary: copyPrefix(target) + rand.Text()}
}

// Install copies the program to its target. changed is false if the target was already equal and
// executable.
func (h *Hook) Install() (changed bool, err error) {
	now := [2]durable.Stamp{durable.StampOf(h.source), durable.StampOf(h.target)}
	if now == h.identical && now[0] != (durable.Stamp{}) && now[1] != (durable.Stamp{}) {
		return false, nil
	}
	changed, err = h.install()
	h.identical = [2]durable.Stamp{}
	if err == nil && !changed {
		h.identical = now // taken before reading, so later changes give other stamps
	}
	return changed, err
}

func (h *Hook) install() (changed bool, err error) {
	source, target := h.source, h.target
	want, err := digestOf(source)
	if err != nil {
		return false, fmt.Errorf("read the hook binary: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return false, fmt.Errorf("create the hook's directory on the host: %w", err)
	}
	if err := checkDirs(target); err != nil {
		return false, fmt.Errorf("use the hook's directory on the host: %w", err)
	}
	if durable.CheckFile(target) == nil {
		if have, err := digestOf(target); err == nil && have == want && executable(target) {
			return false, nil
		}
	}
	for _, path := range h.unfinished() {
		if info, err := os.Stat(path); err == nil && time.Since(info.ModTime()) > stale {
			_ = os.Remove(path) // the next installation retries
		}
	}
	if err := h.replace(); err != nil {
		return false, fmt.Errorf("install the hook on the host as %s: %w", target, err)
	}
	return true, nil
}

// executable sets the file's mode to 0755 if needed, and reports whether the file now has this
// mode.
func executable(path string) bool {
	const mode = 0o755
	info, err := os.Stat(path)
	return err == nil && (info.Mode().Perm() == mode || os.Chmod(path, mode) == nil)
}

// checkDirs returns an error if another user can change the hook's directory, or the one above. The
// container runtime runs the hook as root.
func checkDirs(target string) error {
	dir := filepath.Dir(target)
	return errors.Join(durable.CheckDir(filepath.Dir(dir)), durable.CheckDir(dir))
}

// Check returns an error if the host cannot run the hook: the file is missing, is not executable,
// or is on a file system mounted noexec. It also returns an error if another user than root can
// change the file.
func (h *Hook) Check() error {
	target := h.target
	info, err := os.Stat(target)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("hook %s is not on the host: "+
			"check that its directory is mounted into the plugin's container under the same path", target)
	case err != nil:
		return fmt.Errorf("stat the hook on the host: %w", err)
	case !info.Mode().IsRegular():
		return fmt.Errorf("hook %s is not a file: remove it", target)
	case info.Mode().Perm()&0o111 == 0:
		return fmt.Errorf("hook %s is not executable: remove it, the plugin installs it when it starts", target)
	}
	if err := errors.Join(checkDirs(target), durable.CheckFile(target)); err != nil {
		return fmt.Errorf("the hook on the host: %w", err)
	}
	var mount unix.Statfs_t
	if err := unix.Statfs(target, &mount); err != nil {
		return fmt.Errorf("stat the hook's file system: %w", err)
	}
	if mount.Flags&unix.ST_NOEXEC != 0 {
		return fmt.Errorf("hook %s is on a file system mounted noexec, so the container runtime cannot run it: "+
			"set the hook path to a directory that allows execution", target)
	}
	return nil
}

// unfinished lists the unfinished copies: those that a plugin instance is writing or that a killed
// one left.
func (h *Hook) unfinished() []string {
	paths, _ := filepath.Glob(copyPrefix(h.target) + "*") // The only error is an invalid pattern.
	return paths
}

// copyPrefix returns the beginning of the paths of unfinished copies of the hook at target.
func copyPrefix(target string) string {
	return filepath.Join(filepath.Dir(target), "."+filepath.Base(target)+".tmp-")
}

func digestOf(path string) (sum [sha256.Size]byte, err error) {
	f, err := durable.OpenRegular(path)
	if err != nil {
		return sum, err
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	_, err = io.Copy(h, f)
	return [sha256.Size]byte(h.Sum(nil)), err
}

// replace copies the source next to the target and renames the copy to target. So a half-written
// program never runs, and a running one is not disturbed. It syncs the copy first, so that a power
// cut does not leave an empty file.
func (h *Hook) replace() error {
	from, err := durable.OpenRegular(h.source)
	if err != nil {
		return err
	}
	defer func() { _ = from.Close() }()
	to, err := os.OpenFile(h.temporary, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o700)
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from)
	err = errors.Join(err, to.Chmod(0o755), to.Sync(), to.Close())
	if err == nil {
		err = os.Rename(h.temporary, h.target)
	}
	if err != nil {
		_ = os.Remove(h.temporary)
	}
	return err
}
