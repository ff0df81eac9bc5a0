// Package memorylimit limits how much memory of a GPU a whole container can use. It is the OCI hook
// behind `gpu-mps memory-limit`.
//
// From r615 on (CUDA 13.4), NVIDIA's driver counts the device memory of control groups. It does so
// only with cgroup v2, and not on MIG devices. An allocation beyond a group's hard limit fails,
// whichever processes of the group allocated the rest. MPS clients count too
// (https://docs.nvidia.com/deploy/mps/latest/mpsv3-memory-partitioning.html).
//
// The limit belongs to the container's own control group, which exists only once the container is
// created. So [Limit.Hook] runs as a createRuntime hook on the host at each start of each
// container, and sets the limit with the driver's nvidia-smi. Then it reads the limit back. If the
// limit was not set, the container fails to start, because the claim promises the limit.
//
// The hook sets a soft limit of 0. A higher one would reserve memory in all ancestors of the group,
// and the reservation would outlive the group.
//
// The hook of NVIDIA's container toolkit (v1.20.1), apply-cuda-memory-limits, does not serve here.
// It loads NVML on the host, which a static program cannot. It looks for the GPU among all cards,
// so a lost card blocks containers of others. It reads a variable that any Pod could set, and sets
// the soft limit to the hard one.
package memorylimit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/onecard"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/tool"
)

const (
	// tolerance is by how many MiB the limit that nvidia-smi shows may exceed the requested limit.
	tolerance = 64
	// maxState limits how many bytes of the container's state are read. Runtimes write far less.
	maxState = 1 << 20
)

// Limit is a container's memory limit on one GPU. Paths are those of the host.
type Limit struct {
	GPU       string // UUID
	Minor     int    // the N of the GPU's device node /dev/nvidiaN
	Mebibytes uint64
	// DriverRoot is the root of the driver's files on the host, and Cgroups the mount point of cgroup
	// v2.
	DriverRoot string
	Cgroups    string
}

// Hook reads the container's state, which the OCI runtime passes to hooks on standard input. Then
// it sets the memory limit on the container's control group. It returns an error if nvidia-smi
// afterwards shows no limit or a higher one.
func (l Limit) Hook(ctx context.Context, state io.Reader) error {
	var container specs.State
	if err := json.NewDecoder(io.LimitReader(state, maxState)).Decode(&container); err != nil {
		return fmt.Errorf("read the container's state from standard input: %w", err)
	}
	if err := l.apply(ctx, container.Pid, "/proc"); err != nil {
		return fmt.Errorf("container %.100q: limit memory to %d MiB of %s: %w", container.ID, l.Mebibytes, l.GPU, err)
	}
	return nil
}

// apply limits the control group of the container with process pid. proc is the mount point of
// procfs.
func (l Limit) apply(ctx context.Context, pid int, proc string) error {
	group, err := l.group(proc, pid)
	if err != nil {
		return err
	}
	smi, err := driverroot.Find(l.DriverRoot, "nvidia-smi")
	if err != nil {
		return err
	}
	others := l.otherGPUs()
	ask := func(args ...string) (string, error) {
		return tool.Tool{Program: smi, Args: append([]string{"memory-limits"}, args...), Limit: tool.SMILimit, Hidden: others}.Run(ctx)
	}
	if _, err := ask("--set", "--namespace", group, "--soft-limit", "0",
		"--hard-limit", strconv.FormatUint(l.Mebibytes, 10), "-i", l.GPU); err != nil {
		return err
	}
	out, err := ask("--get", "--namespace", group, "-i", l.GPU)
	if err != nil {
		return err
	}
	switch has, err := hardLimit(out); {
	case err != nil:
		return fmt.Errorf("nvidia-smi set the limit without error, but then %w: %s", err, tool.LastOutput(out))
	case has == 0 || has > l.Mebibytes+tolerance:
		return fmt.Errorf("nvidia-smi set the limit without error, but then shows %d MiB", has)
	}
	return nil
}

// otherGPUs lists the device nodes of all other GPUs. The hook hides them from nvidia-smi, because
// a lost GPU would make nvidia-smi fail.
func (l Limit) otherGPUs() []string {
	own := "nvidia" + strconv.Itoa(l.Minor)
	return onecard.Others(l.DriverRoot, func(name string) bool { return name == own })
}

// group returns the path of the control group (cgroup v2) of the container with process pid. proc
// is the mount point of procfs.
func (l Limit) group(proc string, pid int) (string, error) {
	data, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return "", fmt.Errorf("find the control group of the container: %w", err)
	}
	for line := range strings.Lines(string(data)) {
		path, unified := strings.CutPrefix(strings.TrimSpace(line), "0::")
		if !unified {
			continue
		}
		if path = filepath.Clean("/" + path); path == "/" {
			return "", errors.New("the container has no control group of its own")
		}
		return filepath.Join(l.Cgroups, path), nil
	}
	return "", errors.New("the container is in no control group of cgroup v2")
}

// hardLimit returns the hard limit in MiB from nvidia-smi's output, which has a line such as "hard
// limit: 8192 MiB".
func hardLimit(out string) (uint64, error) {
	for line := range strings.Lines(out) {
		name, value, _ := strings.Cut(line, ":")
		if !strings.EqualFold(strings.TrimSpace(name), "hard limit") {
			continue
		}
		number, unit, _ := strings.Cut(strings.TrimSpace(value), " ")
		n, err := strconv.ParseUint(number, 10, 64)
		if err != nil || strings.TrimSpace(unit) != "MiB" {
			return 0, fmt.Errorf("shows the limit %q", strings.TrimSpace(value))
		}
		return n, nil
	}
	return 0, errors.New("shows no hard limit")
}
