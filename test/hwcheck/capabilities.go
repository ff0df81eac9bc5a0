package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// stageWithoutCapabilities is this program as a step on the way to another: hwcheck without-capabilities PROGRAM ARGUMENT…
const stageWithoutCapabilities = "without-capabilities"

// execWithoutCapabilities becomes another program that has no capability and can get none, even as root. NVIDIA's kernel driver asks for
// CAP_SYS_ADMIN before it changes a GPU, and the helper that NVML may call for missing device nodes or modules needs CAP_MKNOD and CAP_SYS_MODULE.
func execWithoutCapabilities(argv []string) error {
	if len(argv) == 0 {
		return errors.New(stageWithoutCapabilities + ": no program given")
	}
	// Capabilities belong to a thread, and execve takes those of the one that calls it.
	runtime.LockOSThread()
	if err := dropCapabilities(); err != nil {
		return err
	}
	return fmt.Errorf("start %s: %w", argv[0], unix.Exec(argv[0], argv, os.Environ()))
}

func dropCapabilities() error {
	for c := uintptr(0); ; c++ {
		has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			break // beyond those that this kernel knows
		}
		if err != nil {
			return fmt.Errorf("ask for capability %d: %w", c, err)
		}
		if has == 0 {
			continue
		}
		// An ordinary user may not drop it, and does not get it from there by execve; root would.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil && os.Geteuid() == 0 {
			return fmt.Errorf("give up capability %d, without which this check does not run anything: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("clear the ambient capabilities: %w", err)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	if err := unix.Capset(&header, &none[0]); err != nil {
		return fmt.Errorf("give up all capabilities: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("renounce new privileges: %w", err)
	}
	return nil
}
