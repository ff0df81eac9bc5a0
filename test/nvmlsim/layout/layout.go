package layout

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// Options are the parameters of Up, which creates the files of a simulated node.
type Options struct {
	Root    string
	Config  Config
	Sources Sources
	Models  map[string]*model.GPU
	// DriverVersion and CUDAVersion override the node file's versions if set.
	DriverVersion, CUDAVersion string
	Seed                       string
	// NoDriver creates the node without a driver. A later call of DriverBack installs and loads one.
	NoDriver bool
	// Fresh discards an existing state file. By default Up keeps the state, like a reboot: it loads
	// the driver again, and injected faults remain.
	Fresh bool
}

// Up creates the files of a simulated node. If they already exist, Up simulates a reboot of the
// node.
func Up(o Options) (*Config, error) {
	root, err := filepath.Abs(o.Root)
	if err != nil {
		return nil, err
	}
	c := o.Config
	c.root = root
	if err := c.complete(); err != nil {
		return nil, err
	}
	c.NoFiles = o.NoDriver
	if err := os.MkdirAll(root, 0o755); err != nil {
		return nil, fmt.Errorf("make layout root: %w", err)
	}
	if err := c.endPassthrough(); err != nil {
		return nil, err
	}
	if err := keepSources(root, o.Sources); err != nil {
		return nil, err
	}
	if err := c.moveLdconfig(); err != nil {
		return nil, err
	}
	f, err := openState(root, &c, o)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	if o.NoDriver {
		if err := f.Unload(true); err != nil {
			return nil, err
		}
	}
	if previous, err := Load(root); err == nil && o.Fresh {
		previous.NoDevices = true // so that applyDevices removes them: the new node may have other minors
		if err := previous.applyDevices(view{}); err != nil {
			return nil, err
		}
	} else if err == nil {
		if err := previous.applyDRM(view{}); err != nil { // the reboot may number them anew
			return nil, err
		}
	}
	c.noteGraphics(f)
	if err := c.Save(); err != nil {
		return nil, err
	}
	return &c, c.Apply(f)
}

// openState opens the existing state file of a simulated node and loads the driver again, as a
// reboot does. If there is no state file, or Fresh is set, it creates one. If the file belongs to
// another node, it returns an error.
func openState(root string, c *Config, o Options) (*state.File, error) {
	path := StatePath(root)
	if _, err := os.Stat(path); err == nil && !o.Fresh {
		f, err := state.Open(path)
		if err != nil {
			return nil, err
		}
		if was := state.Text(f.Header().NodeName[:]); f.GPUCount() != len(c.Node.GPUs) || was != c.Node.Name {
			_ = f.Close()
			return nil, fmt.Errorf("%s is the state of node %q: add --fresh to replace that node", path, was)
		}
		if err := errors.Join(f.Boot(c.Node), f.Load(o.DriverVersion, o.CUDAVersion, true)); err != nil {
			_ = f.Close()
			return nil, err
		}
		return f, nil
	}
	spec := state.Spec{Node: c.Node, Models: o.Models, DriverVersion: o.DriverVersion, CUDAVersion: o.CUDAVersion, Seed: o.Seed}
	if spec.DriverVersion == "" {
		spec.DriverVersion = c.Node.DriverVersion
	}
	if spec.CUDAVersion == "" {
		spec.CUDAVersion = c.Node.CUDAVersion
	}
	return state.Create(path, spec)
}

// Apply creates, updates and removes the simulated node's files on disk so that they match the
// configuration and the state file.
func (c *Config) Apply(f *state.File) error {
	m, err := chooseMajors()
	if err != nil {
		return err
	}
	if err := f.Place(c.root, c.DeviceDir(), m.caps, c.PlainDevices); err != nil {
		return err
	}
	return f.WithCapabilities(func() error { return c.apply(look(f)) })
}

func (c *Config) apply(v view) error {
	steps := []struct {
		what string
		do   func(view) error
	}{
		{"driver root", c.applyDriverRoot},
		{"proc tree", c.applyProc},
		{"sysfs tree", c.applySys},
		{"kernel modules", c.applyModules},
		{"device nodes", c.applyDevices},
		{"mounts", c.applyMounts},
	}
	for _, step := range steps {
		if err := step.do(v); err != nil {
			return fmt.Errorf("lay out %s in %s: %w", step.what, c.root, err)
		}
	}
	return nil
}

// ApplyBinding updates the files that depend on which GPUs NVIDIA's driver has: those in /proc and
// the device nodes.
func (c *Config) ApplyBinding(f *state.File) error {
	return f.WithCapabilities(func() error {
		v := look(f)
		return errors.Join(c.applyProc(v), c.applyDevices(v), c.applyDRM(v))
	})
}

// Down removes the files of a simulated node, including the state file.
func Down(root string) error {
	root, err := filepath.Abs(root)
	if err != nil {
		return err
	}
	c, err := Load(root)
	if err != nil {
		return err
	}
	c.MountProc, c.MountRoot = false, false
	if err := c.applyMounts(view{}); err != nil {
		return err
	}
	c.NoDevices = true
	if err := c.applyDevices(view{}); err != nil {
		return err
	}
	if err := c.endPassthrough(); err != nil {
		return err
	}
	var failed []error
	for _, name := range []string{"driver", "proc", "sys", "lib", "files", "bin", "sysfs.log", StateFile, "layout.yaml"} {
		failed = append(failed, os.RemoveAll(filepath.Join(root, name)))
	}
	// A root that still holds other files stays, and that is not an error.
	if err := os.Remove(root); err != nil && !errors.Is(err, fs.ErrNotExist) {
		entries, readErr := os.ReadDir(root)
		if readErr == nil && len(entries) == 0 {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}

// writeFile writes the file in place instead of by rename, because the file may be bind-mounted
// elsewhere. It leaves a file with equal content untouched.
func writeFile(path, content string, mode fs.FileMode) error {
	if info, err := os.Lstat(path); err == nil && info.Mode() == mode {
		if have, err := os.ReadFile(path); err == nil && string(have) == content {
			return nil
		}
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		return err
	}
	return os.Chmod(path, mode)
}

// empty creates the folder, or removes everything in it. The folder itself is kept because it may
// be a mount point.
func empty(folder string) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	entries, err := os.ReadDir(folder)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if err := os.RemoveAll(filepath.Join(folder, entry.Name())); err != nil {
			return err
		}
	}
	return nil
}
