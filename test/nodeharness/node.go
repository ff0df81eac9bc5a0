package nodeharness

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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/cut"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/scan"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/watch"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// The plugin starts the test binary as its child process, with these environment variables set.
// roleVariable says what the child does, and rootVariable has the node's root folder.
const (
	roleVariable = "NODE_HARNESS_ROLE"
	rootVariable = "NODE_HARNESS_ROOT"

	scanRole      = "scan"
	partitionRole = "partition"
	watchRole     = "watch"
)

const nodeName = "node-1"

// Main runs the tests and returns the exit code. If [Node.Command] started this process as a child
// with a role, such as scanning the GPUs, Main does that instead. The parameter roles runs roles
// that the test package adds.
func Main(m *testing.M, roles func(ctx context.Context, n Node, role string) error) int {
	handled, err := ServeRole(context.Background(), roles)
	switch {
	case !handled:
		return m.Run()
	case err != nil:
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// ServeRole does the work of this process if [Node.Command] started it as a child with a role. See
// [Main], which is for tests. handled is false if this process is no such child.
func ServeRole(ctx context.Context, roles func(ctx context.Context, n Node, role string) error) (handled bool, _ error) {
	switch role := os.Getenv(roleVariable); {
	case role == "":
		return false, nil
	case role == partitionRole:
		return true, cut.Serve(os.Stdin, os.Stdout)
	case role == watchRole:
		return true, watch.Serve(ctx, os.Stdin, os.Stdout)
	case role == scanRole:
		return true, scan.Serve(ctx, os.Stdin, os.Stdout)
	case roles == nil:
		return true, fmt.Errorf("unknown role %q", role)
	default:
		return true, roles(ctx, Node{os.Getenv(rootVariable)}, role)
	}
}

// Node is a simulated GPU node. All its files are below Root.
type Node struct{ Root string }

// New creates a node with H100s at these PCI addresses, which have no partitions. The node's files
// are removed at the end of the test.
func New(t *testing.T, addresses ...string) Node {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes with the driver's numbers")
	}
	// The path of a Unix socket must be shorter than 108 bytes.
	root, err := os.MkdirTemp("", "node-") //nolint:usetesting // t.TempDir has the test's name in its path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	n, err := LayOut(t.Context(), root, addresses...)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// LayOut creates a node like [New] does, in the empty folder root. The folder's path must be short,
// because it will contain sockets. The caller removes the folder.
func LayOut(ctx context.Context, root string, addresses ...string) (Node, error) {
	n := Node{root}
	if err := n.layOut(ctx, addresses); err != nil {
		return n, fmt.Errorf("lay a node out in %s: %w", root, err)
	}
	return n, nil
}

// repository returns the root of this repository. A program built with -trimpath does not know the
// path of its source, so it must run in the repository.
func repository() (string, error) {
	_, here, _, _ := runtime.Caller(0)
	if filepath.IsAbs(here) {
		return filepath.Join(filepath.Dir(here), "..", ".."), nil
	}
	dir, err := os.Getwd()
	for ; err == nil; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "test", "nvmlsim", "models")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("the working directory is not in the repository")
		}
	}
	return "", err
}

func (n Node) layOut(ctx context.Context, addresses []string) error {
	repository, err := repository()
	if err != nil {
		return err
	}
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
	file := filepath.Join(n.Root, "node.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return err
	}
	node, err := model.ReadNode(file, "host")
	if err != nil {
		return err
	}
	dev, c := filepath.Join(n.Root, "machine", "dev"), n.Config()
	for _, dir := range []string{dev, c.StateDir(), c.RegistrarDir, c.CDIRoot} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return err
		}
	}
	_, err = layout.Up(layout.Options{
		Root: n.Root, Models: models, Seed: "host", Config: layout.Config{Kind: layout.Container, Node: node, Dev: dev},
		Sources: layout.Sources{Library: filepath.Join(repository, "build", "nvmlsim", "libnvidia-ml.so.1")},
	})
	return err
}

// Config returns the configuration of a plugin on this node.
func (n Node) Config() *config.Config {
	c := config.Default()
	c.NodeName, c.Settings.MIG.Policy = nodeName, device.PolicyDynamic
	c.PluginDir, c.CDIRoot = filepath.Join(n.Root, "plugin"), filepath.Join(n.Root, "cdi")
	c.RegistrarDir = filepath.Join(n.Root, "registry")
	c.DriverRoot, c.DriverRootMount = "/run/nvidia/driver", filepath.Join(n.Root, "driver")
	c.SysfsRoot, c.ProcRoot = filepath.Join(n.Root, "sys"), filepath.Join(n.Root, "proc")
	c.HookSource, c.HookPath = "/bin/true", filepath.Join(c.PluginDir, "bin", "nvidia-cdi-hook")
	c.MPSHookSource, c.MPS = c.HookSource, true
	return c
}

// Paths returns the paths under which the plugin finds the driver.
func (n Node) Paths() nvidia.Paths { return driver.Paths(n.Config()) }

// Command returns the command line that starts the test binary as a child process with this role.
// See [Main].
func (n Node) Command(role string) []string {
	self, err := os.Executable()
	if err != nil {
		self = os.Args[0]
	}
	return []string{"env", n.Environment(), rootVariable + "=" + n.Root, roleVariable + "=" + role, self}
}

// Environment returns the variable that points the simulated driver to its device nodes.
func (n Node) Environment() string { return "NVMLSIM_DEV=" + filepath.Join(n.Root, "driver", "dev") }

// Change edits the state of the node's simulated driver.
func (n Node) Change(edit func(*state.File) error) error {
	f, err := state.Open(layout.StatePath(n.Root))
	if err != nil {
		return err
	}
	return errors.Join(edit(f), f.Close())
}

// Scan reads the node's hardware in a child process, as the plugin does.
func (n Node) Scan(ctx context.Context) (nvidia.Node, error) {
	return scan.Isolated(n.Paths(), n.Command(scanRole)...)(ctx)
}

// PartitionWorker returns the worker that partitions the node's GPUs. The caller stops it.
func (n Node) PartitionWorker() *cut.Partitions {
	return cut.New(n.Paths(), nil, n.Command(partitionRole)...)
}
