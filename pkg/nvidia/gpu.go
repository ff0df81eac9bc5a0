package nvidia

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync/atomic"

	nvlib "github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// reading remembers how far the reading of one GPU came, so that a problem can name the card even when a later question hangs.
type reading struct {
	address atomic.Pointer[device.PCIAddress]
}

func (r *reading) known() device.PCIAddress {
	if a := r.address.Load(); a != nil {
		return *a
	}
	return ""
}

// gpu reads one GPU. It is nil without an error for a card that is none of our business.
func (s scanner) gpu(index int, d device.Driver, r *reading) (*GPU, error) {
	handle, ret := s.library.DeviceGetHandleByIndex(index)
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("open the GPU with index %d: %w", index, toError(ret))
	}
	card, err := nvlib.New(s.library).NewDevice(handle)
	if err != nil {
		return nil, err
	}
	g := device.GPU{}
	if g.PCIAddress, err = pciAddress(card); err != nil {
		return nil, err
	}
	address := g.PCIAddress
	r.address.Store(&address)
	if g.ProductName, ret = card.GetName(); ret != nvml.SUCCESS {
		return nil, fmt.Errorf("read the product name: %w", toError(ret))
	}
	if drivesADisplay[g.ProductName] {
		return nil, nil
	}
	if err := identity(card, &g); err != nil {
		return nil, err
	}
	if err := refuseMIG(card); err != nil {
		return nil, err
	}
	node := filepath.Join(s.paths.devRoot(), "dev", fmt.Sprintf("nvidia%d", g.Minor))
	if !isCharDevice(node) {
		return nil, fmt.Errorf("device node %s is missing: run nvidia-modprobe -c=%d on the node", s.paths.host(node), g.Minor)
	}
	g.Engines = engines(card)
	place(s.paths.Sysfs, &g)
	own, err := s.ownEdits(handle, g, d)
	if err != nil {
		return nil, err
	}
	return &GPU{GPU: g, Edits: own}, nil
}

// drivesADisplay are the cards of a DGX Station that only drive its screen.
var drivesADisplay = map[string]bool{"DGX Display": true, "NVIDIA DGX Display": true}

func pciAddress(card nvlib.Device) (device.PCIAddress, error) {
	id, err := card.GetPCIBusID()
	if err != nil {
		return "", fmt.Errorf("read the PCI address: %w", err)
	}
	return device.ParsePCIAddress(id)
}

// identity reads what a claim can select by. Without UUID, minor or memory a card cannot be offered; the names are best effort.
func identity(card nvlib.Device, g *device.GPU) error {
	var ret nvml.Return
	if g.UUID, ret = card.GetUUID(); ret != nvml.SUCCESS {
		return fmt.Errorf("read the UUID: %w", toError(ret))
	}
	if g.Minor, ret = card.GetMinorNumber(); ret != nvml.SUCCESS {
		return fmt.Errorf("read the minor number: %w", toError(ret))
	}
	memory, ret := card.GetMemoryInfo()
	if ret != nvml.SUCCESS {
		return fmt.Errorf("read the memory size: %w", toError(ret))
	}
	g.MemoryBytes = memory.Total
	g.Brand = orUnknown(card.GetBrandAsString())
	g.Architecture = orUnknown(card.GetArchitectureAsString())
	if capability, err := card.GetCudaComputeCapabilityAsString(); err == nil {
		g.CUDAComputeCapability = capability
	}
	return nil
}

func orUnknown(name string, err error) string {
	if err != nil {
		return "Unknown"
	}
	return name
}

var errMIGOn = errors.New("MIG mode is on: partitions are not offered by this version, and a GPU in MIG mode cannot be used as a whole (nvidia-smi -mig 0 turns it off)")

func refuseMIG(card nvlib.Device) error {
	on, err := card.IsMigEnabled()
	if err != nil {
		return fmt.Errorf("read the MIG mode: %w", err)
	}
	if on {
		return errMIGOn
	}
	return nil
}

// engines counts the units of the whole card as its largest MIG profiles have them: NVML gives these numbers nowhere else.
// Profiles of one size differ in media engines (the "+me" and "-me" variants), so that each engine is counted where it is most.
func engines(card nvlib.Device) *device.Engines {
	if capable, err := card.IsMigCapable(); err != nil || !capable {
		return nil
	}
	var e *device.Engines
	var slices uint32
	for i := range nvml.GPU_INSTANCE_PROFILE_COUNT {
		p, ret := card.GetGpuInstanceProfileInfo(i)
		if ret != nvml.SUCCESS || p.SliceCount < slices {
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
