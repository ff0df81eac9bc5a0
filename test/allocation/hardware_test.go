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

// hardware carries out what claims get. A GPU that is held whole is one whose MIG mode is off.
type hardware struct {
	t     *testing.T
	gpus  map[string]device.GPU
	cards map[string]nvml.Device
	state *state.File
	// fills has the compute instance profile that fills a GPU instance, by the GPU instance's profile.
	fills map[uint32]nvml.ComputeInstanceProfileInfo
	// shared are the devices that claims share, by the share's name; fractions those that MPS serves.
	shared    map[string]*together
	fractions map[string]bool
}

// made is a device that exists, or the promise of a GPU to be whole.
type made struct {
	name     device.Name
	instance nvml.GpuInstance
	compute  nvml.ComputeInstance
	of       *together // what a share is of
}

// newHardware is the node once more, without the files that a driver keeps of instances: thousands are made.
func newHardware(t *testing.T, library string, node *model.Node, models map[string]*model.GPU, gpus []device.GPU) *hardware {
	t.Helper()
	root := t.TempDir()
	f, err := state.Create(filepath.Join(root, "state.bin"), state.Spec{
		Node: node, Models: models, Seed: "allocation", DriverVersion: node.DriverVersion, CUDAVersion: node.CUDAVersion,
	})
	must(t, "make the driver's state", err)
	t.Cleanup(func() { _ = f.Close() })
	// Plain files, which open, stand for device nodes. The capability is that of a host.
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
	h := &hardware{t: t, gpus: map[string]device.GPU{}, cards: map[string]nvml.Device{}, state: f, fills: map[uint32]nvml.ComputeInstanceProfileInfo{}, shared: map[string]*together{}}
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

// mode changes a card's MIG mode. It is a refusal if the card is in use.
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

// refused is the hardware's answer to what it cannot hold.
type refused struct{ nvml.Return }

func (r refused) Error() string { return "the hardware refuses: " + r.Return.Error() }

// make cuts the GPU instance of a device at its place, or takes the whole GPU.
func (h *hardware) make(name device.Name) (made, error) {
	if name.Share {
		return h.makeShare(name)
	}
	card := h.cards[name.GPU]
	if name.Partition == nil {
		now, _, ret := card.GetMigMode()
		if ret != nvml.SUCCESS {
			return made{}, fmt.Errorf("read the MIG mode of %s: %w", name.GPU, ret)
		}
		if now == nvml.DEVICE_MIG_DISABLE {
			return made{}, refused{nvml.ERROR_IN_USE} // somebody has it whole
		}
		return made{name: name}, h.mode(card, nvml.DEVICE_MIG_DISABLE)
	}
	profile, known := h.gpus[name.GPU].Profile(name.Partition.ProfileID)
	if !known {
		return made{}, fmt.Errorf("%s is of a profile that the GPU has not", name)
	}
	instance, ret := card.CreateGpuInstanceWithPlacement(&nvml.GpuInstanceProfileInfo{Id: profile.ID},
		&nvml.GpuInstancePlacement{Start: name.Partition.Start, Size: profile.Size})
	switch ret {
	case nvml.SUCCESS:
		return made{name: name, instance: instance}, nil
	case nvml.ERROR_INSUFFICIENT_RESOURCES, nvml.ERROR_NOT_SUPPORTED: // no room beside the others; no room while the GPU is whole
		return made{}, refused{ret}
	default:
		return made{}, fmt.Errorf("create %s: %w", name, ret)
	}
}

// fill makes the compute instance, so that there is a MIG device.
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

// destroy takes away what was made.
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

// left lists what there is, as the hardware itself has it.
func (h *hardware) left() string {
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
