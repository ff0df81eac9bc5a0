package nodeview

import (
	"context"
	"fmt"
	"maps"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// holdersInterval is how often Holders looks. It reads the open files of all processes of the host.
const holdersInterval = 15 * time.Second

// Holders finds the GPUs that no virtual machine can get now, because a process has them open
// although no claim has them. A GPU cannot be bound to VFIO while it is open.
type Holders struct {
	Node *Node
	// Foreign returns the processes that have these GPUs open. The plugin's own are not among them.
	Foreign func(gpus []device.GPU) map[device.PCIAddress][]nvidia.Process
	// InUse reports whether a claim has the GPU or a part of it.
	InUse func(gpu string) (bool, error)
}

// Run looks until the context ends.
func (h Holders) Run(ctx context.Context) {
	tick := time.NewTicker(holdersInterval)
	defer tick.Stop()
	for {
		looked := make(chan map[device.PCIAddress]string, 1)
		go func() { looked <- h.look(ctx) }() // it may hang with a process that hangs in the kernel
		select {
		case held := <-looked:
			if held != nil {
				h.Node.setHeld(ctx, held)
			}
		case <-ctx.Done():
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// look returns the held GPUs with the processes that hold them, or nil if it cannot find out.
func (h Holders) look(ctx context.Context) map[device.PCIAddress]string {
	held, candidates := map[device.PCIAddress]string{}, []device.GPU(nil)
	for _, g := range h.Node.offeredToMachines() {
		used, err := h.InUse(g.WholeName())
		if err != nil {
			klog.FromContext(ctx).Error(err, "Failed to look for processes that have a GPU open", "gpu", g.WholeName())
			return nil
		}
		if !used {
			candidates = append(candidates, g)
		}
	}
	if len(candidates) == 0 {
		return held
	}
	for gpu, processes := range h.Foreign(candidates) {
		held[gpu] = fmt.Sprint(processes)
	}
	return held
}

// offeredToMachines returns the GPUs that NVIDIA's driver has and that virtual machines may get.
func (n *Node) offeredToMachines() (gpus []device.GPU) {
	policies, _ := n.Policies()
	for _, g := range n.view.Load().Preparable.Node.GPUs {
		if policies.For(g.GPU).Passthrough && g.Passthrough != nil && !g.PassthroughOnly() && !g.Passthrough.BoundByAdmin {
			gpus = append(gpus, g.GPU)
		}
	}
	return gpus
}

// setHeld sets which GPUs are held, and by which processes.
func (n *Node) setHeld(ctx context.Context, by map[device.PCIAddress]string) {
	logger := klog.FromContext(ctx)
	n.mu.Lock()
	defer n.mu.Unlock()
	held := map[device.PCIAddress]time.Time{}
	for address, processes := range by {
		since, known := n.held[address]
		if !known {
			since = time.Now()
			logger.Info("GPU cannot be passed to a virtual machine while processes have it open", "gpu", address.WholeName(), "processes", processes)
		}
		held[address] = since
	}
	for address := range n.held {
		if _, still := held[address]; !still {
			logger.Info("GPU can be passed to a virtual machine again", "gpu", address.WholeName())
		}
	}
	if !maps.Equal(held, n.held) {
		n.held = held
		n.update()
	}
}
