package nvidia

import (
	"cmp"
	"fmt"
	"slices"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Node is the result of one scan. It is plain data that can be compared, stored and sent.
type Node struct {
	Driver device.Driver `json:"driver"`
	// GPUs are the GPUs that can be offered, sorted by PCI address.
	GPUs []GPU `json:"gpus"`
	// Common are the edits that every container with a GPU needs: control device nodes, libraries,
	// tools, hooks. Paths are the host's.
	Common specs.ContainerEdits `json:"common"`
	// Problems say why GPUs are left out or can be offered only as a whole, sorted by PCI address.
	Problems []Problem `json:"problems,omitempty"`
	// Omissions say what containers lack, or what is not offered, although the GPUs are. They are
	// sorted by name.
	Omissions []Omission `json:"omissions,omitempty"`
	// Passthrough are the GPUs on the PCI bus that NVML does not list, as sysfs describes them.
	Passthrough []device.GPU `json:"passthrough,omitempty"`
}

// WithUnlisted returns the node with GPUs that NVML does not list but that virtual machines can
// get. Nothing else then says why they are not offered.
func (n Node) WithUnlisted(gpus []device.GPU) Node {
	added := func(a device.PCIAddress) bool {
		return slices.ContainsFunc(gpus, func(g device.GPU) bool { return g.PCIAddress == a })
	}
	n.GPUs = slices.Clone(n.GPUs)
	for _, g := range gpus {
		if !slices.ContainsFunc(n.GPUs, func(o GPU) bool { return o.PCIAddress == g.PCIAddress }) {
			n.GPUs = append(n.GPUs, GPU{GPU: g})
		}
	}
	slices.SortFunc(n.GPUs, func(a, b GPU) int { return cmp.Compare(a.PCIAddress, b.PCIAddress) })
	n.Problems = slices.DeleteFunc(slices.Clone(n.Problems), func(p Problem) bool { return added(p.PCIAddress) })
	n.Passthrough = slices.DeleteFunc(slices.Clone(n.Passthrough), func(g device.GPU) bool { return added(g.PCIAddress) })
	return n
}

// GPU is a card with the edits that a container needs in addition to [Node.Common]. Paths are the
// host's.
type GPU struct {
	device.GPU
	Edits specs.ContainerEdits `json:"edits"`
	// Binding identifies the binding of the card to NVIDIA's driver in which the scan found it. Minor
	// and the device nodes in Edits are good until the card has another one: see [scan.Binding].
	Binding string `json:"binding,omitempty"`
}

// Problem says why a GPU is left out or can be offered only as a whole, and what an operator can
// do. PCIAddress is empty if the scan could not read the GPU's address.
type Problem struct {
	PCIAddress device.PCIAddress `json:"pciAddress,omitempty"`
	Message    string            `json:"message"`
	// Uncertain is the UUID of a card that answers, but whose MIG instances could not be read. A
	// caller that knows the card from an earlier scan may keep offering it.
	Uncertain string `json:"uncertain,omitempty"`
}

func (p Problem) String() string {
	if p.PCIAddress == "" {
		return p.Message
	}
	return string(p.PCIAddress) + ": " + p.Message
}

// The kinds of [Omission].
const (
	// MissingFile is a file that the driver usually has.
	MissingFile = "missing-file"
	// RefusedEdit is an edit of containers that could expose the host, or that this driver does not
	// know.
	RefusedEdit = "refused-edit"
	// UnknownProfile is a MIG profile whose form this driver does not know.
	UnknownProfile = "unknown-profile"
)

// Omission is a part that the scan left out. Name is a file's name or path, or what else was left
// out.
type Omission struct {
	Kind    string `json:"kind"`
	Name    string `json:"name"`
	Message string `json:"message"`
}

// ProblemCounts returns how many problems of each kind the node has. The kind of [Problem] is gpu.
func (n Node) ProblemCounts() map[string]int {
	counts := map[string]int{"gpu": len(n.Problems), MissingFile: 0, RefusedEdit: 0, UnknownProfile: 0}
	for _, p := range n.Omissions {
		counts[p.Kind]++
	}
	return counts
}

func (p Omission) String() string { return p.Name + ": " + p.Message }

// NotReadyError says that the node cannot serve GPUs now. A later scan may succeed without a
// restart of the plugin.
type NotReadyError struct {
	Reason string `json:"reason"`
	// Remedy is what an operator can do.
	Remedy string `json:"remedy,omitempty"`
	// Passthrough are the GPUs on the PCI bus, as sysfs describes them. They need no NVIDIA driver to
	// be passed to virtual machines.
	Passthrough []device.GPU `json:"passthrough,omitempty"`
}

func (e *NotReadyError) Error() string {
	if e.Remedy == "" {
		return e.Reason
	}
	return e.Reason + ": " + e.Remedy
}

// NotReady returns a [NotReadyError]. reason is a format for args.
func NotReady(remedy, reason string, args ...any) error {
	return &NotReadyError{Reason: fmt.Sprintf(reason, args...), Remedy: remedy}
}
