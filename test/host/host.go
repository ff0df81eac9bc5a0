package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// Which process of the plugin the test binary plays, and on which node.
const (
	roleVariable = "HOST_TEST_ROLE"
	rootVariable = "HOST_TEST_ROOT"

	scanRole      = "scan"
	partitionRole = "partition"
)

const nodeName = "node-1"

// Main runs the tests, or what the role says in which [Host.Command] has started this process, and returns the process's exit code. roles are those that the
// package has besides the plugin's own child processes.
func Main(m *testing.M, roles func(ctx context.Context, h Host, role string) error) int {
	ctx := context.Background()
	var err error
	switch role := os.Getenv(roleVariable); {
	case role == "":
		return m.Run()
	case role == partitionRole:
		err = nvidia.ServePartitions(ctx, os.Stdin, os.Stdout)
	case role == scanRole:
		err = nvidia.ServeScan(ctx, os.Stdin, os.Stdout)
	case roles == nil:
		err = fmt.Errorf("nobody plays the role %q", role)
	default:
		err = roles(ctx, Host{os.Getenv(rootVariable)}, role)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// Host is a node. All that is on it lies below its root.
type Host struct{ Root string }

// New is a node with H100s at these PCI addresses, none of which is cut. It is gone when the test ends.
func New(t *testing.T, addresses ...string) Host {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes with the driver's numbers")
	}
	root, err := os.MkdirTemp("", "host-") //nolint:usetesting // the test's own is named after it: a socket's path has room for 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	h, err := LayOut(t.Context(), root, addresses...)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// LayOut makes such a node in an empty folder, whose path must be short: there are sockets below it. Whoever made the folder removes it.
func LayOut(ctx context.Context, root string, addresses ...string) (Host, error) {
	h := Host{root}
	if err := h.layOut(ctx, addresses); err != nil {
		return h, fmt.Errorf("lay a node out in %s: %w", root, err)
	}
	return h, nil
}

func (h Host) layOut(ctx context.Context, addresses []string) error {
	_, here, _, _ := runtime.Caller(0)
	repository := filepath.Join(filepath.Dir(here), "..", "..")
	simulator := filepath.Join(repository, "test", "nvmlsim")
	if out, err := exec.CommandContext(ctx, "make", "-s", "-C", simulator, "library").CombinedOutput(); err != nil {
		return fmt.Errorf("build the simulated library: %s: %w", out, err)
	}
	models, err := model.ReadGPUs(filepath.Join(simulator, "models"))
	if err != nil {
		return err
	}
	text := "driverVersion: \"580.65.06\"\ncudaVersion: \"13.0\"\ngpus:\n"
	for _, a := range addresses {
		text += fmt.Sprintf("- {model: h100-sxm5-80gb, pci: %q, pciRoot: \"pci0000:15\"}\n", a)
	}
	file := filepath.Join(h.Root, "node.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return err
	}
	node, err := model.ReadNode(file, "host")
	if err != nil {
		return err
	}
	dev, c := filepath.Join(h.Root, "machine", "dev"), h.Config()
	for _, dir := range []string{dev, c.StateDir(), c.RegistrarDir, c.CDIRoot} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return err
		}
	}
	_, err = layout.Up(layout.Options{
		Root: h.Root, Models: models, Seed: "host", Config: layout.Config{Kind: layout.Container, Node: node, Dev: dev},
		Sources: layout.Sources{Library: filepath.Join(repository, "build", "nvmlsim", "libnvidia-ml.so.1")},
	})
	return err
}

// Config is the plugin's, on this node.
func (h Host) Config() *config.Config {
	c := config.Default()
	c.NodeName, c.MIGPolicy = nodeName, "dynamic"
	c.PluginDir, c.RegistrarDir, c.CDIRoot = filepath.Join(h.Root, "plugin"), filepath.Join(h.Root, "registry"), filepath.Join(h.Root, "cdi")
	c.DriverRoot, c.DriverRootMount = "/run/nvidia/driver", filepath.Join(h.Root, "driver")
	c.SysfsRoot, c.ProcRoot = filepath.Join(h.Root, "sys"), filepath.Join(h.Root, "proc")
	c.HookSource, c.HookPath = "/bin/true", filepath.Join(c.PluginDir, "bin", "nvidia-cdi-hook")
	c.MPSHookSource, c.MPS = c.HookSource, true
	return c
}

// Paths are where the plugin finds the driver.
func (h Host) Paths() nvidia.Paths { return driver.Paths(h.Config()) }

// Command is how the test binary is started in a role.
func (h Host) Command(role string) []string {
	self, err := os.Executable()
	if err != nil {
		self = os.Args[0]
	}
	return []string{"env", h.Environment(), rootVariable + "=" + h.Root, roleVariable + "=" + role, self}
}

// Environment is the variable by which a process on the node finds the simulated driver's device nodes.
func (h Host) Environment() string { return "NVMLSIM_DEV=" + filepath.Join(h.Root, "driver", "dev") }

// Change edits the simulated driver's state.
func (h Host) Change(edit func(*state.File) error) error {
	f, err := state.Open(layout.StatePath(h.Root))
	if err != nil {
		return err
	}
	return errors.Join(edit(f), f.Close())
}

// Scan looks at the node's hardware as the plugin does.
func (h Host) Scan(ctx context.Context) (nvidia.Node, error) {
	return nvidia.Isolated(h.Paths(), h.Command(scanRole)...)(ctx)
}

// Cutter is the node's hardware as far as it is cut. Whoever asks for it closes it.
func (h Host) Cutter() *nvidia.Partitions {
	return nvidia.NewPartitions(h.Paths(), h.Command(partitionRole)...)
}
