package scan

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/vfio"
)

// addPassthrough adds to the result of a scan what sysfs says about passing GPUs to virtual
// machines. It adds nothing if no GPU of the cluster is offered so.
func addPassthrough(ctx context.Context, p nvidia.Paths, node nvidia.Node, err error) (nvidia.Node, error) {
	var unready *nvidia.NotReadyError
	if !p.Passthrough || err != nil && !errors.As(err, &unready) {
		return node, err
	}
	all := readPassthrough(ctx, p)
	if unready != nil {
		unready.Passthrough = all
		return node, err
	}
	for i := range node.GPUs {
		g := &node.GPUs[i].GPU
		at := slices.IndexFunc(all, func(o device.GPU) bool { return o.PCIAddress == g.PCIAddress })
		if at < 0 {
			continue
		}
		g.Passthrough, g.NoPassthrough = all[at].Passthrough, all[at].NoPassthrough
		if g.AddressingMode == coherent {
			g.Passthrough, g.NoPassthrough = nil, "its memory is a NUMA node of the host: bind it to VFIO when the host boots"
		}
		all = slices.Delete(all, at, at+1)
	}
	node.Passthrough = all
	return node, nil
}

// coherent is the addressing mode of GPUs whose memory the host's kernel manages, as in Grace
// Hopper.
const coherent = "ATS"

// readPassthrough returns what sysfs says about each GPU on the PCI bus, sorted by address. A GPU
// whose sysfs files block, because an unbind hangs, delays no other GPU.
func readPassthrough(ctx context.Context, p nvidia.Paths) []device.GPU {
	onBus, _ := host.GPUs(p.Sysfs) // if sysfs cannot be read, no GPU can be passed on
	all := make([]device.GPU, len(onBus))
	var reading sync.WaitGroup
	for i, address := range onBus {
		reading.Go(func() {
			what := "sysfs for " + string(address)
			g, err := nvmlx.Bounded(ctx, nvmlx.CallLimit, what, func() (device.GPU, error) { return passthroughOf(p, address) })
			if err != nil {
				g = device.GPU{PCIAddress: address, NoPassthrough: err.Error()}
			}
			all[i] = g
		})
	}
	reading.Wait()
	return all
}

func passthroughOf(p nvidia.Paths, address device.PCIAddress) (device.GPU, error) {
	g, sysfs := device.GPU{PCIAddress: address}, p.Sysfs
	locate(sysfs, &g)
	group, err := vfio.Read(sysfs, address)
	if err != nil {
		return g, err
	}
	if g.NoPassthrough = group.Refusal(); g.NoPassthrough != "" {
		return g, nil
	}
	if d := group.GPU.Driver; d != "" && d != "nvidia" && !group.GPU.Bound() {
		g.NoPassthrough = fmt.Sprintf("kernel driver %s has it", d)
		return g, nil
	}
	if _, err := group.Bindings(sysfs, p.Modules); err != nil {
		g.NoPassthrough = err.Error()
		return g, nil //nolint:nilerr // the GPU has the reason
	}
	memory, err := vfio.AddressableMemory(sysfs, address)
	if err != nil {
		return g, err
	}
	g.Passthrough = &device.Passthrough{
		VendorID: group.GPU.Vendor, DeviceID: group.GPU.Device, AddressableMemory: memory,
		IOMMUFD: vfio.HasIOMMUFD(sysfs), BoundByAdmin: group.GPU.Bound(), HasDriver: group.GPU.Driver != "",
	}
	return g, nil
}
