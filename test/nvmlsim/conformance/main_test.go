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

// simulated is the path of the simulated library. It is empty when the tests run on real hardware.
var simulated string

// TestMain runs the tests. In a child process that a test started, it plays the role that the test
// assigned.
func TestMain(m *testing.M) {
	if role := os.Getenv(roleVariable); role != "" {
		os.Exit(play(role))
	}
	flag.Parse()
	if *libraryFlag != "" {
		// On a real GPU only the read-only tests may run, even if others were selected. With -getters
		// this process may have CAP_SYS_ADMIN, so it calls nothing but the getters.
		selected := "^TestHardware"
		if *gettersFlag != "" {
			selected = "^TestHardwareGettersAreRecorded$"
		}
		if err := flag.Set("test.run", selected); err != nil {
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

// buildLibrary builds the simulated library and returns its path. If NVMLSIM_LIB is set, it returns
// that path, which leads to the library with sanitizers.
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

// sanitized reports whether the tests use the library that was built with sanitizers.
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

// world is a simulated node that has only a state file, and a folder that the library uses as /dev.
type world struct {
	t     *testing.T
	state *state.File
	dev   string
}

// newWorld creates a simulated node and makes this process's library use it.
func newWorld(t *testing.T, node *model.Node) *world {
	t.Helper()
	needSimulator(t)
	folder := t.TempDir()
	f, err := state.Create(filepath.Join(folder, "state.bin"), state.Spec{
		Node: node, Models: readModels(t), Seed: t.Name()[:min(len(t.Name()), 60)], DriverVersion: node.DriverVersion,
		CUDAVersion: node.CUDAVersion,
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

// give adds a device node to the folder that the library uses as /dev. A plain file is enough,
// because the library only tries to open it.
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

// initialize calls nvmlInit, and nvmlShutdown at the end of the test.
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

// readNode reads a node file of the simulator by name.
func readNode(t *testing.T, name string) *model.Node {
	t.Helper()
	needSimulator(t)
	node, err := model.ReadNode(filepath.Join("..", "nodes", name+".yaml"), t.Name())
	if err != nil {
		t.Fatal(err)
	}
	// An attach cost of seconds would slow down every test. attach_test.go tests the cost.
	node.AttachCost.Duration = min(node.AttachCost.Duration, 10*time.Millisecond)
	return node
}

// nodeNames returns the names of all node files.
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
