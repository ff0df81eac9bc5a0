package conformance

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

var (
	libraryFlag = flag.String("lib", "", "NVML library of a real driver; without it the simulated one is built and tested")
	modelsFlag  = flag.String("models", "../models", "folder of GPU model files")
)

// simulated is the path of the simulated library, empty on hardware.
var simulated string

// TestMain runs the tests, or, in a process that a test started, that process's part.
func TestMain(m *testing.M) {
	if role := os.Getenv(roleVariable); role != "" {
		os.Exit(play(role))
	}
	flag.Parse()
	if *libraryFlag != "" {
		// Nothing but the reading half may meet a real GPU, whatever was asked for.
		if err := flag.Set("test.run", "^TestHardware"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	} else {
		library, err := buildLibrary()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		simulated = library
	}
	os.Exit(m.Run())
}

// buildLibrary builds the simulated library, or takes the one that NVMLSIM_LIB names: the sanitized build.
func buildLibrary() (string, error) {
	if library := os.Getenv("NVMLSIM_LIB"); library != "" {
		return filepath.Abs(library)
	}
	out, err := exec.Command("make", "-s", "-C", "..", "library").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build the simulated library: %w\n%s", err, out)
	}
	return filepath.Abs("../../../build/nvmlsim/libnvidia-ml.so.1")
}

// sanitized: this run is of the library with the sanitizers.
func sanitized() bool { return os.Getenv("NVMLSIM_LIB") != "" }

func needSimulator(t *testing.T) {
	t.Helper()
	if simulated == "" {
		t.Skip("needs the simulator: on hardware the suite only reads")
	}
}

func readModels(t *testing.T) map[string]*model.GPU {
	t.Helper()
	models, err := model.ReadGPUs(*modelsFlag)
	if err != nil {
		t.Fatal(err)
	}
	if simulated != "" {
		unseen, err := model.ReadGPU("testdata/unseen.yaml")
		if err != nil {
			t.Fatal(err)
		}
		models[unseen.Key] = unseen
	}
	return models
}

// world is a simulated node without a layout: a state file, and a folder that stands for /dev.
type world struct {
	t     *testing.T
	state *state.File
	dev   string
}

// newWorld makes the node and points the library at it.
func newWorld(t *testing.T, node *model.Node) *world {
	t.Helper()
	needSimulator(t)
	folder := t.TempDir()
	f, err := state.Create(filepath.Join(folder, "state.bin"), state.Spec{
		Node: node, Models: readModels(t), Seed: t.Name()[:min(len(t.Name()), 60)], DriverVersion: node.DriverVersion, CUDAVersion: node.CUDAVersion,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	w := &world{t: t, state: f, dev: filepath.Join(folder, "dev")}
	if err := os.Mkdir(w.dev, 0o755); err != nil {
		t.Fatal(err)
	}
	w.give("nvidiactl")
	for i := range f.GPUCount() {
		w.give(fmt.Sprintf("nvidia%d", f.GPU(i).Minor))
	}
	t.Setenv("NVMLSIM_STATE", f.Path())
	t.Setenv("NVMLSIM_DEV", w.dev)
	return w
}

// give puts a device into this world's /dev. A plain file opens, which counts as given.
func (w *world) give(name string) {
	w.t.Helper()
	w.must(os.MkdirAll(filepath.Dir(filepath.Join(w.dev, name)), 0o755))
	if err := os.WriteFile(filepath.Join(w.dev, name), nil, 0o600); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) take(name string) {
	w.t.Helper()
	if err := os.Remove(filepath.Join(w.dev, name)); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// initialize initialises NVML until the test ends.
func initialize(t *testing.T) nvml.Interface {
	t.Helper()
	path := simulated
	if path == "" {
		path = *libraryFlag
	}
	library := nvml.New(nvml.WithLibraryPath(path))
	if ret := library.Init(); ret != nvml.SUCCESS {
		t.Fatalf("nvmlInit with %s: %v", path, ret)
	}
	t.Cleanup(func() { _ = library.Shutdown() })
	return library
}

func devices(t *testing.T, library nvml.Interface) []nvml.Device {
	t.Helper()
	count, ret := library.DeviceGetCount()
	if ret != nvml.SUCCESS {
		t.Fatalf("nvmlDeviceGetCount: %v", ret)
	}
	var all []nvml.Device
	for i := range count {
		device, ret := library.DeviceGetHandleByIndex(i)
		if ret != nvml.SUCCESS {
			t.Fatalf("nvmlDeviceGetHandleByIndex(%d): %v", i, ret)
		}
		all = append(all, device)
	}
	return all
}

// readNode reads one of the project's node files.
func readNode(t *testing.T, name string) *model.Node {
	t.Helper()
	needSimulator(t)
	node, err := model.ReadNode(filepath.Join("..", "nodes", name+".yaml"), t.Name())
	if err != nil {
		t.Fatal(err)
	}
	// A driver that takes seconds for each GPU would take them in every process; attach_test.go tests the cost.
	node.AttachCost.Duration = min(node.AttachCost.Duration, 10*time.Millisecond)
	return node
}

// nodeNames are all node files.
func nodeNames(t *testing.T) []string {
	t.Helper()
	paths, err := filepath.Glob("../nodes/*.yaml")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no node files: %v", err)
	}
	var names []string
	for _, path := range paths {
		names = append(names, strings.TrimSuffix(filepath.Base(path), ".yaml"))
	}
	return names
}

func want(t *testing.T, what string, got, want nvml.Return) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %d (%v), want %d (%v)", what, got, got, want, want)
	}
}
