package nvidia

import (
	"fmt"
	"path/filepath"
	"sync/atomic"

	nvlib "github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// reading remembers how far the reading of one GPU came, so that a problem can name the card even when a later question hangs.
type reading struct {
	address  atomic.Pointer[device.PCIAddress]
	progress chan struct{}
	opened   func()
}

func newReading(opened func()) *reading {
	return &reading{progress: make(chan struct{}, 1), opened: opened}
}

// beat says that the GPU has answered once more.
func (r *reading) beat() {
	r.opened()
	select {
	case r.progress <- struct{}{}:
	default:
	}
}

func (r *reading) known() device.PCIAddress {
	if a := r.address.Load(); a != nil {
		return *a
	}
	return ""
}

// gpu reads one GPU. It is nil without an error for a card that is none of our business. A GPU with an error can be offered, but not in every shape.
func (s scanner) gpu(index int, d device.Driver, r *reading) (*GPU, error) {
	handle, ret := s.lib.DeviceGetHandleByIndex(index)
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("open the GPU with index %d: %w", index, toError(ret))
	}
	r.beat()
	card, err := nvlib.New(s.lib).NewDevice(handle)
	if err != nil {
		return nil, err
	}
	g := device.GPU{}
	if g.PCIAddress, err = pciAddress(card); err != nil {
		return nil, err
	}
	address := g.PCIAddress
	r.address.Store(&address)
	r.beat()
	if g.ProductName, ret = card.GetName(); ret != nvml.SUCCESS {
		return nil, fmt.Errorf("read the product name: %w", toError(ret))
	}
	if drivesADisplay[g.ProductName] {
		return nil, nil
	}
	if err := identity(card, &g, r.beat); err != nil {
		return nil, err
	}
	node := filepath.Join(s.paths.devRoot(), "dev", fmt.Sprintf("nvidia%d", g.Minor))
	if !isCharDevice(node) {
		return nil, fmt.Errorf("device node %s is missing: run nvidia-modprobe -c=%d on the node", s.paths.host(node), g.Minor)
	}
	partial, err := s.cuts(handle, &g, r.beat)
	if err != nil {
		return nil, err
	}
	r.beat()
	place(s.paths.Sysfs, &g)
	g.ContainerLimits = s.containerLimits(handle)
	r.beat()
	own, err := s.ownEdits(handle, g, d)
	if err != nil {
		return nil, err
	}
	return &GPU{GPU: g, Edits: own}, partial
}

// cuts reads how the card can be cut and how it is cut. Without its profiles a card whose MIG mode is off can still be used as a whole: what
// could not be read then comes back as partial. With MIG mode on it is no use to anybody.
func (s scanner) cuts(card nvml.Device, g *device.GPU, progress func()) (partial, err error) {
	m := newMIGReader(s.paths, s.lib, progress)
	if g.MIG, err = m.mode(card); g.MIG == nil || err != nil {
		return nil, err
	}
	limits(card, g.MIG)
	kinds, err := m.readKinds(card)
	g.Engines = engines(kinds)
	if err == nil {
		g.MIG.Profiles, err = m.profiles(card)
	}
	if err == nil && g.MIG.Enabled {
		g.MIG.Instances, err = m.instances(card, g.Minor)
	}
	switch {
	case err == nil:
		return nil, nil
	case g.MIG.Enabled:
		return nil, &uncertainError{g.UUID, err}
	default:
		g.MIG.Profiles = nil
		return fmt.Errorf("offered as a whole only, because how it can be cut cannot be read: %w", err), nil
	}
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

// identity reads what a claim can select by. Without UUID or minor a card cannot be offered; the
// names are best effort.
func identity(card nvlib.Device, g *device.GPU, progress func()) error {
	var ret nvml.Return
	if g.UUID, ret = card.GetUUID(); ret != nvml.SUCCESS {
		return fmt.Errorf("read the UUID: %w", toError(ret))
	}
	progress()
	if g.Minor, ret = card.GetMinorNumber(); ret != nvml.SUCCESS {
		return fmt.Errorf("read the minor number: %w", toError(ret))
	}
	progress()
	// A GPU that works in the host's memory, such as GB10, has no figures of its own.
	memory, ret := card.GetMemoryInfo()
	if ret != nvml.SUCCESS && ret != nvml.ERROR_NOT_SUPPORTED {
		return fmt.Errorf("read the memory size: %w", toError(ret))
	}
	progress()
	g.MemoryBytes = memory.Total
	g.Brand = orUnknown(card.GetBrandAsString())
	progress()
	g.Architecture = orUnknown(card.GetArchitectureAsString())
	progress()
	if capability, err := card.GetCudaComputeCapabilityAsString(); err == nil {
		g.CUDAComputeCapability = capability
	}
	progress()
	if mode, err := card.GetAddressingModeAsString(); err == nil {
		g.AddressingMode = mode
	}
	return nil
}

func orUnknown(name string, err error) string {
	if err != nil {
		return "Unknown"
	}
	return name
}

// engines counts the units of the whole card as its largest MIG profiles have them: NVML gives these numbers nowhere else.
// Profiles of one size differ in media engines (the "+me" and "-me" variants), so that each engine is counted where it is most.
func engines(kinds []kind) *device.Engines {
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
