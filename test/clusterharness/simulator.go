package clusterharness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// NodeRoot is the folder of the simulated driver's files on a node. The chart's test values name
// it.
const NodeRoot = "/var/lib/nvmlsim"

// Root returns the root folder of the checkout that contains the working directory.
func Root() (string, error) {
	start, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		content, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		switch {
		case err == nil && bytes.HasPrefix(content, []byte("module github.com/gpu-dra-driver/gpu-dra-driver\n")):
			return dir, nil
		case err != nil && !errors.Is(err, fs.ErrNotExist):
			return "", fmt.Errorf("find the checkout: %w", err)
		case dir == filepath.Dir(dir):
			return "", fmt.Errorf("%s is not inside a checkout of gpu-dra-driver; run this from there", start)
		}
	}
}

// Simulator has the paths of the built simulated driver.
type Simulator struct {
	// Tool is the path of the nvmlsim command.
	Tool string
	// SMI is the path of NVIDIA's real nvidia-smi, or empty if it cannot be fetched.
	SMI string

	nvml   string
	source string
}

// BuildSimulator builds the simulated driver and fetches nvidia-smi. output receives what the
// builds print.
func BuildSimulator(ctx context.Context, root string, output io.Writer) (*Simulator, error) {
	source := filepath.Join(root, "test", "nvmlsim")
	build := exec.CommandContext(ctx, "make", "--no-print-directory", "-C", source)
	build.Stdout, build.Stderr = output, output
	if err := build.Run(); err != nil {
		return nil, fmt.Errorf("build the simulated driver in %s: %w", source, err)
	}
	out := filepath.Join(root, "build", "nvmlsim")
	s := &Simulator{Tool: filepath.Join(out, "nvmlsim"), nvml: filepath.Join(out, "libnvidia-ml.so.1"), source: source}
	fetch := exec.CommandContext(ctx, s.Tool, "fetch-smi")
	fetch.Stderr = output
	path, err := fetch.Output()
	var failed *exec.ExitError
	if errors.As(err, &failed) && failed.ExitCode() == exitUnavailable {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("fetch nvidia-smi: %w", err)
	}
	s.SMI = strings.TrimSpace(string(path))
	return s, nil
}

// exitUnavailable is the exit code of nvmlsim fetch-smi when it cannot reach Debian's archive.
const exitUnavailable = 4

// LayoutUp returns the command that a node runs at boot to install the simulated driver in
// nodeRoot. Its flag --mount-root is for the plugin's container, which sees the driver root
// read-only and writes the simulator's state through the node's /dev. model names a node file, such
// as dgx-h100. more are further flags of nvmlsim layout up.
func (s *Simulator) LayoutUp(nodeRoot, model string, more ...string) []string {
	return append([]string{
		s.Tool, "layout", "up", "--root", nodeRoot,
		"--node", filepath.Join(s.source, "nodes", model+".yaml"), "--models", filepath.Join(s.source, "models"),
		"--lib", s.nvml, "--smi", s.SMI, // an empty path means none
		"--mount-root",
	}, more...)
}

// OtherHost is a file of a node. If a test writes it, the node boots with other GPUs of the same
// models, as a virtual machine does that was moved to another host while its power was off.
const OtherHost = "/var/lib/other-host"

// Node returns the options of a cluster's node that has the GPUs of the node file model. more are
// further flags of nvmlsim layout up.
func (s *Simulator) Node(name, model string, more ...string) cluster.NodeOptions {
	// The plugin runs the hooks in the host's root, which is that of the node's first process.
	first := NodeRoot + "/proc/1"
	seeded := `"$@" --seed "$NODE_NAME$(cat ` + OtherHost + ` 2>/dev/null)" && mkdir -p ` + first + ` && mount --bind /proc/1 ` + first
	hook := append([]string{"/bin/sh", "-c", seeded, "sh"}, s.LayoutUp(NodeRoot, model, more...)...)
	return cluster.NodeOptions{Name: name, BootHook: hook}
}
