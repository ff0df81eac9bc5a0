package machine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/cgroup"
)

// ownTops are top-level folders that a machine has of its own. It never sees the host's folders of
// these names.
var ownTops = map[string]bool{"dev": true, "proc": true, "sys": true, "run": true, "var": true, "lost+found": true, "boot": true}

// mountRoot builds the machine's root file system and makes it the root of this process. The
// process must be PID 1 of a new PID namespace, in a new mount namespace.
//
// mountRoot overlays each of the host's top-level folders with a private layer on the machine's
// disk. A single overlay of the whole root would contain its own upper layer.
func mountRoot(spec *Spec) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("keep the machine's mounts from the host: %w", err)
	}
	root := filepath.Join(spec.Dir, mountsDir)
	if err := mount("tmpfs", root, "tmpfs", unix.MS_NOATIME, "mode=755"); err != nil {
		return err
	}
	if err := overlayHost(spec, root); err != nil {
		return err
	}
	if err := mountVar(spec, root); err != nil {
		return err
	}
	for _, mount := range spec.Mounts {
		if err := bind(mount, root); err != nil {
			return err
		}
	}
	for _, step := range []func(string) error{mountKernel, mountDev, mountCgroups} {
		if err := step(root); err != nil {
			return err
		}
	}
	if err := pivot(root); err != nil {
		return err
	}
	// Mounts must propagate between a container and its node, because container runtimes and device
	// drivers rely on that.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("make the machine's mounts propagate: %w", err)
	}
	return hideHostValues()
}

func overlayHost(spec *Spec, root string) error {
	tops, err := os.ReadDir("/")
	if err != nil {
		return err
	}
	for _, top := range tops {
		name := top.Name()
		target := filepath.Join(root, name)
		switch {
		case ownTops[name]:
			continue
		case top.Type()&fs.ModeSymlink != 0:
			link, err := os.Readlink("/" + name)
			if err != nil {
				return err
			}
			if err := os.Symlink(link, target); err != nil {
				return err
			}
		case top.IsDir():
			if err := overlay(spec, name, target); err != nil {
				return err
			}
		}
	}
	return nil
}

func overlay(spec *Spec, name, target string) error {
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	if strings.HasPrefix(spec.Dir+"/", "/"+name+"/") {
		// This top-level folder contains the machine's own disk. An overlay would have its upper layer
		// inside its lower layer, so the folder is read-only in the machine.
		return readOnlyBind("/"+name, target)
	}
	upper, work := spec.Layer(name), filepath.Join(spec.Dir, layersDir, name, "work")
	for _, dir := range []string{upper, work} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("create the private layer of /%s: %w", name, err)
		}
	}
	info, err := os.Stat("/" + name)
	if err != nil {
		return err
	}
	if err := os.Chmod(upper, info.Mode().Perm()|info.Mode()&fs.ModeSticky); err != nil {
		return err
	}
	err = mount("overlay", target, "overlay", 0, fmt.Sprintf("lowerdir=/%s,upperdir=%s,workdir=%s", name, upper, work))
	switch {
	case err == nil:
		return nil
	case neededTops[name]:
		return fmt.Errorf("%w (the file system of %s must be one that can hold an overlay's upper layer, such as ext4 or xfs)", err, spec.Dir)
	default:
		// Some file systems cannot be the lower layer of an overlay, a network share or a FUSE mount for
		// example. The machine sees such a folder read-only.
		return readOnlyBind("/"+name, target)
	}
}

// neededTops are the folders that a machine must be able to write to. If one of them cannot be an
// overlay, the machine does not boot.
var neededTops = map[string]bool{"etc": true, "usr": true, "opt": true, "tmp": true}

// mountVar gives the machine its own /var, on its disk, and its own /run, in memory.
func mountVar(spec *Spec, root string) error {
	for _, dir := range []string{"lib/kubelet", "log", "cache", "tmp", "opt"} {
		if err := os.MkdirAll(filepath.Join(spec.Var(), dir), 0o755); err != nil {
			return fmt.Errorf("create the machine's disk: %w", err)
		}
	}
	if err := os.Chmod(filepath.Join(spec.Var(), "tmp"), 0o777|fs.ModeSticky); err != nil {
		return err
	}
	for link, target := range map[string]string{"run": "/run", "lock": "/run/lock"} {
		if err := os.Symlink(target, filepath.Join(spec.Var(), link)); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	if err := bind(Mount{Source: spec.Var(), Target: "/var", Writable: true}, root); err != nil {
		return err
	}
	if err := mount("tmpfs", filepath.Join(root, "run"), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"); err != nil {
		return err
	}
	return os.Mkdir(filepath.Join(root, "run/lock"), 0o777)
}

func mountKernel(root string) error {
	if err := mount("proc", filepath.Join(root, "proc"), "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	return mount("sysfs", filepath.Join(root, "sys"), "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
}

// devices are the device nodes that every machine's /dev has. The node's boot hook creates those of
// the simulated GPUs.
var devices = []struct {
	name         string
	major, minor uint32
	mode         uint32
}{
	{"null", 1, 3, 0o666}, {"zero", 1, 5, 0o666}, {"full", 1, 7, 0o666}, {"random", 1, 8, 0o666}, {"urandom", 1, 9, 0o666},
	{"tty", 5, 0, 0o666}, {"kmsg", 1, 11, 0o600}, {"fuse", 10, 229, 0o666}, {"net/tun", 10, 200, 0o666},
}

func mountDev(root string) error {
	dev := filepath.Join(root, "dev")
	if err := mount("dev", dev, "tmpfs", unix.MS_NOSUID, "mode=755"); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(dev, "net"), 0o755); err != nil {
		return err
	}
	for _, device := range devices {
		path := filepath.Join(dev, device.name)
		if err := unix.Mknod(path, unix.S_IFCHR|device.mode, int(unix.Mkdev(device.major, device.minor))); err != nil {
			return fmt.Errorf("create device /dev/%s: %w", device.name, err)
		}
		if err := os.Chmod(path, fs.FileMode(device.mode)); err != nil {
			return err
		}
	}
	for _, fileSystem := range []struct{ folder, kind, options string }{
		{"pts", "devpts", "newinstance,ptmxmode=0666,mode=620"}, {"shm", "tmpfs", "mode=1777"}, {"mqueue", "mqueue", ""},
	} {
		if err := mount(fileSystem.kind, filepath.Join(dev, fileSystem.folder), fileSystem.kind, unix.MS_NOSUID|unix.MS_NOEXEC,
			fileSystem.options); err != nil {
			return err
		}
	}
	for link, target := range map[string]string{
		"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, filepath.Join(dev, link)); err != nil {
			return err
		}
	}
	return nil
}

// mountCgroups mounts the cgroup hierarchies anew. PID 1 is in the machine's cgroup namespace, so
// the root of each new mount is the machine's own cgroup.
func mountCgroups(root string) error {
	target := filepath.Join(root, cgroup.Root)
	if cgroup.Unified() {
		return mount("cgroup2", target, "cgroup2", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	}
	hierarchies, err := cgroup.Hierarchies()
	if err != nil {
		return err
	}
	if err := mount("tmpfs", target, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=755"); err != nil {
		return err
	}
	for _, hierarchy := range hierarchies {
		options := hierarchy.Controllers
		if strings.HasPrefix(options, "name=") {
			options = "none," + options
		}
		if err := mount("cgroup", filepath.Join(target, hierarchy.Folder()), "cgroup", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC,
			options); err != nil {
			return err
		}
	}
	return nil
}

func pivot(root string) error {
	old := filepath.Join(root, ".host")
	if err := os.Mkdir(old, 0o700); err != nil {
		return err
	}
	if err := unix.PivotRoot(root, old); err != nil {
		return fmt.Errorf("make %s the machine's root: %w", root, err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	if err := unix.Unmount("/.host", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the host's root: %w", err)
	}
	return os.Remove("/.host")
}

func mount(source, target, kind string, flags uintptr, options string) error {
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(source, target, kind, flags, options); err != nil {
		return fmt.Errorf("mount %s at %s (%s): %w", kind, target, options, err)
	}
	return nil
}

// bind mounts a folder or file of the host into the machine's root file system.
func bind(mount Mount, root string) error {
	target := filepath.Join(root, mount.Target)
	info, err := os.Stat(mount.Source)
	if err != nil {
		return fmt.Errorf("mount into the machine: %w", err)
	}
	if info.IsDir() {
		err = os.MkdirAll(target, 0o755)
	} else if err = os.MkdirAll(filepath.Dir(target), 0o755); err == nil {
		err = touch(target)
	}
	if err != nil {
		return fmt.Errorf("create the mount point %s in the machine: %w", mount.Target, err)
	}
	if !mount.Writable {
		return readOnlyBind(mount.Source, target)
	}
	if err := unix.Mount(mount.Source, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount %s at %s: %w", mount.Source, mount.Target, err)
	}
	return nil
}

func readOnlyBind(source, target string) error {
	if err := unix.Mount(source, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount %s at %s: %w", source, target, err)
	}
	if err := unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("make %s read-only: %w", target, err)
	}
	return nil
}

func touch(path string) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o644)
	if err != nil {
		return err
	}
	return file.Close()
}
