package nodeview

import (
	"fmt"
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
// VFIO, and on a node without NVIDIA's driver all others. A GPU that a claim has for containers is
// left out: after a reboot NVIDIA's driver may still come. The caller holds n.mu.
func (n *Node) withPassthrough(s inventory.Snapshot, lent []device.GPU) inventory.Snapshot {
	found := slices.Clone(lent)
	policies, _ := n.policies() // until they are known, virtual machines get no GPU
	driverMissing := s.Code == inventory.CodeDriverMissing && s.Node.Driver.Version == "" && time.Since(s.Since) >= driverGrace
	for _, g := range s.Node.Passthrough {
		if !policies.For(g).OffersUnlisted(g, driverMissing) {
			continue
		}
		if why := n.forContainers(g); why != "" {
			s.Node.Problems = append(slices.Clone(s.Node.Problems), nvidia.Problem{PCIAddress: g.PCIAddress, Message: why})
			continue
		}
		found = append(found, g)
	}
	node := s.Node.WithUnlisted(found)
	if len(node.GPUs) == len(s.Node.GPUs) {
		return s
	}
	if len(s.Node.GPUs) == 0 && (s.Code == inventory.CodeNoGPU || s.Code == inventory.CodeDriverMissing) {
		s.Ready, s.Reason, s.Code, s.Since = true, "", "", time.Time{} // these GPUs do not need the driver
	}
	s.Known, s.Empty, s.Node = true, false, node
	return s
}

// forContainers says why no virtual machine may get a GPU that NVML does not list: a claim has it
// for containers. It is "" if no claim does.
func (n *Node) forContainers(g device.GPU) string {
	used, err := n.inUse(g.WholeName())
	switch {
	case err != nil:
		return fmt.Sprintf("not for virtual machines, because it is unknown whether a claim has it for containers: %v", err)
	case used:
		return "not for virtual machines, because a claim has it for containers: load NVIDIA's driver, or delete the claim's Pod"
	}
	return ""
}

// Policies returns the policies of the node's GPUs. Until they are known they are the zero value,
// with which the plugin changes no GPU and virtual machines get none.
func (n *Node) Policies() (_ device.Policies, known bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.policies()
}

// policies is Policies for callers that hold n.mu.
func (n *Node) policies() (_ device.Policies, known bool) {
	if n.configured == nil || n.annotated == nil {
		return device.Policies{}, false
	}
	return n.configured.And(*n.annotated), true
}
