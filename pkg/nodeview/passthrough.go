package nodeview

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// driverGrace is how long NVIDIA's driver must be missing before the node's GPUs are offered to
// virtual machines only. Most nodes load the driver shortly after the plugin starts.
const driverGrace = 30 * time.Second

// SetConfigured sets the policies from the node's configuration.
func (n *Node) SetConfigured(p device.Policies) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.configured = &p
	n.update()
}

// SetNodePolicies sets the policies from the Node's annotations.
func (n *Node) SetNodePolicies(p device.Policies) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.annotated = &p
	n.update()
}

// withPassthrough returns s with the GPUs that NVML does not list but that virtual machines can
// use: those that claims have (lent), and where passthrough is on those that an admin bound to
// VFIO, and on a node without NVIDIA's driver all others. The caller holds n.mu.
func (n *Node) withPassthrough(s inventory.Snapshot, lent []device.GPU) inventory.Snapshot {
	found := slices.Clone(lent)
	for _, g := range s.Node.Passthrough {
		if n.passes(g) && (g.Passthrough.BoundByAdmin || free(s, g)) {
			found = append(found, g)
		}
	}
	nodes := slices.Clone(s.Node.GPUs)
	for _, g := range found {
		if !slices.ContainsFunc(nodes, func(o nvidia.GPU) bool { return o.PCIAddress == g.PCIAddress }) {
			nodes = append(nodes, nvidia.GPU{GPU: g})
		}
	}
	if len(nodes) == len(s.Node.GPUs) {
		return s
	}
	if len(s.Node.GPUs) == 0 && (s.Code == inventory.CodeNoGPU || s.Code == inventory.CodeDriverMissing) {
		s.Ready, s.Reason, s.Code, s.Since = true, "", "", time.Time{} // these GPUs do not need the driver
	}
	slices.SortFunc(nodes, func(a, b nvidia.GPU) int { return cmp.Compare(a.PCIAddress, b.PCIAddress) })
	s.Known, s.Empty, s.Node.GPUs = true, false, nodes
	added := func(a device.PCIAddress) bool {
		return slices.ContainsFunc(found, func(g device.GPU) bool { return g.PCIAddress == a })
	}
	s.Node.Problems = slices.DeleteFunc(slices.Clone(s.Node.Problems), func(p nvidia.Problem) bool { return added(p.PCIAddress) })
	s.Node.Passthrough = slices.DeleteFunc(slices.Clone(s.Node.Passthrough), func(g device.GPU) bool { return added(g.PCIAddress) })
	return s
}

// passes reports whether the GPU can be passed to virtual machines and the policies say so. The
// caller holds n.mu.
func (n *Node) passes(g device.GPU) bool {
	return n.configured != nil && n.annotated != nil && g.Passthrough != nil && n.configured.And(*n.annotated).For(g).Passthrough
}

// free reports whether the node has no NVIDIA driver, and no other kernel driver has the GPU.
func free(s inventory.Snapshot, g device.GPU) bool {
	return s.Code == inventory.CodeDriverMissing && s.Node.Driver.Version == "" && !g.Passthrough.HasDriver &&
		time.Since(s.Since) >= driverGrace
}
