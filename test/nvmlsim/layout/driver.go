package layout

import (
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// DriverAway unloads the driver. If files is true, it also removes the driver's files, as a driver
// container does when it ends. force unloads the driver even while processes use it.
func (c *Config) DriverAway(f *state.File, files, force bool) error {
	if err := f.Unload(force); err != nil {
		return err
	}
	c.NoFiles = files
	if err := c.Save(); err != nil {
		return err
	}
	return c.Apply(f)
}

// DriverBack loads the driver. If the driver's files are not installed, it installs them too.
func (c *Config) DriverBack(f *state.File, version, cuda string) error {
	c.NoFiles = false
	// Load comes before Apply, because Apply creates /proc/driver and a driver container's files only
	// for a loaded driver.
	if err := f.Load(version, cuda, true); err != nil {
		return err
	}
	c.noteGraphics(f)
	if err := c.Save(); err != nil {
		return err
	}
	return c.Apply(f)
}

// DriverReload unloads the driver and loads it again. A non-empty version replaces the driver's
// version.
func (c *Config) DriverReload(f *state.File, version, cuda string, force bool) error {
	// As in the kernel, /proc/driver/nvidia is another directory after the reload.
	if err := c.DriverAway(f, c.NoFiles, force); err != nil {
		return err
	}
	return c.DriverBack(f, version, cuda)
}

// MakeDevices creates the device nodes that Up left out because of NoDevices. If uvm is true, it
// also creates those of nvidia-uvm that NoUVM left out.
func (c *Config) MakeDevices(f *state.File, uvm bool) error {
	c.NoDevices = false
	if uvm {
		c.NoUVM = false
	}
	if err := c.Save(); err != nil {
		return err
	}
	return c.Apply(f)
}
