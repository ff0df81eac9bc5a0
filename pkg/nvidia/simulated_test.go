package nvidia

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

const (
	simulator = "../../test/nvmlsim"
	seed      = "scan"
)

// buildSimulator builds the simulated NVML library once. It needs a C compiler.
var buildSimulator = sync.OnceValues(func() (string, error) {
	if out, err := exec.Command("make", "-s", "-C", simulator, "library").CombinedOutput(); err != nil {
		return "", errors.Join(errors.New(string(out)), err)
	}
	return filepath.Abs("../../build/nvmlsim/libnvidia-ml.so.1")
})

// site is a simulated node with the simulated NVML library. Scans run in a child process, as in the
// plugin.
type site struct {
	t    *testing.T
	root string
}

func newSite(t *testing.T, node string, kind layout.Kind, libdir string) site {
	t.Helper()
	described, err := model.ReadNode(filepath.Join(simulator, "nodes", node+".yaml"), seed)
	if err != nil {
		t.Fatal(err)
	}
	// Opening the GPUs of the node "awkward" would take each process half a minute, so reduce it.
	// Tests in attach_test.go set their own time.
	described.AttachCost.Duration = min(described.AttachCost.Duration, 10*time.Millisecond)
	return newSiteOf(t, described, kind, libdir)
}

func newSiteOf(t *testing.T, described *model.Node, kind layout.Kind, libdir string) site {
	t.Helper()
	return newSiteWith(t, described, kind, libdir, "")
}

// newSiteWith returns a site for the described node. If program is set, it is the path of the
// site's nvidia-smi.
func newSiteWith(t *testing.T, described *model.Node, kind layout.Kind, libdir, program string) site {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes with the driver's numbers")
	}
	library, err := buildSimulator()
	if err != nil {
		t.Fatal(err)
	}
	models, err := model.ReadGPUs(filepath.Join(simulator, "models"))
	if err != nil {
		t.Fatal(err)
	}
	s := site{t, t.TempDir()}
	dev := filepath.Join(s.root, "machine", "dev")
	if err := os.MkdirAll(dev, 0o750); err != nil {
		t.Fatal(err)
	}
	if _, err := layout.Up(layout.Options{
		Root: s.root, Models: models, Seed: seed, Sources: layout.Sources{Library: library, SMI: program},
		Config: layout.Config{Kind: kind, Node: described, Dev: dev, LibraryDir: libdir},
	}); err != nil {
		t.Fatal(err)
	}
	if kind == layout.Container {
		dev = filepath.Join(s.root, "driver", "dev")
	}
	t.Setenv("NVMLSIM_DEV", dev) // the test machine may have an NVIDIA driver itself
	t.Setenv(roleVariable, "scan")
	return s
}

func (s site) paths() Paths {
	p := Paths{
		DriverRoot: filepath.Join(s.root, "driver"), HostDriverRoot: "/run/nvidia/driver",
		Sysfs: filepath.Join(s.root, "sys"), Proc: filepath.Join(s.root, "proc"),
	}
	if !isCharDevice(filepath.Join(s.root, "driver", "dev", "nvidiactl")) {
		p.DevRoot = filepath.Join(s.root, "machine")
	}
	return p
}

func (s site) scan() (Node, error) {
	self, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	return Isolated(s.paths(), self)(context.Background())
}

func (s site) mustScan() Node {
	s.t.Helper()
	node, err := s.scan()
	if err != nil {
		s.t.Fatal(err)
	}
	return node
}

func (s site) change(edit func(*layout.Config, *state.File) error) {
	s.t.Helper()
	f, err := state.Open(layout.StatePath(s.root))
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	c, err := layout.Load(s.root)
	if err != nil {
		s.t.Fatal(err)
	}
	if err := errors.Join(edit(c, f), c.Apply(f)); err != nil {
		s.t.Fatal(err)
	}
}

func TestScanFindsDescribedNodes(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(simulator, "nodes", "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatal("no nodes", err)
	}
	models, err := model.ReadGPUs(filepath.Join(simulator, "models"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".yaml")
		t.Run(name, func(t *testing.T) {
			found := newSite(t, name, layout.Container, "").mustScan()
			want, err := model.ReadNode(file, seed)
			if err != nil {
				t.Fatal(err)
			}
			if found.Driver.Version != want.DriverVersion || found.Driver.CUDAVersion != want.CUDAVersion {
				t.Errorf("driver is %v, want %s and %s", found.Driver, want.DriverVersion, want.CUDAVersion)
			}
			if len(found.GPUs) != len(want.GPUs) || len(found.Problems) > 0 {
				t.Fatalf("%d GPUs, problems %v; want %d", len(found.GPUs), found.Problems, len(want.GPUs))
			}
			for i, g := range found.GPUs {
				checkGPU(t, g, want.GPUs[i], models[want.GPUs[i].Model])
			}
		})
	}
}

// architectureNames are the values of the device attribute architecture that the tests expect, by
// NVML's number of the architecture.
var architectureNames = map[uint32]string{
	nvml.DEVICE_ARCH_PASCAL: "Pascal", nvml.DEVICE_ARCH_TURING: "Turing", nvml.DEVICE_ARCH_AMPERE: "Ampere",
	nvml.DEVICE_ARCH_ADA:    "Ada Lovelace",
	nvml.DEVICE_ARCH_HOPPER: "Hopper", nvml.DEVICE_ARCH_BLACKWELL: "Blackwell",
}

func checkGPU(t *testing.T, g GPU, card model.Card, m *model.GPU) {
	t.Helper()
	type facts struct {
		address, uuid, root, name, brand, architecture, capability, addressing string
		minor, numa                                                            int
		mib                                                                    uint64
		engines                                                                bool
	}
	numa := -1
	if g.NUMANode != nil {
		numa = *g.NUMANode
	}
	got := facts{
		string(g.PCIAddress), g.UUID, g.PCIeRoot, g.ProductName, g.Brand, g.Architecture, g.CUDAComputeCapability, g.AddressingMode,
		g.Minor, numa, g.MemoryBytes >> 20, g.Engines != nil,
	}
	want := facts{
		card.PCI, card.UUID, card.PCIRoot, m.ProductName.Value, m.Brand.Value, architectureNames[m.Architecture.NVMLValue],
		m.CUDAComputeCapability.Value,
		addressingMode(m), int(*card.Minor), int(card.NUMANode), m.MemoryTotalMiB.Value, m.MIG.Supported.Value,
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(facts{})); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(describedMIG(card, m), g.MIG, cmpopts.IgnoreFields(device.MIG{}, "Instances")); diff != "" {
		t.Error(diff)
	}
	if want := expectedInstances(card); g.MIG != nil && len(g.MIG.Instances) != want {
		t.Errorf("found %d instances, want %d: %+v", len(g.MIG.Instances), want, g.MIG.Instances)
	}
	if len(g.Edits.DeviceNodes) != 1 || len(g.Edits.Hooks)+len(g.Edits.Mounts)+len(g.Edits.Env) > 0 {
		t.Errorf("its edits are %+v", g.Edits)
	}
}

// addressingMode returns the addressing mode that a scan should report for the model. It is empty
// if NVML does not support the query.
func addressingMode(m *model.GPU) string {
	if m.AddressingMode.Value == "NotSupported" {
		return ""
	}
	if m.AddressingMode.Known {
		return m.AddressingMode.Value
	}
	return "None"
}

func TestEveryDriverLayoutIsComplete(t *testing.T) {
	for _, tc := range []struct {
		kind   layout.Kind
		libdir string
	}{
		{layout.Host, ""}, {layout.Container, ""}, {layout.Bare, ""},
		{layout.Container, "usr/lib/x86_64-linux-gnu/nvidia/current"}, {layout.Host, "usr/local/nvidia/lib64"},
	} {
		t.Run(string(tc.kind)+" "+tc.libdir, func(t *testing.T) {
			node := newSite(t, "t4-x1", tc.kind, tc.libdir).mustScan()
			if len(node.GPUs) != 1 {
				t.Fatal(node.Problems)
			}
			var links, folders string
			for _, h := range node.Common.Hooks {
				switch h.Args[1] {
				case "create-symlinks":
					links += strings.Join(h.Args, " ")
				case "update-ldcache":
					folders += strings.Join(h.Args, " ")
				}
			}
			if !strings.Contains(links, "libcuda.so.1") || !strings.Contains(folders, tc.libdir) {
				t.Errorf("libcuda.so.1 would not be found: links %s; folders %s", links, folders)
			}
		})
	}
}

func TestScanOffersHealthyGPUsOfBrokenNode(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Container, "")
	s.change(func(_ *layout.Config, f *state.File) error {
		return errors.Join(
			f.AddFault(state.Fault{Kind: state.FaultFail, GPU: 2, Error: uint32(nvml.ERROR_GPU_IS_LOST)}, "*", 0),
			f.AddFault(state.Fault{Kind: state.FaultFail, GPU: 5, Error: uint32(nvml.ERROR_UNKNOWN)}, "nvmlDeviceGetMemoryInfo", 0),
		)
	})
	node := s.mustScan()
	if len(node.GPUs) != 6 || len(node.Problems) != 2 || node.Problems[0].PCIAddress != "0000:52:00.0" ||
		node.Problems[1].PCIAddress != "0000:c3:00.0" {
		t.Errorf("%d GPUs, problems %v", len(node.GPUs), node.Problems)
	}
}

func TestScanFollowsDriverUpgrade(t *testing.T) {
	s := newSite(t, "l40s-x2", layout.Container, "")
	first := s.mustScan()
	before := NewChangeDetector(s.paths()).Fingerprint()

	s.change(func(c *layout.Config, f *state.File) error { return c.DriverAway(f, false, false) })
	var unready *NotReadyError
	if _, err := s.scan(); !errors.As(err, &unready) {
		t.Errorf("without the driver: %v", err)
	}
	if NewChangeDetector(s.paths()).Fingerprint() == before {
		t.Error("the fingerprint ignores the driver's removal")
	}
	before = NewChangeDetector(s.paths()).Fingerprint()
	s.change(func(c *layout.Config, f *state.File) error { return c.DriverBack(f, "590.48.01", "13.1") })
	if NewChangeDetector(s.paths()).Fingerprint() == before {
		t.Error("the fingerprint ignores the new driver")
	}
	second := s.mustScan()
	if second.Driver.Version != "590.48.01" || second.Driver.CUDAVersion != "13.1" || !hasLibrary(second.Common, "libcuda.so.590.48.01") {
		t.Errorf("%v, %v", second.Driver, second.Common.Mounts)
	}
	if diff := cmp.Diff(first.GPUs, second.GPUs); diff != "" {
		t.Errorf("the GPUs changed:\n%s", diff)
	}
}
