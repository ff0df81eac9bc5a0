package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"
)

// These are the first arguments with which hwcheck starts itself to run another program without
// capabilities, or with CAP_SYS_ADMIN alone: hwcheck without-capabilities PROGRAM ARGUMENT…
const (
	stageWithoutCapabilities = "without-capabilities"
	stageWithSysAdmin        = "with-sys-admin"
)

// execWithoutCapabilities replaces this process with a program that has no capabilities except
// those in kept, and no way to get any, even as root. Without CAP_SYS_ADMIN, NVIDIA's kernel driver
// refuses to change a GPU. Without CAP_MKNOD and CAP_SYS_MODULE, the helper that NVML may call
// cannot create device nodes or load modules.
func execWithoutCapabilities(argv []string, kept ...uintptr) error {
	if len(argv) == 0 {
		return errors.New("no program given")
	}
	// Capabilities belong to a thread, and execve keeps those of the calling thread.
	runtime.LockOSThread()
	if err := dropCapabilities(kept...); err != nil {
		return err
	}
	return fmt.Errorf("start %s: %w", argv[0], unix.Exec(argv[0], argv, os.Environ()))
}

// hasSysAdmin reports whether this process has CAP_SYS_ADMIN.
func hasSysAdmin() bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var has [2]unix.CapUserData
	err := unix.Capget(&header, &has[0])
	return err == nil && has[0].Effective&(1<<unix.CAP_SYS_ADMIN) != 0
}

// dropCapabilities drops all capabilities except those in kept, which must be among the first 32.
func dropCapabilities(kept ...uintptr) error {
	for c := uintptr(0); ; c++ {
		has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			break // c is beyond the last capability of this kernel
		}
		if err != nil {
			return fmt.Errorf("ask for capability %d: %w", c, err)
		}
		if has == 0 || slices.Contains(kept, c) {
			continue
		}
		// Only root may drop a capability from the bounding set, and only root would get that capability
		// back by execve. So other users can ignore the error.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil && os.Geteuid() == 0 {
			return fmt.Errorf("drop capability %d, which is required before this check runs a program: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("clear the ambient capabilities: %w", err)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var left [2]unix.CapUserData
	for _, c := range kept {
		left[0].Effective |= 1 << c
		left[0].Permitted |= 1 << c
	}
	if err := unix.Capset(&header, &left[0]); err != nil {
		return fmt.Errorf("give up capabilities: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("renounce new privileges: %w", err)
	}
	return nil
}
