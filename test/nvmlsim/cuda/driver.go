package cuda

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

const (
	stateFile = "gsp_nvmlsim.bin"
	// reach is where the layout's folder may be mounted for whoever is given all of /dev.
	reach = "/dev/.udev/nvmlsim"

	controlDevice = "nvidiactl"
	uvmDevice     = "nvidia-uvm"
)

// Driver is the driver as this process sees it.
type Driver struct {
	state *state.File
	dev   string
}

// Device is one that CUDA enumerates.
type Device struct {
	state.Device
	UUID      string
	Name      string
	MemoryMiB uint64
}

// Attach finds the node's state and maps it. The driver need not be loaded, nor any device be given.
func Attach() (*Driver, error) {
	above := foldersAbove()
	file, err := openState(above)
	if err != nil {
		return nil, Errorf(NoDevice, "no driver here: %v", err)
	}
	return &Driver{state: file, dev: deviceFolder(above)}, nil
}

// Close gives back all that was taken.
func (d *Driver) Close() error { return d.state.Close() }

// Meet lets the process meet the faults that are ordered for a name.
func (d *Driver) Meet(function string) error { return d.state.Meet(function, state.AnyGPU) }

// Release is the driver's: 580 for 580.65.06.
func (d *Driver) Release() int {
	var release int
	_, _ = fmt.Sscan(strings.ReplaceAll(state.Text(d.state.Header().DriverVersion[:]), ".", " "), &release)
	return release
}

// Init is what every CUDA program does first: the driver must be loaded, and its nodes must open.
func (d *Driver) Init() error {
	if err := d.state.HoldDriver(); err != nil {
		return Errorf(NoDevice, "%v", err)
	}
	for _, name := range []string{controlDevice, uvmDevice} {
		if !d.opens(name, syscall.O_RDWR) {
			return Errorf(Unknown, "%s does not open: the process was not given it", filepath.Join(d.dev, name))
		}
	}
	return nil
}

// foldersAbove are the folders above the running program, the nearest first. The driver root is one of them.
func foldersAbove() []string {
	program, err := os.Executable()
	if err != nil {
		return []string{"/"}
	}
	var all []string
	for folder := filepath.Dir(program); ; folder = filepath.Dir(folder) {
		all = append(all, folder)
		if folder == "/" || folder == "." {
			return all
		}
	}
}

func openState(above []string) (*state.File, error) {
	if named := os.Getenv("NVMLSIM_STATE"); named != "" {
		return state.OpenView(named)
	}
	for _, folder := range above {
		paths, err := filepath.Glob(filepath.Join(folder, "lib/firmware/nvidia/*", stateFile))
		if err != nil || len(paths) == 0 {
			continue
		}
		return openWritable(paths[0], append([]string{reach}, above...))
	}
	return nil, fmt.Errorf("no lib/firmware/nvidia/*/%s above %s", stateFile, above[0])
}

// openWritable opens the state file, where it can by a path that lets it be written.
func openWritable(path string, folders []string) (*state.File, error) {
	f, err := state.OpenView(path)
	if err != nil || !f.ReadOnly() {
		return f, err
	}
	want, err := os.Stat(path)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	for _, folder := range folders {
		candidate := filepath.Join(folder, stateFile)
		have, err := os.Stat(candidate)
		if err != nil || !os.SameFile(want, have) {
			continue
		}
		if writable, err := state.Open(candidate); err == nil {
			return writable, f.Close()
		}
	}
	return f, nil
}

// deviceFolder is chosen as lib/visibility.c does.
func deviceFolder(above []string) string {
	if named := os.Getenv("NVMLSIM_DEV"); named != "" {
		return named
	}
	candidates := []string{"/dev"}
	for _, folder := range above {
		candidates = append(candidates, filepath.Join(folder, "dev"))
	}
	for _, folder := range candidates {
		if _, err := os.Lstat(filepath.Join(folder, controlDevice)); err == nil {
			return folder
		}
	}
	return "/dev"
}

// opens tells whether the process was given a device node: there is no driver behind it, so ENXIO and ENODEV say yes.
func (d *Driver) opens(name string, mode int) bool {
	fd, err := syscall.Open(filepath.Join(d.dev, name), mode|syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0)
	if err == nil {
		_ = syscall.Close(fd)
	}
	return err == nil || errors.Is(err, syscall.ENXIO) || errors.Is(err, syscall.ENODEV)
}

func (d *Driver) capabilityOpens(minor uint32) bool {
	return d.opens(fmt.Sprintf("nvidia-caps/nvidia-cap%d", minor), syscall.O_RDONLY)
}

// visible are the devices that this process was given, GPUs before MIG devices. A GPU in MIG mode is none itself.
func (d *Driver) visible() []Device {
	var gpus, migs []Device
	all := d.capabilityOpens(1) || d.capabilityOpens(2)
	for i := range d.state.GPUCount() {
		g := d.state.GPU(i)
		there := atomic.LoadUint32(&g.Present) != 0 && atomic.LoadUint32(&g.Lost) == 0
		if !there || !d.opens("nvidia"+strconv.Itoa(int(g.Minor)), syscall.O_RDWR) {
			continue
		}
		m := d.state.Model(int(g.Model))
		name := state.Text(m.Name[:])
		if atomic.LoadUint32(&g.MIGCurrent) == 0 {
			gpus = append(gpus, Device{state.Device{GPU: i}, state.Text(g.UUID[:]), name, m.MemoryMiB})
			continue
		}
		for _, instance := range g.GPUInstances() {
			profile, known := m.Profile(instance.Profile)
			if !known || (!all && !d.capabilityOpens(g.GPUInstanceMinor(instance.ID))) {
				continue
			}
			for _, compute := range g.OfInstance(instance.ID) {
				if all || d.capabilityOpens(g.ComputeInstanceMinor(instance.ID, compute.ID)) {
					place := state.Device{GPU: i, MIG: true, Instance: instance.ID, Compute: compute.ID}
					migs = append(migs, Device{place, g.MIGUUID(instance.ID, compute.ID), name + " " + state.Text(profile.Name[:]), profile.MemoryMiB})
				}
			}
		}
	}
	return append(gpus, migs...)
}

// Take makes the process one that computes on the device until Close.
func (d *Driver) Take(device Device) error {
	err := d.state.Take(device.Device)
	if err != nil {
		return Errorf(DeviceUnavailable, "%s is %v", device.UUID, err)
	}
	return nil
}
