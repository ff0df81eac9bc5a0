package layout

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// Kind says how the driver is installed on the node.
type Kind string

const (
	// Host is an installation on the host: libraries are in the distribution's folder, device nodes in
	// /dev.
	Host Kind = "host"
	// Container is an installation by a driver container. Its root, such as /run/nvidia/driver, has
	// its own /dev.
	Container Kind = "container"
	// Bare is a driver root with only the driver's files, such as /home/kubernetes/bin/nvidia. It has
	// no shell and no /dev.
	Bare Kind = "bare"
)

// DefaultRoot is the folder in which the files of a simulated node are created by default.
const DefaultRoot = "/var/lib/nvmlsim"

// StateFile is the state file's name. NVIDIA's CDI discovery takes files named gsp*.bin for GPU
// firmware and mounts them into containers.
const StateFile = "gsp_nvmlsim.bin"

// Config describes the files of one simulated node, its layout. Up saves the Config in the layout's
// root folder, so that later commands need only that folder's path.
type Config struct {
	Kind Kind        `json:"kind"`
	Node *model.Node `json:"node"`
	// Dev is the machine's folder of device nodes, by default /dev.
	Dev string `json:"dev"`
	// LibraryDir is the folder of the driver's libraries, relative to the driver root.
	LibraryDir string `json:"libraryDir"`
	// PlainDevices creates ordinary files in place of device nodes, for machines where mknod is not
	// allowed.
	PlainDevices bool `json:"plainDevices,omitempty"`
	NoDevices    bool `json:"noDevices,omitempty"`
	NoUVM        bool `json:"noUVM,omitempty"`
	// NoFiles says that no driver is installed. The driver root is then empty.
	NoFiles bool `json:"noFiles,omitempty"`
	// MountProc bind-mounts the simulated /proc files over the machine's /proc/driver and
	// /proc/devices.
	MountProc bool `json:"mountProc,omitempty"`
	// MountRoot bind-mounts the root folder of the simulated node at .udev/nvmlsim below Dev. A
	// container that has all of Dev can then change the GPUs, even if its driver root is read-only.
	// It also hides the machine's ldconfig, if the node has none.
	MountRoot bool `json:"mountRoot,omitempty"`
	// GraphicsDevices counts each GPU's MIG devices with graphics at the last load of the driver.
	GraphicsDevices []int `json:"graphicsDevices,omitempty"`

	root string
}

// Sources are the paths of the built libraries and programs that keepSources copies into the root
// folder of a simulated node.
type Sources struct {
	// Library is the path of the built libnvidia-ml.so.1. The folder named standin next to Library
	// holds the other libraries.
	Library string
	// SMI is the path of nvidia-smi, and Hook the path of nvidia-cdi-hook. Each may be empty, and its
	// program is then not installed.
	SMI, Hook string
}

func (c *Config) complete() error {
	switch c.Kind {
	case Host, Container, Bare:
	default:
		return fmt.Errorf("kind %q is none of host, container, bare", c.Kind)
	}
	if c.Dev == "" {
		c.Dev = "/dev"
	}
	if c.LibraryDir == "" {
		c.LibraryDir = "usr/lib/" + multiarch()
		if c.Kind == Bare {
			c.LibraryDir = "lib64"
		}
	}
	if filepath.IsAbs(c.LibraryDir) || !filepath.IsLocal(c.LibraryDir) {
		return fmt.Errorf("library folder %q must be a path below the driver root", c.LibraryDir)
	}
	return nil
}

func multiarch() string {
	if runtime.GOARCH == "arm64" {
		return "aarch64-linux-gnu"
	}
	return "x86_64-linux-gnu"
}

func (c *Config) path(parts ...string) string {
	return filepath.Join(append([]string{c.root}, parts...)...)
}

// DriverRoot returns the path of the driver root.
func (c *Config) DriverRoot() string { return c.path("driver") }

func (c *Config) binDir() string {
	if c.Kind == Bare {
		return "bin"
	}
	return "usr/bin"
}

// DeviceDir returns the folder in which the driver's device nodes are created.
func (c *Config) DeviceDir() string {
	if c.Kind == Container {
		return c.path("driver", "dev")
	}
	return c.Dev
}

// StatePath returns the path of the state file in the simulated node's root folder. The file stays
// there even while no driver is installed.
func StatePath(root string) string { return filepath.Join(root, StateFile) }

func configPath(root string) string { return filepath.Join(root, "layout.yaml") }

// Load reads the configuration that Up saved in the root folder of a simulated node.
func Load(root string) (*Config, error) {
	data, err := os.ReadFile(configPath(root))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("no layout in %s: create one with nvmlsim layout up", root)
	}
	if err != nil {
		return nil, fmt.Errorf("read layout: %w", err)
	}
	c := &Config{root: root}
	if err := yaml.UnmarshalStrict(data, c); err != nil {
		return nil, fmt.Errorf("read layout %s: %w", configPath(root), err)
	}
	return c, c.complete()
}

// Save writes the configuration to the root folder of the simulated node.
func (c *Config) Save() error {
	data, err := yaml.Marshal(c)
	if err != nil {
		return err
	}
	return os.WriteFile(configPath(c.root), data, 0o644)
}

// view is a copy of the simulated driver's state at one moment. The functions that create the
// node's files read it.
type view struct {
	loaded  bool
	version string
	gpus    []gpuView // in the order of the node's GPUs
}

type gpuView struct {
	// present means that the card is in its slot, attached that NVIDIA's driver has it.
	present, attached       bool
	minor                   uint32
	capabilities            []capabilityView
	uuid, product           string
	pciDevice, pciSubsystem uint32
	bar1MiB                 uint32 // 0 if unknown
}

func look(f *state.File) view {
	h := f.Header()
	v := view{loaded: h.DriverLoaded != 0, version: state.Text(h.DriverVersion[:])}
	for i := range f.GPUCount() {
		g := f.GPU(i)
		m := f.Model(int(g.Model))
		gpu := gpuView{
			present: g.Present != 0, attached: g.Present != 0 && g.Attached(), minor: g.Minor, uuid: state.Text(g.UUID[:]),
			product: state.Text(m.Name[:]), pciDevice: m.PCIDeviceID, pciSubsystem: m.PCISubsystemID,
		}
		if m.BAR1MiB != state.Absent {
			gpu.bar1MiB = m.BAR1MiB
		}
		if gpu.attached {
			gpu.capabilities = capabilitiesOf(g)
		}
		v.gpus = append(v.gpus, gpu)
	}
	return v
}

// capabilityView is the MIG capability of a GPU instance or compute instance. name is its folder
// below the GPU's mig folder in /proc, and minor the minor number of its device node.
type capabilityView struct {
	name  string
	minor uint32
}

func capabilitiesOf(g *state.GPU) []capabilityView {
	var all []capabilityView
	for _, instance := range g.GPUInstances() {
		folder := fmt.Sprintf("gi%d", instance.ID)
		all = append(all, capabilityView{folder, g.GPUInstanceMinor(instance.ID)})
		for _, compute := range g.OfInstance(instance.ID) {
			all = append(all, capabilityView{fmt.Sprintf("%s/ci%d", folder, compute.ID), g.ComputeInstanceMinor(instance.ID, compute.ID)})
		}
	}
	return all
}
