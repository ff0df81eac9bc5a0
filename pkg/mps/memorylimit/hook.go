// Package memorylimit holds a container as a whole to a part of a GPU's memory: it is the OCI hook behind `gpu-mps memory-limit`.
//
// NVIDIA's driver counts the device memory of control groups from r615 on (CUDA 13.4), with cgroup v2 and not on MIG devices: an allocation beyond a group's
// hard limit fails, whatever processes of it have allocated the rest, MPS clients among them (https://docs.nvidia.com/deploy/mps/latest/mpsv3-memory-partitioning.html).
// The limit belongs to the container's own control group, which is there only when the container is being created: so [Limit.Hook] runs as a createRuntime
// hook, on the host, for each container and for each restart of it, and asks the driver's own nvidia-smi to set the limit. A limit that does not hold
// afterwards fails the container, because it was promised.
//
// The soft limit stays 0. It would be a reservation in all of the group's ancestors, which a group that is removed leaves behind.
package memorylimit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/container"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/onecard"
)

const (
	// smiLimit is for one run of nvidia-smi, which may have to wake the GPU. The kubelet gives the creation of a container two minutes.
	smiLimit = 40 * time.Second
	// shown is how much of its output an error has.
	shown = 300
	// coarse is by how many MiB the driver may count otherwise than it was told.
	coarse = 64
)

// Limit is what a container gets of a GPU. Paths are those of the host.
type Limit struct {
	GPU       string // its UUID
	Mebibytes uint64
	// DriverRoot is the root of the driver's files, Cgroups where cgroup v2 is mounted.
	DriverRoot string
	Cgroups    string
}

// Hook reads the container's state as the OCI runtime gives it to hooks, and limits the container.
func (l Limit) Hook(ctx context.Context, state io.Reader) error {
	c, err := container.Read(state)
	if err != nil {
		return err
	}
	if err := l.apply(ctx, c, "/proc"); err != nil {
		return fmt.Errorf("container %.100q: limit it to %d MiB of %s: %w", c.State.ID, l.Mebibytes, l.GPU, err)
	}
	return nil
}

func (l Limit) apply(ctx context.Context, c container.Container, proc string) error {
	group, err := l.group(proc, c.State.Pid)
	if err != nil {
		return err
	}
	smi, err := driverroot.Find(l.DriverRoot, "nvidia-smi")
	if err != nil {
		return err
	}
	others := onecard.Others(l.DriverRoot, given(c))
	ask := func(args ...string) (string, error) {
		return run(ctx, smi, others, append([]string{"memory-limits"}, args...)...)
	}
	if _, err := ask("--set", "--namespace", group, "--soft-limit", "0", "--hard-limit", strconv.FormatUint(l.Mebibytes, 10), "-i", l.GPU); err != nil {
		return err
	}
	out, err := ask("--get", "--namespace", group, "-i", l.GPU)
	if err != nil {
		return err
	}
	switch has, err := hardLimit(out); {
	case err != nil:
		return fmt.Errorf("nvidia-smi says that it has set the limit, and then %w: %s", err, excerpt(out))
	case has == 0 || has > l.Mebibytes+coarse:
		return fmt.Errorf("nvidia-smi says that it has set the limit, and then that it is %d MiB", has)
	}
	return nil
}

// given says which of the node's device nodes the container has, this GPU's among them: another that is lost must not keep it from its limit. Of a container
// that names none nothing can be told.
func given(c container.Container) func(name string) bool {
	var names []string
	if c.Config.Linux != nil {
		for _, d := range c.Config.Linux.Devices {
			if name := filepath.Base(d.Path); strings.HasPrefix(name, "nvidia") {
				names = append(names, name)
			}
		}
	}
	return func(name string) bool { return len(names) == 0 || slices.Contains(names, name) }
}

// group is the container's control group.
func (l Limit) group(proc string, pid int) (string, error) {
	data, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return "", fmt.Errorf("find its control group: %w", err)
	}
	for line := range strings.Lines(string(data)) {
		path, unified := strings.CutPrefix(strings.TrimSpace(line), "0::")
		if !unified {
			continue
		}
		if path = filepath.Clean("/" + path); path == "/" {
			return "", errors.New("it has no control group of its own")
		}
		return filepath.Join(l.Cgroups, path), nil
	}
	return "", errors.New("it is in no control group of cgroup v2")
}

// hardLimit is in MiB, as nvidia-smi prints it: "hard limit: 8192 MiB".
func hardLimit(out string) (uint64, error) {
	for line := range strings.Lines(out) {
		name, value, _ := strings.Cut(line, ":")
		if !strings.EqualFold(strings.TrimSpace(name), "hard limit") {
			continue
		}
		number, unit, _ := strings.Cut(strings.TrimSpace(value), " ")
		n, err := strconv.ParseUint(number, 10, 64)
		if err != nil || strings.TrimSpace(unit) != "MiB" {
			return 0, fmt.Errorf("that the limit is %q", strings.TrimSpace(value))
		}
		return n, nil
	}
	return 0, errors.New("shows none")
}

// run shows the program the container's GPUs alone, if that is possible here.
func run(ctx context.Context, smi driverroot.Program, others []string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, smiLimit, fmt.Errorf("it has not ended for %s: %w", smiLimit, context.DeadlineExceeded))
	defer cancel()
	var out bytes.Buffer
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // Never unlocked: the thread, and its view of the file system, end with this goroutine.
		if len(others) > 0 {
			_ = onecard.Hide(others) // Else it opens the others too, as it always does.
		}
		command := exec.CommandContext(ctx, smi.Path, args...)
		command.Stdout, command.Stderr = &out, &out
		command.Env = append(os.Environ(), append(smi.Environment(driverroot.NVML), "LC_ALL=C")...)
		command.SysProcAttr = &unix.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
		command.Cancel = func() error { return unix.Kill(-command.Process.Pid, unix.SIGKILL) }
		command.WaitDelay = time.Second
		done <- command.Run()
	}()
	err := <-done
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	if err != nil {
		return "", fmt.Errorf("nvidia-smi failed (%w): %s", err, excerpt(out.String()))
	}
	return out.String(), nil
}

// excerpt is the end of a program's output in one line.
func excerpt(out string) string {
	out = strings.Join(strings.Fields(out), " ")
	if out == "" {
		return "it said nothing"
	}
	if over := len(out) - shown; over > 0 {
		out = "…" + strings.ToValidUTF8(out[over:], "")
	}
	return out
}
