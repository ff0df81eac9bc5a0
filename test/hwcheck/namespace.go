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

// stageInNamespace is this program as the first process of a namespace: hwcheck in-namespace FILE.
const stageInNamespace = "in-namespace"

// chrooted is what the stage is told by a file.
type chrooted struct {
	Rootfs string   `json:"rootfs"`
	Binds  []bind   `json:"binds"`
	Env    []string `json:"env"`
	Argv   []string `json:"argv"`
}

// bind shows a file, a folder or a device node of the machine in the chroot.
type bind struct {
	From string `json:"from"`
	To   string `json:"to"`
}

// exitNotEntered is how the stage ends when it did not come to starting the program.
const exitNotEntered = 125

// inNamespace runs nvidia-smi where runc may not: a mount namespace (and a user namespace for ordinary users) is all it takes.
func (c *containers) inNamespace(ctx context.Context, devices, args []string) (outcome, error) {
	bundle, rootfs, err := c.folder()
	if err != nil {
		return outcome{}, err
	}
	edits := c.specs.edits(devices)
	todo := chrooted{Rootfs: rootfs, Env: append([]string{"PATH=/usr/bin:/bin", "LC_ALL=C"}, edits.Env...), Argv: append([]string{c.inside}, args...)}
	todo.Binds = append(todo.Binds, bind{"/proc", "/proc"})
	for _, n := range edits.DeviceNodes {
		todo.Binds = append(todo.Binds, bind{hostPath(n), n.Path})
	}
	var libraries []string
	for _, m := range edits.Mounts {
		todo.Binds = append(todo.Binds, bind{m.HostPath, m.ContainerPath})
		// The links that the hooks would have made.
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
	var exit *exec.ExitError
	if result.err != nil && (!errors.As(result.err, &exit) || exit.ExitCode() == exitNotEntered) {
		return outcome{}, fmt.Errorf("no mount namespace: %s", result.said())
	}
	return result, nil
}

// linkSoname makes the link by which a mounted library is looked for, and returns its folder in the container.
func linkSoname(rootfs, host, inside string) (folder string, ok bool, err error) {
	if !strings.Contains(filepath.Base(host), ".so") {
		return "", false, nil
	}
	file, err := elf.Open(host)
	if err != nil {
		return "", false, nil // a text file, say
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

// execInNamespace is the stage: it mounts, enters and becomes the program. Its mounts end with it.
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
	if err := permit(filepath.Base(todo.Argv[0]), todo.Argv[1:]); err != nil {
		return err
	}
	runtime.LockOSThread()
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("keep mounts to ourselves: %w", err)
	}
	for _, b := range todo.Binds {
		if err := b.mount(todo.Rootfs); err != nil {
			return fmt.Errorf("show %s as %s: %w", b.From, b.To, err)
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
