package main

import (
	"context"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// stageInNamespace is the first argument with which hwcheck starts itself as the first process of a
// mount namespace: hwcheck in-namespace FILE.
const stageInNamespace = "in-namespace"

// chrooted says what to mount in the chroot and which program to run there. It is the content of
// the FILE that stageInNamespace takes.
type chrooted struct {
	Rootfs string   `json:"rootfs"`
	Binds  []bind   `json:"binds"`
	Env    []string `json:"env"`
	Argv   []string `json:"argv"`
}

// bind mounts From, a file, a folder or a device node of the machine, at To in the chroot.
type bind struct {
	From string `json:"from"`
	To   string `json:"to"`
}

// exitNotEntered is the exit code of a process that could not start the program in the namespace.
const exitNotEntered = 125

// inNamespace runs a program in a chroot, for machines where runc is not allowed. It needs only a
// mount namespace, and for ordinary users also a user namespace. The error means that these were
// refused.
func (c *containers) inNamespace(ctx context.Context, p guest, devices, args []string) (outcome, error) {
	bundle, rootfs, err := c.folder(p)
	if err != nil {
		return outcome{}, err
	}
	edits := c.specs.edits(devices)
	todo := chrooted{
		Rootfs: rootfs, Env: append([]string{"PATH=/usr/bin:/bin", "LC_ALL=C"}, edits.Env...),
		Argv: append([]string{p.inside}, args...),
	}
	todo.Binds = append(todo.Binds, bind{"/proc", "/proc"})
	for _, n := range edits.DeviceNodes {
		todo.Binds = append(todo.Binds, bind{hostPath(n), n.Path})
	}
	var libraries []string
	for _, m := range edits.Mounts {
		todo.Binds = append(todo.Binds, bind{m.HostPath, m.ContainerPath})
		// Create the links that the spec's hooks would create in a container.
		if folder, ok, err := linkSoname(rootfs, m.HostPath, m.ContainerPath); err != nil {
			return outcome{}, err
		} else if ok && !slices.Contains(libraries, folder) {
			libraries = append(libraries, folder)
		}
	}
	todo.Env = append(todo.Env, "LD_LIBRARY_PATH="+strings.Join(libraries, ":"))
	data, err := json.Marshal(todo)
	if err != nil {
		return outcome{}, err
	}
	file := filepath.Join(bundle, "chroot.json")
	if err := os.WriteFile(file, data, 0o600); err != nil {
		return outcome{}, err
	}
	result := start(ctx, command{argv: []string{c.programs.self, stageInNamespace, file}, prep: func(cmd *exec.Cmd) {
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
		if os.Geteuid() != 0 {
			cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
			cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
			cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
		}
	}})
	if notEntered(result) {
		return outcome{}, fmt.Errorf("no mount namespace: %s", result.summary())
	}
	return result, nil
}

// notEntered reports whether the program could not be started in the namespace. All other errors
// are outcomes of the program: that it failed, did not end in time, or left a process that holds
// its output.
func notEntered(o outcome) bool {
	var exit *exec.ExitError
	return o.err != nil && (!o.started || errors.As(o.err, &exit) && exit.ExitCode() == exitNotEntered)
}

// linkSoname creates the soname link of a mounted library in rootfs, unless the library has no
// other soname. host is the library's path on the machine, and inside its path in the container. It
// returns the library's folder in the container. ok is false if the file is no library.
func linkSoname(rootfs, host, inside string) (folder string, ok bool, err error) {
	if !strings.Contains(filepath.Base(host), ".so") {
		return "", false, nil
	}
	file, err := elf.Open(host)
	if err != nil {
		return "", false, nil // no ELF file
	}
	defer func() { _ = file.Close() }()
	names, err := file.DynString(elf.DT_SONAME)
	folder = filepath.Dir(inside)
	if err != nil || len(names) == 0 || names[0] == filepath.Base(inside) {
		return folder, true, nil
	}
	link := filepath.Join(rootfs, folder, names[0])
	if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil { //nolint:gosec // a container's folders
		return "", false, err
	}
	if err := os.Symlink(filepath.Base(inside), link); err != nil && !errors.Is(err, os.ErrExist) {
		return "", false, err
	}
	return folder, true, nil
}

// execInNamespace mounts what the file in args names, enters the chroot, and replaces this process
// with the program. It returns only on an error. The mounts vanish when the program ends.
func execInNamespace(args []string) error {
	err := enter(args)
	fmt.Fprintln(os.Stderr, "hwcheck:", err)
	os.Exit(exitNotEntered)
	return err
}

func enter(args []string) error {
	if len(args) != 1 {
		return errors.New(stageInNamespace + ": want one file")
	}
	data, err := os.ReadFile(args[0])
	if err != nil {
		return err
	}
	var todo chrooted
	if err := json.Unmarshal(data, &todo); err != nil {
		return err
	}
	if len(todo.Argv) == 0 {
		return errors.New("no program given")
	}
	if err := checkPermitted(filepath.Base(todo.Argv[0]), todo.Argv[1:]); err != nil {
		return err
	}
	runtime.LockOSThread()
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the namespace's mounts private: %w", err)
	}
	for _, b := range todo.Binds {
		if err := b.mount(todo.Rootfs); err != nil {
			return fmt.Errorf("mount %s at %s: %w", b.From, b.To, err)
		}
	}
	if err := unix.Chroot(todo.Rootfs); err != nil {
		return fmt.Errorf("enter %s: %w", todo.Rootfs, err)
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	if err := dropCapabilities(); err != nil {
		return err
	}
	return fmt.Errorf("start %s: %w", todo.Argv[0], unix.Exec(todo.Argv[0], todo.Argv, todo.Env))
}

func (b bind) mount(rootfs string) error {
	to := filepath.Join(rootfs, b.To)
	info, err := os.Stat(b.From)
	if err != nil {
		return err
	}
	if info.IsDir() {
		err = os.MkdirAll(to, 0o755) //nolint:gosec // a container's folders
	} else {
		err = errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, nil, 0o600)) //nolint:gosec // a container's folders
	}
	if err != nil {
		return err
	}
	return unix.Mount(b.From, to, "", unix.MS_BIND|unix.MS_REC, "")
}
