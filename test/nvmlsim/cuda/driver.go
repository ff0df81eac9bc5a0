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
	// reach is the folder under which a container that has all of /dev finds the simulated node's
	// files.
	reach = "/dev/.udev/nvmlsim"

	controlDevice = "nvidiactl"
	uvmDevice     = "nvidia-uvm"
)

// Driver is the simulated GPU driver as the current process sees it.
type Driver struct {
	state *state.File
	dev   string
}

// Device is a GPU or MIG device that CUDA enumerates.
type Device struct {
	state.Device
	UUID      string
	Name      string
	MemoryMiB uint64
}

// Attach finds the node's state file and maps it. It works even if no driver is loaded and the
// process has no device.
func Attach() (*Driver, error) {
	above := foldersAbove()
	file, err := openState(above)
	if err != nil {
		return nil, Errorf(NoDevice, "no simulated driver: %v", err)
	}
	return &Driver{state: file, dev: deviceFolder(above)}, nil
}

// Close releases the devices that the process computes on.
func (d *Driver) Close() error { return d.state.Close() }

// Meet applies the faults that a test injected for the operation with this name: the call may wait,
// return an error, or kill the process.
func (d *Driver) Meet(function string) error { return d.state.Meet(function, state.AnyGPU) }

// Release returns the first number of the driver version: 580 for 580.65.06.
func (d *Driver) Release() int {
	var release int
	_, _ = fmt.Sscan(strings.ReplaceAll(state.Text(d.state.Header().DriverVersion[:]), ".", " "), &release)
	return release
}

// Init does what the initialisation of CUDA does to the driver. It returns an error if no driver is
// loaded or if the driver's device nodes cannot be opened.
func (d *Driver) Init() error {
	if err := d.state.HoldDriver(); err != nil {
		return Errorf(NoDevice, "%v", err)
	}
	for _, name := range []string{controlDevice, uvmDevice} {
		if !d.opens(name, syscall.O_RDWR) {
			return Errorf(Unknown, "cannot open device node %s: the process has no access to it", filepath.Join(d.dev, name))
		}
	}
	return nil
}

// foldersAbove returns the folders above the running program, nearest first. One of these folders
// is the driver root.
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

// openWritable opens the state file at path. If path is read-only, it looks in folders for a
// writable path to the same file. If there is none, it returns a read-only mapping.
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

// deviceFolder returns the folder of the driver's device nodes. The simulated NVML library chooses
// the folder by the same rules (lib/visibility.c).
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

// opens reports whether the process has access to a device node. No kernel driver serves the
// simulated device numbers, so ENXIO and ENODEV too mean that access was allowed.
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

// visible returns the devices that this process can use, GPUs before MIG devices. A GPU in MIG mode
// appears only through its MIG devices.
func (d *Driver) visible() []Device {
	var gpus, migs []Device
	all := d.capabilityOpens(1) || d.capabilityOpens(2)
	for i := range d.state.GPUCount() {
		g := d.state.GPU(i)
		there := atomic.LoadUint32(&g.Present) != 0 && atomic.LoadUint32(&g.Lost) == 0 && g.Attached()
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

// Take registers this process as computing on the device until Close. It fails if the GPU's compute
// mode does not allow that.
func (d *Driver) Take(device Device) error {
	err := d.state.Take(device.Device)
	if err != nil {
		return Errorf(DeviceUnavailable, "%s is %v", device.UUID, err)
	}
	return nil
}
