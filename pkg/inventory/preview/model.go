package preview

import (
	"errors"
	"fmt"
	"io"

	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// Model is the hardware of a kind of node: what a scan of one such node finds, without what differs
// between two nodes of the kind. Those are the UUIDs and the numbers of device nodes.
type Model struct {
	Driver device.Driver `json:"driver"`
	GPUs   []device.GPU  `json:"gpus"`
}

// ModelOf returns the model of a scanned node.
func ModelOf(node nvidia.Node) Model {
	m := Model{Driver: node.Driver}
	for _, g := range node.GPUs {
		m.GPUs = append(m.GPUs, identified(g.GPU, "", 0, func(int) string { return "" }))
	}
	return m
}

// Placeholders of UUIDs. No hardware has them.
const (
	gpuUUID = "GPU-00000000-0000-0000-0000-%012d"
	migUUID = "MIG-00000000-0000-0000-%04d-%012d"
)

// Node returns a node of this model, as a scan of it would, with placeholders for UUIDs.
func (m Model) Node() nvidia.Node {
	node := nvidia.Node{Driver: m.Driver}
	for i, g := range m.GPUs {
		node.GPUs = append(node.GPUs, nvidia.GPU{GPU: identified(g, fmt.Sprintf(gpuUUID, i), i, func(part int) string {
			return fmt.Sprintf(migUUID, i, part)
		})})
	}
	return node
}

// identified returns a copy of the GPU with other UUIDs and device numbers. mig returns the UUID of
// the n-th MIG device.
func identified(g device.GPU, uuid string, minor int, mig func(n int) string) device.GPU {
	g.UUID, g.Minor = uuid, minor
	if g.MIG == nil {
		return g
	}
	changed, n := *g.MIG, 0
	changed.Instances = nil
	for _, in := range g.MIG.Instances {
		in.Minor = 0
		all := in.Compute
		in.Compute = nil
		for _, c := range all {
			c.UUID, c.Minor = mig(n), 0
			in.Compute = append(in.Compute, c)
			n++
		}
		changed.Instances = append(changed.Instances, in)
	}
	g.MIG = &changed
	return g
}

// ReadModel reads a model that [Model.Write] wrote.
func ReadModel(text []byte) (Model, error) {
	var m Model
	if err := yaml.UnmarshalStrict(text, &m); err != nil {
		return m, err
	}
	if len(m.GPUs) == 0 {
		return m, errors.New("it has no gpus")
	}
	seen := map[device.PCIAddress]bool{}
	for i, g := range m.GPUs {
		if g.ProductName == "" {
			return m, fmt.Errorf("gpus[%d] has no productName", i)
		}
		if a, err := device.ParsePCIAddress(string(g.PCIAddress)); err != nil || a != g.PCIAddress {
			return m, fmt.Errorf("gpus[%d]: pciAddress %q is not of the form 0000:1b:00.0", i, g.PCIAddress)
		}
		if seen[g.PCIAddress] {
			return m, fmt.Errorf("two GPUs have the pciAddress %s", g.PCIAddress)
		}
		seen[g.PCIAddress] = true
	}
	return m, nil
}

// Write writes the model as YAML.
func (m Model) Write(out io.Writer) error {
	text, err := yaml.Marshal(m)
	if err != nil {
		return fmt.Errorf("write the node's model: %w", err)
	}
	_, err = out.Write(text)
	return err
}
