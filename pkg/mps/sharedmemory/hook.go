// Package sharedmemory gives a container the shared memory of its MPS daemon: it is the OCI hook behind `gpu-mps shm-hook`.
//
// A client and its server exchange data through /dev/shm, so both must have the same one. [Hook] runs as a createContainer hook: in the mount namespace of
// the container, when all of its mounts are there and the host's files can still be seen. It binds the daemon's directory over the container's /dev/shm if
// that is the one which the container runtime puts there by itself. A volume that the Pod has mounted there stays, and so does the host's own of a Pod with
// hostIPC: whoever asks for one gets it, and such a container cannot use MPS. A container that was given to two daemons does not start.
//
// Nothing in the container's file system is trusted: paths are resolved below its root, so that a link in an image leads nowhere else.
package sharedmemory

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/below"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/container"
)

const (
	place = "/dev/shm"
	// flags are those of the runtime's own /dev/shm.
	flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
)

// Hook reads the container's state as the OCI runtime gives it to hooks, and binds source over the container's /dev/shm. changed is false if the Pod has
// something of its own there.
func Hook(state io.Reader, source string) (changed bool, err error) {
	c, err := container.Read(state)
	if err != nil {
		return false, err
	}
	if sources := daemons(c.Config); len(sources) > 1 {
		return false, fmt.Errorf("container %.100q would be a client of %d MPS daemons (their shared memory: %s), and a CUDA process knows one: give it claims, or requests of a claim, with one MPS configuration or one fraction among them",
			c.State.ID, len(sources), strings.Join(sources, ", "))
	}
	if !runtimesOwn(c.Config.Mounts) {
		return false, nil
	}
	if err := bind(source, c.Root()); err != nil {
		return false, fmt.Errorf("container %.100q: give it the shared memory of its MPS daemon: %w", c.State.ID, err)
	}
	return true, nil
}

// daemons are the sources of all hooks like this one that the container has: of two daemons' pipes, which are at one place, it would see one.
func daemons(config specs.Spec) []string {
	var sources []string
	if config.Hooks == nil {
		return nil
	}
	for _, h := range config.Hooks.CreateContainer {
		if len(h.Args) < 2 || h.Args[0] != mps.HookProgram || h.Args[1] != mps.HookCommand {
			continue
		}
		for _, arg := range h.Args[2:] {
			if source, ok := strings.CutPrefix(arg, mps.HookSource); ok && !slices.Contains(sources, source) {
				sources = append(sources, source)
			}
		}
	}
	return sources
}

// sandboxShm is what runtimes bind to /dev/shm of a Pod's containers: the sandbox's own, in a directory that is named by the sandbox's ID.
//
//	containerd  …/sandboxes/<ID>/shm
//	CRI-O       …/overlay-containers/<ID>/userdata/shm
//	Docker      …/containers/<ID>/mounts/shm
var sandboxShm = regexp.MustCompile(`/[0-9a-f]{64}/((userdata|mounts)/)?shm$`)

// runtimesOwn says whether the container has the /dev/shm that the runtime gives to any container, or none.
func runtimesOwn(mounts []specs.Mount) bool {
	own := true
	for _, m := range mounts { // of several at one place the last is seen
		if filepath.Clean("/"+m.Destination) == place {
			own = m.Type == "tmpfs" || sandboxShm.MatchString(filepath.Clean(m.Source))
		}
	}
	return own
}

func bind(source, root string) error {
	from, err := unix.Open(source, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("its directory %s (was the daemon stopped while the container was created?): %w", source, err)
	}
	defer func() { _ = unix.Close(from) }()
	top, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("the container's root %s: %w", root, err)
	}
	defer func() { _ = unix.Close(top) }()

	target, err := openShm(top)
	if err != nil {
		return err
	}
	err = unix.Mount(descriptor(from), descriptor(target), "", unix.MS_BIND, "")
	_ = unix.Close(target)
	if err != nil {
		return fmt.Errorf("bind %s to /dev/shm: %w", source, err)
	}
	// A bind mount takes its flags in a second step, by a descriptor of the mount, not of what is under it.
	mounted, err := openShm(top)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(mounted) }()
	if err := unix.Mount("", descriptor(mounted), "", unix.MS_BIND|unix.MS_REMOUNT|flags, ""); err != nil {
		return fmt.Errorf("make /dev/shm nosuid, nodev and noexec: %w", err)
	}
	return nil
}

// openShm opens the container's /dev/shm, which it makes if there is none.
func openShm(root int) (int, error) {
	fd, err := openBelow(root, "dev/shm")
	if errors.Is(err, unix.ENOENT) {
		dev, devErr := openBelow(root, "dev")
		if devErr != nil {
			return -1, fmt.Errorf("open the container's /dev: %w", devErr)
		}
		defer func() { _ = unix.Close(dev) }()
		if err := unix.Mkdirat(dev, "shm", 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
			return -1, fmt.Errorf("make the container's /dev/shm: %w", err)
		}
		fd, err = openBelow(root, "dev/shm")
	}
	if err != nil {
		return -1, fmt.Errorf("open the container's /dev/shm: %w", err)
	}
	return fd, nil
}

// openBelow resolves every link as the container would.
func openBelow(root int, path string) (int, error) {
	return below.Open(root, path, unix.O_DIRECTORY)
}

// descriptor names what is open, whatever its path means by now.
func descriptor(fd int) string { return fmt.Sprintf("/proc/self/fd/%d", fd) }
