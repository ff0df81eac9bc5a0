package bench

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

const (
	simulator  = "../nvmlsim"
	driverName = "gpu.nvidia.com"
	pool       = "node-1"

	// The test binary plays the plugin's workers: role says which.
	role = "BENCH_TEST_CHILD"
)

func TestMain(m *testing.M) {
	var err error
	switch os.Getenv(role) {
	case "partition":
		err = nvidia.ServePartitions(context.Background(), os.Stdin, os.Stdout)
	case "scan":
		err = nvidia.ServeScan(context.Background(), os.Stdin, os.Stdout)
	default:
		m.Run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// stand is the plugin on a simulated node.
type stand struct {
	*prepare.Preparer
	t        *testing.T
	root     string
	gpus     []string
	cuts     *nvidia.Partitions
	snapshot inventory.Snapshot
	claims   map[string]*resourceapi.ResourceClaim // as the API server has them
}

func (s *stand) Snapshot() inventory.Snapshot { return s.snapshot }

// newStand has that many H100s, none of which is cut.
func newStand(t *testing.T, gpus int) *stand {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes with the driver's numbers")
	}
	if out, err := exec.CommandContext(t.Context(), "make", "-s", "-C", simulator, "library").CombinedOutput(); err != nil {
		t.Fatalf("%s: %v", out, err)
	}
	s := &stand{t: t, root: t.TempDir(), claims: map[string]*resourceapi.ResourceClaim{}}
	s.layOut(gpus)
	s.start()
	node, err := nvidia.Isolated(s.paths(), s.command("scan")...)(t.Context())
	if err != nil || len(node.GPUs) != gpus {
		t.Fatalf("%d GPUs were found: %v, %v", len(node.GPUs), node.Problems, err)
	}
	s.snapshot = inventory.Snapshot{Ready: true, Known: true, Node: node}
	for _, g := range node.GPUs {
		s.gpus = append(s.gpus, g.WholeName())
	}
	return s
}

func (s *stand) layOut(gpus int) {
	s.t.Helper()
	library, err := filepath.Abs("../../build/nvmlsim/libnvidia-ml.so.1")
	s.must("find the library", err)
	models, err := model.ReadGPUs(filepath.Join(simulator, "models"))
	s.must("read the models", err)
	text := "driverVersion: \"580.65.06\"\ncudaVersion: \"13.0\"\ngpus:\n"
	for i := range gpus {
		text += fmt.Sprintf("- {model: h100-sxm5-80gb, pci: \"0000:%02x:00.0\", pciRoot: \"pci0000:15\"}\n", 0x20+i)
	}
	file := filepath.Join(s.root, "node.yaml")
	s.must("describe the node", os.WriteFile(file, []byte(text), 0o600))
	node, err := model.ReadNode(file, "bench")
	s.must("describe the node", err)
	s.must("lay the node out", os.MkdirAll(filepath.Join(s.root, "machine", "dev"), 0o750))
	_, err = layout.Up(layout.Options{
		Root: s.root, Models: models, Seed: "bench", Sources: layout.Sources{Library: library},
		Config: layout.Config{Kind: layout.Container, Node: node, Dev: filepath.Join(s.root, "machine", "dev")},
	})
	s.must("lay the node out", err)
}

// start is the plugin with all that it has, except that nobody has installed the hook here.
func (s *stand) start() {
	s.t.Helper()
	records, err := checkpoint.Open(filepath.Join(s.root, "state"), durable.OS{})
	s.must("open the records", err)
	locks, err := lock.NewSet(filepath.Join(s.root, "state", "locks"))
	s.must("open the locks", err)
	s.cuts = nvidia.NewPartitions(s.paths(), s.command("partition")...)
	s.t.Cleanup(s.cuts.Close)
	s.Preparer = prepare.New(prepare.Options{
		DriverName: driverName, Pool: pool, BootID: "boot", Now: time.Now,
		Hardware: s, Specs: cdi.NewStore(filepath.Join(s.root, "cdi")), Records: records, Locks: locks,
		Partitions: s.cuts, MIGEdits: s.paths().CapabilityEdits,
		Reread: func(_ context.Context, _, name string) (*resourceapi.ResourceClaim, error) {
			return s.claims[name], nil
		},
		Verify: func(edits specs.ContainerEdits) error {
			edits.Hooks = nil
			return cdi.Verify(edits, s.paths().Visible)
		},
	})
}

// restart is a plugin that has no worker yet.
func (s *stand) restart() {
	s.t.Helper()
	s.cuts.Close()
	s.start()
}

func (s *stand) paths() nvidia.Paths {
	return nvidia.Paths{
		DriverRoot: filepath.Join(s.root, "driver"), HostDriverRoot: "/run/nvidia/driver",
		Sysfs: filepath.Join(s.root, "sys"), Proc: filepath.Join(s.root, "proc"),
	}
}

func (s *stand) command(as string) []string {
	self, err := os.Executable()
	s.must("find the test itself", err)
	return []string{"env", "NVMLSIM_DEV=" + filepath.Join(s.root, "driver", "dev"), role + "=" + as, self}
}

// hardware sets how the driver locks, and how long it takes to make a GPU instance.
func (s *stand) hardware(lock uint32, cut time.Duration) {
	s.t.Helper()
	f, err := state.Open(layout.StatePath(s.root))
	s.must("open the driver's state", err)
	slow := state.Fault{Kind: state.FaultSlow, GPU: state.AnyGPU, DelayMS: uint64(cut.Milliseconds())} //nolint:gosec // positive
	s.must("slow the driver down", errors.Join(f.ClearFaults(), f.SetCutLock(lock), f.AddFault(slow, "nvmlDeviceCreateGpuInstanceWithPlacement", 0), f.Close()))
}

func (s *stand) must(what string, err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatalf("%s: %v", what, err)
	}
}

// claim is one that was allocated a device.
func (s *stand) claim(device string) *resourceapi.ResourceClaim {
	name := "claim-of-" + device
	if s.claims[name] == nil {
		s.claims[name] = &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + device)},
			Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
				Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: driverName, Pool: pool, Device: device}},
			}}},
		}
	}
	return s.claims[name]
}

// smallest are claims for all partitions of the smallest profile.
func (s *stand) smallest(gpus ...string) []*resourceapi.ResourceClaim {
	var all []*resourceapi.ResourceClaim
	for start := range 7 {
		for _, g := range gpus {
			all = append(all, s.claim(fmt.Sprintf("%s-mig-19-%d", g, start)))
		}
	}
	return all
}

// putBack ends all claims and makes the GPUs whole again.
func (s *stand) putBack() {
	s.t.Helper()
	for _, c := range slices.Collect(maps.Values(s.claims)) {
		s.must("give back", s.Unprepare(s.t.Context(), c.UID))
	}
	for _, g := range s.gpus {
		c := s.claim(g)
		_, err := s.Prepare(s.t.Context(), c)
		s.must("make whole", errors.Join(err, s.Unprepare(s.t.Context(), c.UID)))
	}
	s.restart()
}
