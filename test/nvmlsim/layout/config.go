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

// Kind is the way in which the driver is installed.
type Kind string

const (
	// Host is a plain installation: libraries in the distribution's folder, device nodes in /dev.
	Host Kind = "host"
	// Container is a driver container's root, such as /run/nvidia/driver, with a /dev of its own.
	Container Kind = "container"
	// Bare is a driver without anything around it, such as /home/kubernetes/bin/nvidia: no shell, no /dev.
	Bare Kind = "bare"
)

// DefaultRoot is where a node's layout lies unless it is told otherwise.
const DefaultRoot = "/var/lib/nvmlsim"

// StateFile is the state file's name: one that the driver's CDI discovery takes for GPU firmware.
const StateFile = "gsp_nvmlsim.bin"

// Config is what a layout is made from. It is kept in the root, so that later commands need only the root.
type Config struct {
	Kind Kind        `json:"kind"`
	Node *model.Node `json:"node"`
	// Dev is the folder of the machine's device nodes.
	Dev string `json:"dev"`
	// LibraryDir is the libraries' folder below the driver root.
	LibraryDir string `json:"libraryDir"`
	// PlainDevices makes ordinary files instead of device nodes, where mknod is not allowed.
	PlainDevices bool `json:"plainDevices,omitempty"`
	NoDevices    bool `json:"noDevices,omitempty"`
	NoUVM        bool `json:"noUVM,omitempty"`
	// NoFiles says that no driver is installed: the driver root is empty.
	NoFiles bool `json:"noFiles,omitempty"`
	// MountProc puts the proc tree over the machine's /proc/driver and /proc/devices.
	MountProc bool `json:"mountProc,omitempty"`
	// MountRoot shows the layout's folder in .udev/nvmlsim of Dev too: whoever is given all of Dev can then change the GPUs, however the driver root
	// is mounted.
	MountRoot bool `json:"mountRoot,omitempty"`

	root string
}

// Sources are the files that a layout copies from.
type Sources struct {
	// Library is the built libnvidia-ml.so.1; the folder standin beside it holds the other libraries.
	Library string
	// SMI is nvidia-smi; Hook is nvidia-cdi-hook. Either may be empty.
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

// DriverRoot is the driver root's path.
func (c *Config) DriverRoot() string { return c.path("driver") }

func (c *Config) binDir() string {
	if c.Kind == Bare {
		return "bin"
	}
	return "usr/bin"
}

// deviceDir is where the driver's device nodes are made.
func (c *Config) deviceDir() string {
	if c.Kind == Container {
		return c.path("driver", "dev")
	}
	return c.Dev
}

// StatePath is the state file's master copy, which stays while the driver is away.
func StatePath(root string) string { return filepath.Join(root, StateFile) }

func configPath(root string) string { return filepath.Join(root, "layout.yaml") }

// Load reads the configuration of a layout that is there.
func Load(root string) (*Config, error) {
	data, err := os.ReadFile(configPath(root))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("no layout in %s: make one with layout up", root)
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

// Save stores the configuration.
func (c *Config) Save() error {
	data, err := yaml.Marshal(c)
	if err != nil {
		return err
	}
	return os.WriteFile(configPath(c.root), data, 0o644)
}

// view is what the state says about the driver, for drawing the trees.
type view struct {
	loaded  bool
	version string
	gpus    []gpuView // as the node's GPUs are ordered
}

type gpuView struct {
	present                 bool
	capabilities            []capabilityView
	uuid, product           string
	pciDevice, pciSubsystem uint32
}

func look(f *state.File) view {
	h := f.Header()
	v := view{loaded: h.DriverLoaded != 0, version: state.Text(h.DriverVersion[:])}
	for i := range f.GPUCount() {
		m := f.Model(int(f.GPU(i).Model))
		v.gpus = append(v.gpus, gpuView{
			present: f.GPU(i).Present != 0, uuid: state.Text(f.GPU(i).UUID[:]), product: state.Text(m.Name[:]), pciDevice: m.PCIDeviceID, pciSubsystem: m.PCISubsystemID,
			capabilities: capabilitiesOf(f.GPU(i)),
		})
	}
	return v
}

// capabilityView is the capability of an instance: its folder below the GPU's mig, and its minor.
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
