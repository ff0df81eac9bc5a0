package layout

import (
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// DriverAway unloads the driver; with files it is uninstalled too, as a driver container that ends takes its root with it.
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

// DriverBack loads the driver, and installs it first where it is not.
func (c *Config) DriverBack(f *state.File, version, cuda string) error {
	c.NoFiles = false
	if err := c.Save(); err != nil {
		return err
	}
	// A process that sees the files before the driver is loaded is told that it is not loaded; the other way round a
	// process could find a driver without its library.
	if err := f.Load(version, cuda, true); err != nil {
		return err
	}
	return c.Apply(f)
}

// DriverReload unloads the driver and loads it again, of another version where one is given.
func (c *Config) DriverReload(f *state.File, version, cuda string, force bool) error {
	if err := f.Unload(force); err != nil {
		return err
	}
	return c.DriverBack(f, version, cuda)
}

// MakeDevices makes the device nodes that Up was told to leave out.
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
