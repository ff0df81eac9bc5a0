package stand

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

// NodeRoot is where a simulated node's driver lies on the nodes of a cluster; the chart's values for the stand name it.
const NodeRoot = "/var/lib/nvmlsim"

// Root finds the checkout around the working directory.
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

// Simulator is the built simulated driver.
type Simulator struct {
	// Tool is the nvmlsim command.
	Tool string
	// SMI is the real nvidia-smi, empty where it cannot be had.
	SMI string

	nvml   string
	source string
}

// BuildSimulator builds the simulated driver and fetches nvidia-smi. What the builds say goes to output.
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

// exitUnavailable is how nvmlsim fetch-smi says that Debian's archive cannot be had here; it has said why.
const exitUnavailable = 4

// LayoutUp is the command that makes a simulated node, in mount namespaces of the node's own: the plugin's container, which has the driver root read-only,
// reaches what it may change through the node's /dev. model is the name of a node file (dgx-h100); more are further flags of nvmlsim layout up.
func (s *Simulator) LayoutUp(nodeRoot, model string, more ...string) []string {
	return append([]string{
		s.Tool, "layout", "up", "--root", nodeRoot,
		"--node", filepath.Join(s.source, "nodes", model+".yaml"), "--models", filepath.Join(s.source, "models"),
		"--lib", s.nvml, "--smi", s.SMI, // none if it is empty
		"--mount-root",
	}, more...)
}

// Node describes a node of a cluster that has the GPUs of a node file.
func (s *Simulator) Node(name, model string, more ...string) cluster.NodeOptions {
	return cluster.NodeOptions{Name: name, BootHook: s.LayoutUp(NodeRoot, model, append([]string{"--seed", name}, more...)...)}
}
