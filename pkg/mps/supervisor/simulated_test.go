package supervisor

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/namespace"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

const simulator = "../../../test/nvmlsim"

// buildSimulator builds the simulated NVIDIA driver, once for all tests. It returns the path of the
// library.
var buildSimulator = sync.OnceValues(func() (string, error) {
	if out, err := exec.Command("make", "-s", "-C", simulator, "library").CombinedOutput(); err != nil {
		return "", errors.Join(errors.New(string(out)), err)
	}
	return filepath.Abs("../../../build/nvmlsim/libnvidia-ml.so.1")
})

// newSimulatedNode returns a node with two simulated GPUs, whose driver is installed in the way
// that kind names (such as on the host or in a driver container). gpus are the UUIDs of the GPUs.
func newSimulatedNode(t *testing.T, kind layout.Kind) (n *node, gpus []string) {
	t.Helper()
	n = newNode(t)
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes with the driver's numbers")
	}
	library, err := buildSimulator()
	must(t, err)
	models, err := model.ReadGPUs(filepath.Join(simulator, "models"))
	must(t, err)
	described, err := model.ReadNode(filepath.Join(simulator, "nodes", "l40s-x2.yaml"), "mps")
	must(t, err)
	root := t.TempDir()
	machine := filepath.Join(root, "machine")
	must(t, os.MkdirAll(filepath.Join(machine, "dev"), 0o755))
	c, err := layout.Up(layout.Options{
		Root: root, Models: models, Seed: "mps", Sources: layout.Sources{Library: library},
		Config: layout.Config{Kind: kind, Node: described, Dev: filepath.Join(machine, "dev")},
	})
	must(t, err)
	t.Cleanup(func() {
		if err := layout.Down(root); err != nil {
			t.Error(err)
		}
	})
	n.options.DriverRootMount = c.DriverRoot()
	// Only a driver container needs no DevRoot: its device nodes are in its driver root, where the
	// supervisor finds them automatically.
	if kind != layout.Container {
		n.options.DevRoot = machine
	}
	for _, gpu := range c.Node.GPUs {
		gpus = append(gpus, gpu.UUID)
	}
	return n, gpus
}

// programEvent is one line of output of the simulated CUDA program.
type programEvent struct {
	Event, Mode, Error string
	MiB                uint64
	Devices            []struct {
		UUID             string  `json:"uuid"`
		MemoryLimitMiB   uint64  `json:"memoryLimitMiB"`
		ThreadPercentage float64 `json:"threadPercentage"`
	}
}

// cudaProgram runs a simulated CUDA program as the given user in the mount namespace of a daemon,
// where the pipes have their container path. It returns the program's first event named until.
func (n *node) cudaProgram(id string, user int, until string, args ...string) programEvent {
	n.t.Helper()
	built, err := programs()
	must(n.t, err)
	cmd := exec.Command(filepath.Join(built, "standin"))
	// With this first argument, the simulated control program acts as a CUDA program.
	cmd.Args = append([]string{"join", itoa(n.status(id).PID), itoa(user), "/tmp/bin/" + controlProgram, "nvmlsim-cuda"}, args...)
	cmd.Env = []string{"CUDA_MPS_PIPE_DIRECTORY=" + mps.ContainerPipes}
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	must(n.t, err)
	must(n.t, cmd.Start())
	n.t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		var l programEvent
		must(n.t, json.Unmarshal(lines.Bytes(), &l))
		if l.Event == until {
			return l
		}
		if l.Event == "failed" {
			n.t.Fatalf("%s\n%s", lines.Text(), n.supervisorLog())
		}
	}
	n.t.Fatalf("the program ended without %q\n%s", until, n.supervisorLog())
	return programEvent{}
}

func TestSimulatedClientsGetDaemonLimits(t *testing.T) {
	for _, kind := range []layout.Kind{layout.Host, layout.Container, layout.Bare} {
		t.Run(string(kind), func(t *testing.T) {
			n, gpus := newSimulatedNode(t, kind)
			n.supervise()
			threads := 30
			n.mustStart(mps.Daemon{ID: "claim-0", Devices: []string{gpus[1], gpus[0]}, ThreadPercentage: &threads,
				MemoryLimits: map[int]uint64{0: 18432, 1: 1500}, MultiUser: true})
			// The first user's program keeps running while those of other users start, which needs
			// MultiUser.
			for _, user := range []int{0, 1000, 2000} {
				l := n.cudaProgram("claim-0", user, "attached", "--hold")
				if l.Mode != "mps" || len(l.Devices) != 2 || l.Devices[0].UUID != gpus[1] || l.Devices[1].UUID != gpus[0] {
					t.Errorf("user %d: %+v", user, l)
				}
				if l.Devices[0].MemoryLimitMiB != 18432 || l.Devices[1].MemoryLimitMiB != 1500 || l.Devices[0].ThreadPercentage != 30 {
					t.Errorf("user %d: %+v", user, l)
				}
			}
			if pids := n.processes("claim-0"); len(pids) < 2 {
				t.Error("no server runs:", pids)
			}
			n.mustStop("claim-0") // Its clients still run.
		})
	}
}

// An MPS server runs as its client's user. So another user than root must be able to reach the
// pipes, the log and the driver's libraries.
func TestSimulatedServerOfAnotherUser(t *testing.T) {
	n, gpus := newSimulatedNode(t, layout.Host)
	n.supervise()
	n.mustStart(mps.Daemon{ID: "a", Devices: gpus[:1]})
	if l := n.cudaProgram("a", 1000, "filled", "--fill", "--hold"); l.MiB == 0 {
		t.Errorf("%+v", l)
	}
	n.mustStop("a")
}

func TestSimulatedDaemonsAreIndependent(t *testing.T) {
	n, gpus := newSimulatedNode(t, layout.Host)
	n.supervise()
	for i, id := range []string{"a", "b"} {
		n.mustStart(mps.Daemon{ID: id, Devices: gpus[i : i+1]})
	}
	for i, id := range []string{"a", "b"} {
		if l := n.cudaProgram(id, 0, "attached", "--hold"); len(l.Devices) != 1 || l.Devices[0].UUID != gpus[i] {
			t.Errorf("%s: %+v", id, l)
		}
	}
	first := n.processes("b")
	n.mustStop("a")
	if after := n.processes("b"); !slices.Equal(first, after) {
		t.Errorf("stopping one daemon changed another: %v, %v", first, after)
	}
}

// After a crash of the supervisor, a program in a running container is a client again.
func TestSimulatedClientAfterSupervisorCrash(t *testing.T) {
	n, gpus := newSimulatedNode(t, layout.Host)
	n.superviseSeparately()
	d := mps.Daemon{ID: "a", Devices: gpus[:1]}
	n.mustStart(d)
	n.cudaProgram("a", 0, "attached", "--hold")
	before := n.processes("a")
	n.kill()
	n.supervise()
	n.mustStart(d)
	n.cudaProgram("a", 0, "attached", "--hold")
	if after := n.processes("a"); slices.ContainsFunc(after, func(pid int) bool { return slices.Contains(before, pid) }) {
		t.Errorf("processes %v are left: %v", before, after)
	}
}

// The daemon's processes see its mounts and the driver's device nodes in /dev. Other processes must
// not see these mounts.
func TestMountNamespaceOfDaemon(t *testing.T) {
	n, gpus := newSimulatedNode(t, layout.Host)
	n.supervise()
	n.mustStart(mps.Daemon{ID: "a", Devices: gpus})
	inside := fmt.Sprintf("/proc/%d/root", n.status("a").PID)
	for _, path := range []string{namespace.Pipes + "/control", "/tmp/lib/libcuda.so.1", "/dev/nvidiactl", "/dev/nvidia1", "/dev/null"} {
		if _, err := os.Lstat(inside + path); err != nil {
			t.Error(err)
		}
	}
	for _, path := range []string{"/tmp/lib/libc.so.6", "/dev/kmsg"} {
		if _, err := os.Lstat(inside + path); err == nil {
			t.Errorf("%s is in the namespace", path)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	if strings.Contains(string(mounts), "/tmp/nvidia-mps") || strings.Contains(string(mounts), " /tmp/driver ") {
		t.Error("the daemon's mounts are visible outside")
	}
}
