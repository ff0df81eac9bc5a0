package allocation

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// hardware creates the devices of claims on simulated GPUs. It disables MIG mode on a GPU that a
// claim holds as a whole, and keeps it enabled on all other GPUs.
type hardware struct {
	t     *testing.T
	gpus  map[string]device.GPU
	cards map[string]nvml.Device
	state *state.File
	// fills maps the ID of a GPU instance profile to the compute instance profile that uses the
	// whole GPU instance.
	fills map[uint32]nvml.ComputeInstanceProfileInfo
	// shared has the shared devices that exist now, by the name under which they are published.
	// fractions has the names of those devices that claims share through MPS.
	shared    map[string]*sharedDevice
	fractions map[string]bool
}

// made is a device that the test has created: a partition, a whole GPU with MIG mode disabled, or a
// share of a device.
type made struct {
	name     device.Name
	instance nvml.GpuInstance
	compute  nvml.ComputeInstance
	of       *sharedDevice // the device, if this is a share
}

// newHardware makes a second simulated node, equal to the one that the plugin has scanned. It lacks
// the files that the NVIDIA driver has for each MIG instance, because the test creates thousands of
// MIG instances.
func newHardware(t *testing.T, library string, node *model.Node, models map[string]*model.GPU, gpus []device.GPU) *hardware {
	t.Helper()
	root := t.TempDir()
	f, err := state.Create(filepath.Join(root, "state.bin"), state.Spec{
		Node: node, Models: models, Seed: "allocation", DriverVersion: node.DriverVersion, CUDAVersion: node.CUDAVersion,
	})
	must(t, "make the driver's state", err)
	t.Cleanup(func() { _ = f.Close() })
	// Plain files replace device nodes, because the simulated library only opens them.
	must(t, "make /dev", os.MkdirAll(filepath.Join(root, "dev", "nvidia-caps"), 0o750))
	for _, n := range []string{"nvidiactl", "nvidia0", "nvidia1", "nvidia-caps/nvidia-cap1"} {
		must(t, "make /dev", os.WriteFile(filepath.Join(root, "dev", n), nil, 0o600))
	}
	t.Setenv("NVMLSIM_STATE", f.Path())
	t.Setenv("NVMLSIM_DEV", filepath.Join(root, "dev"))
	lib := nvml.New(nvml.WithLibraryPath(library))
	if ret := lib.Init(); ret != nvml.SUCCESS {
		t.Fatalf("nvmlInit: %v", ret)
	}
	t.Cleanup(func() { _ = lib.Shutdown() })
	h := &hardware{
		t: t, gpus: map[string]device.GPU{}, cards: map[string]nvml.Device{}, state: f,
		fills: map[uint32]nvml.ComputeInstanceProfileInfo{}, shared: map[string]*sharedDevice{},
	}
	for _, g := range gpus {
		card, ret := lib.DeviceGetHandleByPciBusId(string(g.PCIAddress))
		if ret != nvml.SUCCESS {
			t.Fatalf("open %s: %v", g.PCIAddress, ret)
		}
		h.gpus[g.WholeName()], h.cards[g.WholeName()] = g, card
		if !g.MIG.Enabled {
			if err := h.mode(card, nvml.DEVICE_MIG_ENABLE); err != nil {
				t.Fatal(err)
			}
		}
	}
	return h
}

// mode sets the MIG mode of a GPU. If the GPU is in use, the error has the type refused.
func (h *hardware) mode(card nvml.Device, mode int) error {
	activation, ret := card.SetMigMode(mode)
	if ret == nvml.SUCCESS {
		ret = activation
	}
	if ret == nvml.ERROR_IN_USE {
		return refused{ret}
	}
	if ret != nvml.SUCCESS {
		return fmt.Errorf("set the MIG mode to %d: %w", mode, ret)
	}
	return nil
}

// refused is the error for a device that the simulated GPU cannot create next to its existing
// devices.
type refused struct{ nvml.Return }

func (r refused) Error() string { return "the hardware refuses: " + r.Return.Error() }

// create creates the device with this name. For a partition that is only its GPU instance; fill
// adds the compute instance. For a whole GPU it disables MIG mode. For a share it creates the
// shared device or, if the device exists, counts one more claim.
func (h *hardware) create(name device.Name) (made, error) {
	if name.Share {
		return h.createShare(name)
	}
	card := h.cards[name.GPU]
	if name.Partition == nil {
		now, _, ret := card.GetMigMode()
		if ret != nvml.SUCCESS {
			return made{}, fmt.Errorf("read the MIG mode of %s: %w", name.GPU, ret)
		}
		if now == nvml.DEVICE_MIG_DISABLE {
			return made{}, refused{nvml.ERROR_IN_USE} // a claim holds the whole GPU
		}
		return made{name: name}, h.mode(card, nvml.DEVICE_MIG_DISABLE)
	}
	profile, known := h.gpus[name.GPU].Profile(name.Partition.ProfileID)
	if !known {
		return made{}, fmt.Errorf("%s has a profile that the GPU lacks", name)
	}
	instance, ret := card.CreateGpuInstanceWithPlacement(&nvml.GpuInstanceProfileInfo{Id: profile.ID},
		&nvml.GpuInstancePlacement{Start: name.Partition.Start, Size: profile.Size})
	switch ret {
	case nvml.SUCCESS:
		return made{name: name, instance: instance}, nil
	// The GPU has no room next to other GPU instances, or its MIG mode is off.
	case nvml.ERROR_INSUFFICIENT_RESOURCES, nvml.ERROR_NOT_SUPPORTED:
		return made{}, refused{ret}
	default:
		return made{}, fmt.Errorf("create %s: %w", name, ret)
	}
}

// fill creates the compute instance of a partition that create has made. The partition then is a
// MIG device.
func (h *hardware) fill(m *made) error {
	if m.of != nil {
		return h.fillShare(m.of)
	}
	if m.name.Partition == nil {
		return nil
	}
	profile, _ := h.gpus[m.name.GPU].Profile(m.name.Partition.ProfileID)
	whole, known := h.fills[profile.ID]
	for number := 0; !known && number < nvml.COMPUTE_INSTANCE_PROFILE_COUNT; number++ {
		info, ret := m.instance.GetComputeInstanceProfileInfo(number, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		if ret == nvml.SUCCESS && info.SliceCount == profile.Slices && info.MultiprocessorCount > whole.MultiprocessorCount {
			whole = info
		}
	}
	h.fills[profile.ID] = whole
	var ret nvml.Return
	if m.compute, ret = m.instance.CreateComputeInstance(&whole); ret != nvml.SUCCESS {
		return fmt.Errorf("create the compute instance of %s: %w", m.name, ret)
	}
	return nil
}

// destroy removes a created device. For a share it counts one claim less, and removes the shared
// device with its last claim.
func (h *hardware) destroy(m made) error {
	if m.of != nil {
		return h.leaveShare(m.name, m.of)
	}
	if m.name.Partition == nil {
		return h.mode(h.cards[m.name.GPU], nvml.DEVICE_MIG_ENABLE)
	}
	if m.compute != nil {
		if ret := m.compute.Destroy(); ret != nvml.SUCCESS {
			return fmt.Errorf("destroy the compute instance of %s: %w", m.name, ret)
		}
	}
	if ret := m.instance.Destroy(); ret != nvml.SUCCESS {
		return fmt.Errorf("destroy %s: %w", m.name, ret)
	}
	return nil
}

// leftovers describes the GPU instances that still exist, and the GPUs whose compute mode is not
// the default. The result is empty if there are none.
func (h *hardware) leftovers() string {
	var all []string
	for i := range h.state.GPUCount() {
		for _, in := range h.state.GPU(i).GPUInstances() {
			all = append(all, fmt.Sprintf("GPU %d: %+v", i, in))
		}
	}
	for name, card := range h.cards {
		if mode, ret := card.GetComputeMode(); ret != nvml.SUCCESS || mode != nvml.COMPUTEMODE_DEFAULT {
			all = append(all, fmt.Sprintf("%s: compute mode %d, %v", name, mode, ret))
		}
	}
	return strings.Join(all, ", ")
}
