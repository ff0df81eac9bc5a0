// Package cgroup creates folders in every cgroup hierarchy of this host below the caller's own
// cgroup, so that the caller's limits apply to the processes in them. It can kill all processes in
// such folders and remove the folders. It handles cgroup v1 (and its hybrid form) and v2.
//
// A cluster also finds its processes by cgroup. Membership is inherited, and unlike a file of
// process IDs it survives a crash.
package cgroup

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Root is the folder in which cgroup v1 hierarchies are mounted, or the mount point of cgroup v2.
const Root = "/sys/fs/cgroup"

// poll is how long a loop waits before it looks again whether processes and cgroup folders are
// gone.
const poll = 10 * time.Millisecond

// Unified reports whether the host has cgroup v2 only.
func Unified() bool {
	var stat unix.Statfs_t
	return unix.Statfs(Root, &stat) == nil && stat.Type == unix.CGROUP2_SUPER_MAGIC
}

// Bases returns, for each cgroup hierarchy, the folder of this name below the caller's own cgroup.
// With v2 the folder is below the root instead, because a cgroup that contains processes cannot
// delegate its controllers.
func Bases(name string) ([]string, error) {
	if Unified() {
		return []string{filepath.Join(Root, name)}, nil
	}
	hierarchies, err := Hierarchies()
	if err != nil {
		return nil, err
	}
	var bases []string
	for _, hierarchy := range hierarchies {
		own := filepath.Join(Root, hierarchy.Folder(), hierarchy.Path)
		if _, err := os.Stat(own); err != nil {
			own = filepath.Join(Root, hierarchy.Folder()) // in a container without a cgroup namespace the path is the host's
		}
		if _, err := os.Stat(own); err != nil {
			continue // this hierarchy is not mounted
		}
		bases = append(bases, filepath.Join(own, name))
	}
	if len(bases) == 0 {
		return nil, fmt.Errorf("no cgroup hierarchy is mounted below %s", Root)
	}
	return bases, nil
}

// Hierarchy is a cgroup v1 hierarchy and the caller's cgroup in it.
type Hierarchy struct {
	Controllers string // "memory", "cpu,cpuacct", "name=systemd"
	Path        string
}

// Folder returns the name of the folder below Root in which the hierarchy is usually mounted.
func (h Hierarchy) Folder() string { return strings.TrimPrefix(h.Controllers, "name=") }

// Hierarchies returns the v1 hierarchies that the calling process belongs to.
func Hierarchies() ([]Hierarchy, error) {
	file, err := os.Open("/proc/self/cgroup")
	if err != nil {
		return nil, fmt.Errorf("find out the caller's cgroups: %w", err)
	}
	defer func() { _ = file.Close() }()
	var hierarchies []Hierarchy
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		fields := strings.SplitN(lines.Text(), ":", 3)
		if len(fields) == 3 && fields[1] != "" {
			hierarchies = append(hierarchies, Hierarchy{Controllers: fields[1], Path: fields[2]})
		}
	}
	return hierarchies, lines.Err()
}

// Create makes the folder child below each base, and the base if it is missing, so that processes
// can enter it.
func Create(bases []string, child string) error {
	for _, base := range bases {
		for _, dir := range []string{filepath.Dir(base), base, filepath.Join(base, child)} {
			if err := create(dir); err != nil {
				return err
			}
		}
	}
	return nil
}

func create(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("create cgroup: %w (root rights and a writable %s are needed)", err, Root)
	}
	if Unified() {
		if dir == Root {
			return nil // it has no parent
		}
		return delegate(filepath.Dir(dir))
	}
	// A new cpuset is empty, and refuses processes until it has CPUs and memory nodes.
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		inherited, err := os.ReadFile(filepath.Join(filepath.Dir(dir), name))
		if err != nil {
			continue // this is not the cpuset hierarchy
		}
		if err := os.WriteFile(filepath.Join(dir, name), inherited, 0o644); err != nil {
			return fmt.Errorf("set %s of cgroup %s: %w", name, dir, err)
		}
	}
	return nil
}

// delegate makes all controllers of a v2 cgroup available to the cgroup's children.
func delegate(dir string) error {
	available, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return fmt.Errorf("read the controllers of cgroup %s: %w", dir, err)
	}
	for _, controller := range strings.Fields(string(available)) {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+controller), 0o644); err != nil {
			return fmt.Errorf(
				"hand controller %s of cgroup %s down: %w (a cgroup with processes of its own cannot; move them into a child)",
				controller,
				dir,
				err,
			)
		}
	}
	return nil
}

// DelegateOwn makes the controllers of the root of the caller's cgroup namespace available to its
// children. The kernel demands that this root has no processes, so DelegateOwn first moves the
// caller into a child named leaf.
func DelegateOwn(leaf string) error {
	dir := filepath.Join(Root, leaf)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("create cgroup: %w", err)
	}
	if err := Enter([]string{Root}, leaf); err != nil {
		return err
	}
	return delegate(Root)
}

// Enter moves the calling process into the cgroup named child below each of the folders in bases.
func Enter(bases []string, child string) error {
	for _, base := range bases {
		file := filepath.Join(base, child, "cgroup.procs")
		if err := os.WriteFile(file, []byte(strconv.Itoa(os.Getpid())), 0o644); err != nil {
			return fmt.Errorf("enter cgroup %s: %w", filepath.Dir(file), err)
		}
	}
	return nil
}

// Destroy kills every process in the given cgroup folders and the folders below, and then removes
// all these folders. A folder that does not exist is no error.
func Destroy(ctx context.Context, dirs []string) error {
	// The loop kills and removes again and again, because a cgroup can gain a new process as long as
	// its folder exists.
	err := until(ctx, func() (bool, error) {
		if err := killAll(dirs); err != nil {
			return false, err
		}
		gone := true
		for _, dir := range dirs {
			gone = removeTree(dir) && gone
		}
		return gone, nil
	})
	if err != nil {
		return fmt.Errorf("end the processes in and remove the cgroups %s: %w", strings.Join(dirs, " "), err)
	}
	return nil
}

func until(ctx context.Context, done func() (bool, error)) error {
	for {
		finished, err := done()
		if finished || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(poll):
		}
	}
}

// killAll sends SIGKILL to every process in the cgroups dirs and below.
func killAll(dirs []string) error {
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return fs.SkipDir // folders vanish while containers end
			}
			if err != nil || !entry.IsDir() {
				return err
			}
			// A frozen process does not die, so it is thawed first. Only v1's freezer hierarchy has
			// freezer.state, and only v2 has cgroup.freeze.
			_ = writeExisting(filepath.Join(path, "freezer.state"), "THAWED")
			_ = writeExisting(filepath.Join(path, "cgroup.freeze"), "0")
			for _, pid := range pids(path) {
				if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
					return fmt.Errorf("kill process %d: %w", pid, err)
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func writeExisting(path, content string) error {
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	_, err = file.WriteString(content)
	return err
}

// pids returns the living processes of a cgroup. It leaves out process ID 0, which the kernel
// reports for a process in a PID namespace that this process cannot see.
func pids(dir string) []int {
	content, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		return nil
	}
	var found []int
	for _, field := range strings.Fields(string(content)) {
		if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
			found = append(found, pid)
		}
	}
	return found
}

// removeTree removes the cgroup folder dir and the folders below it, the deepest first. It reports
// whether dir is gone, and is false while a folder has processes.
func removeTree(dir string) bool {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return true
	}
	for _, entry := range entries {
		if entry.IsDir() {
			removeTree(filepath.Join(dir, entry.Name()))
		}
	}
	err = os.Remove(dir)
	return err == nil || errors.Is(err, fs.ErrNotExist)
}
