package device

import "k8s.io/apimachinery/pkg/api/resource"

// Totals is what claims can hold together of a device that is shared, by capacity, as it is published.
// A capacity whose total is not known is left out: memory that the driver does not tell, and plain
// shares that the rules do not offer (any more). index is the GPU's place among the node's by PCI address.
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

// shareable is the shape that the name's device is, or is a share of, and its profile. It is false for
// a partition that the GPU neither has nor can have.
func (g GPU) shareable(n Name) (_ shareable, profile string, known bool) {
	if n.Partition == nil {
		return Whole{gpu: g}, "", true
	}
	p, known := g.partition(*n.Partition, setOf(g))
	return p, p.profile, known
}

// Has says whether the GPU has the device of that name, or can have it. The zero GPU has none.
func (g GPU) Has(n Name) bool {
	_, _, known := g.shareable(n)
	return known && n.GPU == g.WholeName()
}
