package device

import "k8s.io/apimachinery/pkg/api/resource"

// Totals returns the capacities that all claims on the shared device n divide among them. It has no
// memory if the driver does not report it, no plain shares if no rule offers them, and nothing if
// the GPU g cannot have n. index is g's index on the node, by PCI address.
func (r ShareRules) Totals(g GPU, index int, n Name) map[string]resource.Quantity {
	totals := map[string]resource.Quantity{}
	of, profile, known := g.shareable(n)
	if !known {
		return totals
	}
	for _, share := range []Share{{Fractions: true}, {Count: r.For(g, profile, index).Count}} {
		for name, c := range (Shared{of, share}).capacities() {
			if !c.Value.IsZero() {
				totals[string(name)] = c.Value
			}
		}
	}
	return totals
}

// shareable returns the device that n names, or the unshared device if n names a share device.
// profile is the name of the partition's MIG profile, or "" for the whole GPU. known is false for a
// partition that the GPU neither has nor can have.
func (g GPU) shareable(n Name) (_ shareable, profile string, known bool) {
	if n.Partition == nil {
		return Whole{gpu: g}, "", true
	}
	p, known := g.partition(*n.Partition, counterSetOf(g))
	return p, p.profile, known
}

// Has reports whether n names the whole GPU, or a partition that the GPU has or can have, or a
// share device of these. The zero GPU has no devices.
func (g GPU) Has(n Name) bool {
	_, _, known := g.shareable(n)
	return known && n.GPU == g.WholeName()
}
