package nvidiatest

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

const (
	Simulator = "../../../test/nvmlsim"
	Seed      = "scan"
)

// buildSimulator builds the simulated NVML library once. It needs a C compiler.
var buildSimulator = sync.OnceValues(func() (string, error) {
	if out, err := exec.Command("make", "-s", "-C", Simulator, "library").CombinedOutput(); err != nil {
		return "", errors.Join(errors.New(string(out)), err)
	}
	return filepath.Abs("../../../build/nvmlsim/libnvidia-ml.so.1")
})

// Site is a simulated node with the simulated NVML library. Scans run in a child process, as in the
// plugin.
type Site struct {
	T    *testing.T
	Root string
}

// NewSite returns a site like the simulator's node with this name. libdir is the directory of the
// driver's libraries, empty for the usual one.
func NewSite(t *testing.T, node string, kind layout.Kind, libdir string) Site {
	t.Helper()
	described, err := model.ReadNode(filepath.Join(Simulator, "nodes", node+".yaml"), Seed)
	if err != nil {
		t.Fatal(err)
	}
	// Opening the GPUs of the node "awkward" would take each process half a minute, so reduce it.
	// Tests in attach_test.go set their own time.
	described.AttachCost.Duration = min(described.AttachCost.Duration, 10*time.Millisecond)
	described.Passthrough = false // a sysfs of plain files: no server of package sysfs runs here
	return NewSiteOf(t, described, kind, libdir)
}

// NewSiteOf returns a site for the described node.
func NewSiteOf(t *testing.T, described *model.Node, kind layout.Kind, libdir string) Site {
	t.Helper()
	return NewSiteWith(t, described, kind, libdir, "")
}

// NewSiteWith returns a site for the described node. If program is set, it is the path of the
// site's nvidia-smi.
func NewSiteWith(t *testing.T, described *model.Node, kind layout.Kind, libdir, program string) Site {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes with the driver's numbers")
	}
	library, err := buildSimulator()
	if err != nil {
		t.Fatal(err)
	}
	models, err := model.ReadGPUs(filepath.Join(Simulator, "models"))
	if err != nil {
		t.Fatal(err)
	}
	s := Site{t, t.TempDir()}
	dev := filepath.Join(s.Root, "machine", "dev")
	for _, dir := range []string{dev, filepath.Join(s.Root, "state")} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := layout.Up(layout.Options{
		Root: s.Root, Models: models, Seed: Seed, Sources: layout.Sources{Library: library, SMI: program},
		Config: layout.Config{Kind: kind, Node: described, Dev: dev, LibraryDir: libdir},
	}); err != nil {
		t.Fatal(err)
	}
	if kind == layout.Container {
		dev = filepath.Join(s.Root, "driver", "dev")
	}
	t.Setenv("NVMLSIM_DEV", dev) // the test machine may have an NVIDIA driver itself
	return s
}

func (s Site) Paths() nvidia.Paths {
	p := nvidia.Paths{
		DriverRoot: filepath.Join(s.Root, "driver"), HostDriverRoot: "/run/nvidia/driver",
		Sysfs: filepath.Join(s.Root, "sys"), Proc: filepath.Join(s.Root, "proc"), State: filepath.Join(s.Root, "state"),
	}
	if _, err := os.Lstat(filepath.Join(s.Root, "driver", "dev", "nvidiactl")); err != nil {
		p.DevRoot = filepath.Join(s.Root, "machine")
	}
	return p
}

func (s Site) Change(edit func(*layout.Config, *state.File) error) {
	s.T.Helper()
	f, err := state.Open(layout.StatePath(s.Root))
	if err != nil {
		s.T.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	c, err := layout.Load(s.Root)
	if err != nil {
		s.T.Fatal(err)
	}
	if err := errors.Join(edit(c, f), c.Apply(f)); err != nil {
		s.T.Fatal(err)
	}
}

func (s Site) Fault(f state.Fault, function string, times int) {
	s.T.Helper()
	s.Change(func(_ *layout.Config, file *state.File) error { return file.AddFault(f, function, times) })
}

// AwaitHit returns when the only fault that was injected into the site has triggered, or when ctx
// ends.
func (s Site) AwaitHit(ctx context.Context) {
	f, err := state.Open(layout.StatePath(s.Root))
	if err != nil {
		s.T.Error(err)
		return
	}
	defer func() { _ = f.Close() }()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for atomic.LoadUint64(&f.Fault(0).Hits) == 0 {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// Card returns the card of the site with this index.
func (s Site) Card(index int) device.Card {
	s.T.Helper()
	f, err := state.Open(layout.StatePath(s.Root))
	if err != nil {
		s.T.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	g := f.GPU(index)
	return device.Card{PCIAddress: device.PCIAddress(g.Address()), UUID: state.Text(g.UUID[:])}
}

// Patience is how long tests wait for a signal before they fail. No test expects that much time to
// pass.
const Patience = 30 * time.Second
