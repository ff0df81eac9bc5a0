package hook

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"
)

const (
	// dirPrefix begins the names of the directories that [Choose] makes.
	dirPrefix = "hooks-"
	// unprivileged is a user and a group without rights on any host. A Pod with a user namespace runs
	// hooks as such a user.
	unprivileged = 65534
	// runTimeout limits how long the hook may take to print its version.
	runTimeout = 10 * time.Second
)

// DirName returns the name of the directory for programs with these contents. So plugin instances
// with other programs never write to the same file, and each CDI spec names the program with which
// it was made.
func DirName(programs ...string) (string, error) {
	all := sha256.New()
	for _, path := range programs {
		sum, err := digestOf(path)
		if err != nil {
			return "", fmt.Errorf("read the hook binary: %w", err)
		}
		_, _ = all.Write(sum[:]) // never fails
	}
	return fmt.Sprintf("%s%x", dirPrefix, all.Sum(nil)[:6]), nil
}

// Choose installs the program source at the first of targets where every user of the host can run
// it, and returns that path. hostRoot is where this process sees the host's root. passedOver says
// why Choose took no earlier target.
//
// Without such a target Choose returns forRootOnly and the last one that root can run, or the last
// one at all.
func Choose(ctx context.Context, hostRoot, source string, targets []string) (target string, forRootOnly bool, passedOver error) {
	var errs []error
	target = targets[len(targets)-1]
	for _, candidate := range targets {
		h := New(source, candidate)
		_, err := h.Install()
		if err == nil {
			err = h.Check()
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if err = runUnprivileged(ctx, hostRoot, candidate); err == nil {
			return candidate, false, errors.Join(errs...)
		}
		errs = append(errs, err)
		target = candidate
	}
	return target, true, errors.Join(errs...)
}

// runUnprivileged starts the program as the host would for a Pod with a user namespace. It returns
// an error if that fails: below a directory that others may not enter, on a file system mounted
// noexec, or because the host does not have this file.
func runUnprivileged(ctx context.Context, hostRoot, path string) error {
	ctx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.Env, cmd.Dir = []string{}, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: hostRoot, Credential: &syscall.Credential{Uid: unprivileged, Gid: unprivileged}}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("run the hook on the host as another user than root: %w", err)
	}
	_ = cmd.Wait() // that it started is enough
	return nil
}

// RemoveUnused removes what [Choose] has installed below bases, except the directory of the hook
// current and the directories that named reports. A CDI spec of a running container may name the
// hook of an earlier plugin version, which runs again when the container restarts.
func RemoveUnused(bases []string, current string, named func(dir string) bool) error {
	var errs []error
	for _, dir := range installed(bases) {
		if dir != filepath.Dir(current) && !named(dir) {
			errs = append(errs, os.RemoveAll(dir))
		}
	}
	return errors.Join(errs...)
}

// RemoveAll removes what [Choose] has installed below bases, on a host with its root at hostRoot.
// It also removes those bases that are in own, which the driver alone uses.
func RemoveAll(hostRoot string, bases, own []string) error {
	errs := []error{RemoveUnused(bases, "", func(string) bool { return false })}
	for _, base := range bases {
		if !slices.Contains(own, base) {
			continue
		}
		// This process sees base as a mount point, which it could not remove.
		if err := os.Remove(filepath.Join(hostRoot, base)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove the hooks from the host: %w", err)
	}
	return nil
}

func installed(bases []string) (dirs []string) {
	for _, base := range bases {
		found, _ := filepath.Glob(filepath.Join(base, dirPrefix+"*")) // The only error is an invalid pattern.
		dirs = append(dirs, found...)
	}
	return dirs
}
