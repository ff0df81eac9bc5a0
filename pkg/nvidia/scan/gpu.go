package scan

import (
	"fmt"
	"path/filepath"
	"sync/atomic"

	nvlib "github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/mig"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/wake"
)

// gpuReading tracks how far the reading of one GPU has come, so that a problem can name the GPU's
// PCI address even if a later query hangs.
type gpuReading struct {
	address  atomic.Pointer[device.PCIAddress]
	progress wake.Signal
	onOpen   func()
	// omitted is what was left out. Only the reading itself uses it until it ends.
	omitted []nvidia.Omission
}

// answered is called after each NVML answer for the GPU. It restarts the time limit for reading
// this GPU.
func (r *gpuReading) answered() {
	r.onOpen()
	r.progress.Wake()
}

func (r *gpuReading) known() device.PCIAddress {
	if a := r.address.Load(); a != nil {
		return *a
	}
	return ""
}

// gpu reads one GPU. It returns nil without an error for a card that only drives a display. If it
// returns both a GPU and an error, the GPU can be offered as a whole, but not as MIG partitions.
func (s scanner) gpu(index int, d device.Driver, r *gpuReading) (*nvidia.GPU, error) {
	handle, ret := s.lib.DeviceGetHandleByIndex(index)
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("open the GPU with index %d: %w", index, nvmlx.ToError(ret))
	}
	r.answered()
	card, err := nvlib.New(s.lib).NewDevice(handle)
	if err != nil {
		return nil, err
	}
	g := device.GPU{}
	if g.PCIAddress, err = pciAddress(card); err != nil {
		return nil, err
	}
	r.address.Store(new(g.PCIAddress))
	r.answered()
	binding := host.Binding(s.paths.Sysfs, g.PCIAddress) // before the number of its device node
	if g.ProductName, ret = card.GetName(); ret != nvml.SUCCESS {
		return nil, fmt.Errorf("read the product name: %w", nvmlx.ToError(ret))
	}
	if drivesADisplay[g.ProductName] {
		return nil, nil
	}
	if err := identity(card, &g, r.answered); err != nil {
		return nil, err
	}
	node := filepath.Join(s.paths.DeviceRoot(), "dev", fmt.Sprintf("nvidia%d", g.Minor))
	if !hostfile.IsCharDevice(node) {
		return nil, fmt.Errorf("device node %s is missing: run nvidia-modprobe -c=%d on the node", s.paths.Host(node), g.Minor)
	}
	partial, err := s.readMIG(handle, &g, r)
	if err != nil {
		return nil, err
	}
	r.answered()
	locate(s.paths.Sysfs, &g)
	g.ContainerLimits = s.containerLimits(handle)
	r.answered()
	if s.paths.Passthrough {
		g.Firmware = firmware(handle)
		r.answered()
	}
	own, refused, err := s.ownEdits(handle, g, d)
	if err != nil {
		return nil, err
	}
	r.omitted = append(r.omitted, refused...)
	return &nvidia.GPU{GPU: g, Edits: own, Binding: binding}, partial
}

// readMIG reads the MIG profiles and MIG instances into g. If that fails on a card with MIG off,
// the card can still be offered as a whole GPU, and partial says why not as partitions. If it fails
// on a card with MIG on, the card is unusable, and readMIG returns err.
func (s scanner) readMIG(card nvml.Device, g *device.GPU, r *gpuReading) (partial, err error) {
	m := mig.NewReader(s.paths, s.lib, r.answered)
	if g.MIG, err = nvmlx.MIGMode(s.lib, card); g.MIG == nil || err != nil {
		return nil, err
	}
	setLimits(card, g.MIG)
	kinds, err := m.Kinds(card)
	g.Engines = engines(kinds)
	if err == nil {
		var unknown []string
		g.MIG.Profiles, unknown, err = m.Profiles(card)
		for _, name := range unknown {
			r.omitted = append(r.omitted, nvidia.Omission{
				Kind: nvidia.UnknownProfile, Name: fmt.Sprintf("MIG profile %s of %s", name, g.PCIAddress),
				Message: "its placements have several sizes, which this version cannot offer",
			})
		}
	}
	if err == nil && g.MIG.Enabled {
		g.MIG.Instances, err = m.Instances(card, g.Minor)
	}
	switch {
	case err == nil:
		return nil, nil
	case g.MIG.Enabled:
		return nil, &uncertainError{g.UUID, err}
	default:
		g.MIG.Profiles = nil
		return fmt.Errorf("offered as a whole only, because its MIG profiles cannot be read: %w", err), nil
	}
}

// drivesADisplay are the product names of DGX Station cards that only drive a display.
var drivesADisplay = map[string]bool{"DGX Display": true, "NVIDIA DGX Display": true}

func pciAddress(card nvlib.Device) (device.PCIAddress, error) {
	id, err := card.GetPCIBusID()
	if err != nil {
		return "", fmt.Errorf("read the PCI address: %w", err)
	}
	return device.ParsePCIAddress(id)
}

// identity reads the attributes by which a claim can select the card. It fails if the UUID, minor
// number or memory size cannot be read. Other attributes that NVML does not report stay empty or
// unknown.
func identity(card nvlib.Device, g *device.GPU, progress func()) error {
	var ret nvml.Return
	if g.UUID, ret = card.GetUUID(); ret != nvml.SUCCESS {
		return fmt.Errorf("read the UUID: %w", nvmlx.ToError(ret))
	}
	progress()
	if g.Minor, ret = card.GetMinorNumber(); ret != nvml.SUCCESS {
		return fmt.Errorf("read the minor number: %w", nvmlx.ToError(ret))
	}
	progress()
	// A GPU that uses the host's memory, such as GB10, reports no memory size.
	memory, ret := card.GetMemoryInfo()
	if ret != nvml.SUCCESS && ret != nvml.ERROR_NOT_SUPPORTED {
		return fmt.Errorf("read the memory size: %w", nvmlx.ToError(ret))
	}
	progress()
	g.MemoryBytes = memory.Total
	g.Brand = orUnknown(card.GetBrandAsString())
	progress()
	g.Architecture = orUnknown(card.GetArchitectureAsString())
	progress()
	g.CUDAComputeCapability, _ = card.GetCudaComputeCapabilityAsString()
	progress()
	g.AddressingMode, _ = card.GetAddressingModeAsString()
	return nil
}

// firmware reads what tells whether a virtual machine has changed the card.
func firmware(card nvml.Device) *device.Firmware {
	f := &device.Firmware{}
	if version, ret := card.GetVbiosVersion(); ret == nvml.SUCCESS {
		f.VBIOS = version
	}
	if _, pending, ret := card.GetEccMode(); ret == nvml.SUCCESS {
		f.ECC = map[nvml.EnableState]string{nvml.FEATURE_ENABLED: "enabled", nvml.FEATURE_DISABLED: "disabled"}[pending]
	}
	return f
}

func orUnknown(name string, err error) string {
	if err != nil {
		return "Unknown"
	}
	return name
}

// engines returns the number of engines of the whole card. NVML reports them only for MIG profiles,
// so it takes the maximum of the largest profiles. Profiles of one size differ in media engines
// ("+me", "-me").
func engines(kinds []mig.Kind) *device.Engines {
	var e *device.Engines
	var slices uint32
	for _, p := range kinds {
		if p.SliceCount < slices {
			continue
		}
		if e == nil || p.SliceCount > slices {
			e, slices = &device.Engines{}, p.SliceCount
		}
		e.Multiprocessors = max(e.Multiprocessors, p.MultiprocessorCount)
		e.CopyEngines = max(e.CopyEngines, p.CopyEngineCount)
		e.Decoders = max(e.Decoders, p.DecoderCount)
		e.Encoders = max(e.Encoders, p.EncoderCount)
		e.JPEGEngines = max(e.JPEGEngines, p.JpegCount)
		e.OFAEngines = max(e.OFAEngines, p.OfaCount)
	}
	return e
}

// locate sets the PCIe root and NUMA node of g. They stay empty if sysfs does not report them.
func locate(sysfs string, g *device.GPU) {
	fs := deviceattribute.WithFSFromRoot(sysfs)
	if a, err := deviceattribute.GetPCIeRootAttributeByPCIBusID(string(g.PCIAddress), fs); err == nil {
		g.PCIeRoot = *a.Value.StringValue
	}
	if a, err := deviceattribute.GetNUMANodeAttributeByPCIBusID(string(g.PCIAddress), deviceattribute.ScalarAttribute, fs); err == nil {
		g.NUMANode = new(int(*a.Value.IntValue))
	}
}

// firstWithoutReset is the major CUDA compute capability of Hopper. Earlier cards change MIG mode
// only with a reset:
// https://docs.nvidia.com/datacenter/tesla/mig-user-guide/getting-started-with-mig.html.
const firstWithoutReset = 9

// setLimits sets ModeFixed if the MIG mode of this card cannot change without a reset. It sets
// ReadOnly for a vGPU, which can use the host's MIG instances but create none.
func setLimits(card nvml.Device, to *device.MIG) {
	to.ModeFixed = needsReset(card)
	if mode, ret := card.GetVirtualizationMode(); ret == nvml.SUCCESS {
		to.ReadOnly = mode == nvml.GPU_VIRTUALIZATION_MODE_VGPU
	}
}

// needsReset reports whether only a reset changes the card's MIG mode. Older drivers cannot say so.
// Then the card's generation decides, and a card of unknown generation needs a reset.
func needsReset(card nvml.Device) bool {
	field := []nvml.FieldValue{{FieldId: nvml.FI_DEV_IS_RESETLESS_MIG_SUPPORTED}}
	if ret := card.GetFieldValues(field); ret == nvml.SUCCESS && field[0].NvmlReturn == uint32(nvml.SUCCESS) {
		return field[0].Value[0] == 0 // an unsigned integer in the machine's order, which is little-endian
	}
	major, _, ret := card.GetCudaComputeCapability()
	return ret != nvml.SUCCESS || major < firstWithoutReset
}
