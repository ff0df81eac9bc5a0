package conformance

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/sirupsen/logrus"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/smi"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// site is a simulated node with all its files: driver root, /proc, /sys and device nodes.
type site struct {
	t       *testing.T
	root    string
	dev     string
	kind    layout.Kind
	options layout.Options
}

func newSite(t *testing.T, node string, kind layout.Kind, smiPath string) *site {
	t.Helper()
	needSimulator(t)
	folder := t.TempDir()
	s := &site{t: t, root: filepath.Join(folder, "node"), dev: filepath.Join(folder, "dev"), kind: kind}
	if err := os.Mkdir(s.dev, 0o755); err != nil {
		t.Fatal(err)
	}
	s.options = layout.Options{
		Root: s.root, Models: readModels(t), Seed: "site",
		Config:  layout.Config{Kind: kind, Node: readNode(t, node), Dev: s.dev, PlainDevices: os.Getuid() != 0},
		Sources: layout.Sources{Library: simulated, SMI: smiPath},
	}
	if _, err := layout.Up(s.options); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *site) driverRoot() string { return filepath.Join(s.root, "driver") }

func (s *site) libFolder() string {
	if s.kind == layout.Bare {
		return filepath.Join(s.driverRoot(), "lib64")
	}
	paths, err := filepath.Glob(filepath.Join(s.driverRoot(), "usr/lib/*-linux-gnu"))
	if err != nil || len(paths) != 1 {
		s.t.Fatalf("library folders %v (%v)", paths, err)
	}
	return paths[0]
}

func (s *site) nvml() string { return filepath.Join(s.libFolder(), "libnvidia-ml.so.1") }

// environment returns the environment variables that a program needs to use the simulated files if
// they are not mounted over the machine's. For a driver container the variables omit /dev, because
// the library finds the /dev of the driver root.
func (s *site) environment() []string {
	env := []string{"LD_LIBRARY_PATH=" + s.libFolder(), libraryVariable + "=" + s.nvml()}
	if s.kind != layout.Container {
		env = append(env, "NVMLSIM_DEV="+s.dev)
	}
	return env
}

func (s *site) change(do func(*layout.Config, *state.File) error) {
	s.t.Helper()
	c, err := layout.Load(s.root)
	if err != nil {
		s.t.Fatal(err)
	}
	f, err := state.Open(layout.StatePath(s.root))
	if err != nil {
		s.t.Fatal(err)
	}
	if err := errors.Join(do(c, f), f.Close()); err != nil {
		s.t.Fatal(err)
	}
}

// The library must find the state file by its path relative to the library itself, in every kind of
// driver root.
func TestLibraryFindsItsState(t *testing.T) {
	for _, kind := range []layout.Kind{layout.Host, layout.Container, layout.Bare} {
		t.Run(string(kind), func(t *testing.T) {
			s := newSite(t, "l40s-x2", kind, "")
			start(t, "version", s.environment()...).expect("version 0 580.95.05")
		})
	}
}

// After a driver upgrade, the driver must refuse a library of the old version. A container that was
// started before the upgrade still has such a library.
func TestLibraryOfAnotherVersionIsRefused(t *testing.T) {
	s := newSite(t, "l40s-x2", layout.Host, "")
	old := filepath.Join(t.TempDir(), "libnvidia-ml.so.580.95.05")
	if out, err := exec.Command("cp", s.nvml(), old).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	env := append(s.environment(), libraryVariable+"="+old, "NVMLSIM_STATE="+layout.StatePath(s.root))
	before := start(t, "version", env...)
	before.expect("version 0 580.95.05")
	before.end()
	s.change(func(c *layout.Config, f *state.File) error { return c.DriverReload(f, "590.48.01", "13.1", false) })
	start(t, "version", env...).expect(fmt.Sprintf("init %d", nvml.ERROR_LIB_RM_VERSION_MISMATCH))
	start(t, "version", s.environment()...).expect("version 0 590.48.01")
}

// NVIDIA's CDI discovery, unchanged, must mount the state file, the libraries and nvidia-smi into
// containers.
func TestCDIDiscoveryFindsEverything(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: CDI discovery wants device nodes")
	}
	program := filepath.Join(t.TempDir(), "nvidia-smi")
	if err := os.WriteFile(program, []byte("#!/bin/sh\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []layout.Kind{layout.Host, layout.Container, layout.Bare} {
		t.Run(string(kind), func(t *testing.T) {
			s := newSite(t, "dgx-h100", kind, program)
			t.Setenv("NVMLSIM_STATE", layout.StatePath(s.root))
			t.Setenv("NVMLSIM_DEV", s.dev)
			devRoot := filepath.Dir(s.dev)
			if kind == layout.Container {
				devRoot = s.driverRoot()
				t.Setenv("NVMLSIM_DEV", filepath.Join(devRoot, "dev"))
			}
			library := initialize(t)
			quiet := logrus.New()
			quiet.SetOutput(io.Discard)
			discovery, err := nvcdi.New(
				nvcdi.WithNvmlLib(library), nvcdi.WithDeviceLib(device.New(library)), nvcdi.WithMode("nvml"), nvcdi.WithLogger(quiet),
				nvcdi.WithDriverRoot(s.driverRoot()), nvcdi.WithDevRoot(devRoot), nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils),
			)
			if err != nil {
				t.Fatal(err)
			}
			edits, err := discovery.GetCommonEdits()
			if err != nil {
				t.Fatal(err)
			}
			var mounted, nodes []string
			for _, mount := range edits.Mounts {
				mounted = append(mounted, mount.HostPath)
			}
			for _, node := range edits.DeviceNodes {
				nodes = append(nodes, node.Path)
			}
			for _, wanted := range []string{
				"/lib/firmware/nvidia/580.65.06/" + layout.StateFile, "/libnvidia-ml.so.580.65.06", "/libcuda.so.580.65.06", "/nvidia-smi",
				"/nvidia-cuda-mps-control", "/nvidia-cuda-mps-server",
			} {
				if !anyEndsWith(mounted, wanted) {
					t.Errorf("%s is not mounted: %v", wanted, mounted)
				}
			}
			for _, wanted := range []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"} {
				if !anyEndsWith(nodes, wanted) {
					t.Errorf("%s is no device node of it: %v", wanted, nodes)
				}
			}
			specs, err := discovery.GetDeviceSpecsByID("3")
			if err != nil || len(specs) != 1 || !anyEndsWith([]string{specs[0].ContainerEdits.DeviceNodes[0].Path}, "/dev/nvidia3") {
				t.Errorf("specs of GPU 3: %v (%v)", specs, err)
			}
		})
	}
}

func anyEndsWith(paths []string, end string) bool {
	for _, path := range paths {
		if strings.HasSuffix(path, end) {
			return true
		}
	}
	return false
}

// realSMI returns the path of the real nvidia-smi, and skips the test if it is not available.
func realSMI(t *testing.T) string {
	t.Helper()
	needSimulator(t)
	program, err := smi.Fetch(context.Background(), smi.DefaultSuite)
	if errors.Is(err, smi.ErrUnavailable) {
		t.Skipf("NOT TESTED, the real nvidia-smi is missing: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return program
}

// smi runs nvidia-smi on the node and returns its output.
func (s *site) smi(args ...string) (string, error) {
	command := exec.Command(filepath.Join(s.driverRoot(), "usr/bin/nvidia-smi"), args...)
	command.Env = append(os.Environ(), s.environment()...)
	out, err := command.CombinedOutput()
	return string(out), err
}

// The real nvidia-smi must run with the simulated library and show the node's GPUs.
func TestRealNvidiaSMIRuns(t *testing.T) {
	program := realSMI(t)
	for _, node := range nodeNames(t) {
		t.Run(node, func(t *testing.T) {
			s := newSite(t, node, layout.Host, program)
			run := s.smi
			list, err := run("-L")
			if err != nil {
				t.Fatalf("nvidia-smi -L: %v\n%s", err, list)
			}
			table, err := run()
			if err != nil {
				t.Fatalf("nvidia-smi: %v\n%s", err, table)
			}
			details, err := run("-q")
			if err != nil {
				t.Fatalf("nvidia-smi -q: %v\n%s", err, details)
			}
			models := readModels(t)
			for i, card := range s.options.Config.Node.GPUs {
				m := models[card.Model]
				line := fmt.Sprintf("GPU %d: %s (UUID: %s)\n", i, m.ProductName.Value, card.UUID)
				if !strings.Contains(list, line) {
					t.Errorf("nvidia-smi -L does not say %q:\n%s", line, list)
				}
				memory := fmt.Sprintf("/ %6dMiB", m.MemoryTotalMiB.Value)
				if !m.HasMemoryInfo() {
					memory = "| Not Supported" // as the real nvidia-smi prints on a DGX Spark
				}
				if !strings.Contains(table, memory) {
					t.Errorf("nvidia-smi does not say %q:\n%s", memory, table)
				}
				if !strings.Contains(details, card.UUID) {
					t.Errorf("nvidia-smi -q does not say %s", card.UUID)
				}
			}
			if strings.Count(list, "(UUID: GPU-") != len(s.options.Config.Node.GPUs) {
				t.Errorf("nvidia-smi -L lists others too:\n%s", list)
			}
		})
	}
}
