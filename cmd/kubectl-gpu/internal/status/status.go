// Package status lists the GPUs of a fleet with their claims, free capacity and taints. It reads a
// [fleet.Snapshot] and counts as the scheduler does. It does not decide whether a claim fits:
// package explain asks the allocator for that.
package status

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Report is the state of the fleet, or of one node.
type Report struct {
	Nodes []Node `json:"nodes"`
	// Moves are claims that would free a whole GPU on a node that has none free.
	Moves []Move `json:"moves,omitempty"`
}

// Node is a node and its GPUs.
type Node struct {
	Name       string `json:"name"`
	Cordoned   bool   `json:"cordoned,omitempty"`
	GPUs       []GPU  `json:"gpus"`
	Free       int    `json:"freeGPUs"`
	Claims     int    `json:"claims"`
	Tainted    int    `json:"taintedGPUs"`
	Largest    string `json:"largestFree,omitempty"`
	Incomplete bool   `json:"incomplete,omitempty"`
}

// GPU is one card.
type GPU struct {
	Name    string `json:"name"`
	Product string `json:"product"`
	// Bar has a character for each memory slice: "." is free, and each holder has its letter.
	Bar     string   `json:"bar"`
	Holders []Holder `json:"holders,omitempty"`
	Taints  []string `json:"taints,omitempty"`
	// Largest is the largest unshared device that is still free, such as "3g.40gb" or "GPU".
	Largest string `json:"largestFree,omitempty"`
	// Shares is what is left for shares of each device that claims share.
	Shares []string `json:"freeShares,omitempty"`
	Free   bool     `json:"free"`

	devices []*resourceapi.Device
	left    map[string]resource.Quantity
	total   map[string]resource.Quantity
	largest *resourceapi.Device
}

// Holder is a claim with the part of a GPU that it is allocated.
type Holder struct {
	Letter string `json:"letter"`
	Claim  string `json:"claim"`
	What   string `json:"what"`
	Share  string `json:"share,omitempty"`
	Pods   int    `json:"pods"`
	Device string `json:"device"`
}

// Move is advice: without these claims, the GPU would be free as a whole.
type Move struct {
	Node   string   `json:"node"`
	GPU    string   `json:"gpu"`
	Claims []string `json:"claims"`
}

// How Largest and What call a whole GPU, and one that is bound to a VFIO driver.
const (
	whole = "GPU"
	forVM = "GPU for a virtual machine"
)

// Of returns the state of all nodes with GPUs, or of the node with this name.
func Of(s *fleet.Snapshot, node string) Report {
	holders := s.Holders()
	r := Report{Nodes: []Node{}}
	byNode := s.SlicesOf()
	for _, name := range slices.Sorted(maps.Keys(byNode)) {
		if node != "" && name != node {
			continue
		}
		n := nodeOf(s, name, byNode[name], holders)
		if o := s.Node(name); o != nil {
			n.Cordoned = o.Spec.Unschedulable
		}
		r.Nodes = append(r.Nodes, n)
		if m, ok := move(n); ok {
			r.Moves = append(r.Moves, m)
		}
	}
	return r
}

func nodeOf(s *fleet.Snapshot, name string, all []*resourceapi.ResourceSlice, holders map[fleet.DeviceID][]fleet.Holder) Node {
	newest := fleet.Newest(all)
	n := Node{Name: name, GPUs: []GPU{}, Incomplete: int64(len(newest)) < newest[0].Spec.Pool.ResourceSliceCount}
	gpus := map[string]*GPU{}
	get := func(name string) *GPU {
		if gpus[name] == nil {
			gpus[name] = &GPU{Name: name}
		}
		return gpus[name]
	}
	for _, slice := range newest {
		for _, set := range slice.Spec.SharedCounters {
			g := get(set.Name)
			g.left, g.total = map[string]resource.Quantity{}, map[string]resource.Quantity{}
			for counter, c := range set.Counters {
				g.left[counter], g.total[counter] = c.Value.DeepCopy(), c.Value.DeepCopy()
			}
		}
		for i := range slice.Spec.Devices {
			d := &slice.Spec.Devices[i]
			if parsed, ok := device.ParseName(d.Name); ok {
				g := get(parsed.GPU)
				g.devices = append(g.devices, d)
			}
		}
	}
	claims := map[string]bool{}
	for _, g := range gpus {
		g.fill(s, name, holders)
		for _, h := range g.Holders {
			claims[h.Claim] = true
		}
		if g.Free {
			n.Free++
		}
		if len(g.Taints) > 0 {
			n.Tainted++
		}
		n.GPUs = append(n.GPUs, *g)
	}
	n.Claims = len(claims)
	slices.SortFunc(n.GPUs, func(a, b GPU) int { return strings.Compare(a.Name, b.Name) })
	var best *resourceapi.Device
	for _, g := range n.GPUs {
		if g.largest != nil && (best == nil || larger(g.largest, best)) {
			best, n.Largest = g.largest, g.Largest
		}
	}
	return n
}

// fill computes the claims on the GPU and its free capacity.
func (g *GPU) fill(s *fleet.Snapshot, node string, holders map[fleet.DeviceID][]fleet.Holder) {
	held := map[string]bool{}
	slices.SortStableFunc(g.devices, func(a, b *resourceapi.Device) int { return cmp.Compare(placement(a), placement(b)) })
	bar := strings.Repeat(".", g.width())
	for _, d := range g.devices {
		g.Product = cmp.Or(g.Product, attribute(d, "productName"))
		for _, t := range d.Taints {
			if text := fleet.TaintText(t); !slices.Contains(g.Taints, text) {
				g.Taints = append(g.Taints, text)
			}
		}
		all := holders[fleet.DeviceID{Driver: device.DriverName, Pool: node, Device: d.Name}]
		if len(all) == 0 {
			continue
		}
		held[d.Name] = true
		for _, consumed := range d.ConsumesCounters {
			for counter, c := range consumed.Counters {
				left := g.left[counter]
				left.Sub(c.Value)
				g.left[counter] = left
			}
		}
		for _, h := range all {
			letter := string(rune('a' + len(g.Holders)%26))
			g.Holders = append(g.Holders, Holder{
				Letter: letter, Claim: fleet.Key(h.Claim), What: what(d), Share: quantities(h.Result.ConsumedCapacity),
				Pods: len(s.PodsOf(h.Claim)), Device: d.Name,
			})
			bar = g.draw(bar, d, letter)
		}
		if left := leftOf(d, all); left != "" {
			g.Shares = append(g.Shares, what(d)+" with "+left)
		}
	}
	g.Bar = bar
	for _, d := range g.devices {
		if !g.free(d, held) {
			continue
		}
		g.Free = g.Free || len(g.Holders) == 0 && isWhole(what(d))
		if g.largest == nil || larger(d, g.largest) {
			g.largest, g.Largest = d, what(d)
		}
	}
}

// leftOf returns what the holders of shares leave of a shared device. It is empty if nothing is
// left, and for a device without shares. A share needs no cores.
func leftOf(d *resourceapi.Device, holders []fleet.Holder) string {
	if !ptr.Deref(d.AllowMultipleAllocations, false) {
		return ""
	}
	left := map[resourceapi.QualifiedName]resource.Quantity{}
	for name, c := range d.Capacity {
		q := c.Value.DeepCopy()
		for _, h := range holders {
			q.Sub(h.Result.ConsumedCapacity[name])
		}
		if q.Sign() <= 0 && name != device.CapacityCores {
			return ""
		}
		left[name] = q
	}
	return quantities(left)
}

func quantities(all map[resourceapi.QualifiedName]resource.Quantity) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		q := all[name]
		parts = append(parts, fmt.Sprintf("%s %s", name, q.String()))
	}
	return strings.Join(parts, ", ")
}

// width is the number of memory slices, or eight for a GPU without partitions.
func (g *GPU) width() int {
	n := 0
	for counter := range g.total {
		if strings.HasPrefix(counter, device.MemorySlicePrefix) {
			n++
		}
	}
	return cmp.Or(n, 8)
}

// draw writes a holder's letter at the memory slices of its device. Of several claims that share a
// device, the bar shows the last one.
func (g *GPU) draw(bar string, d *resourceapi.Device, letter string) string {
	drawn := []byte(bar)
	start, size := 0, len(drawn)
	if p := d.Attributes["placementStart"].IntValue; p != nil {
		start, size = int(*p), int(ptr.Deref(d.Attributes["placementSize"].IntValue, 1))
	}
	for i := max(start, 0); i < min(start+size, len(drawn)); i++ {
		drawn[i] = letter[0]
	}
	return string(drawn)
}

func placement(d *resourceapi.Device) int64 {
	return ptr.Deref(d.Attributes["placementStart"].IntValue, -1)
}

func attribute(d *resourceapi.Device, name resourceapi.QualifiedName) string {
	return ptr.Deref(d.Attributes[name].StringValue, "")
}

// what is the kind of a device in words.
func what(d *resourceapi.Device) string {
	name, kind := cmp.Or(attribute(d, "profile"), whole), attribute(d, "type")
	switch {
	case kind == "vfio":
		return forVM
	case strings.HasSuffix(kind, "-share"):
		return "share of " + name
	default:
		return name
	}
}

func isWhole(what string) bool { return what == whole || what == forVM }

// free reports whether the scheduler could allocate the device alone.
func (g *GPU) free(d *resourceapi.Device, held map[string]bool) bool {
	if held[d.Name] || held[d.Name+"-share"] || strings.HasSuffix(d.Name, "-share") {
		return false
	}
	for _, t := range d.Taints {
		if t.Effect != resourceapi.DeviceTaintEffectNone {
			return false
		}
	}
	for _, consumed := range d.ConsumesCounters {
		for counter, c := range consumed.Counters {
			if left := g.left[counter]; c.Value.Cmp(left) > 0 {
				return false
			}
		}
	}
	return true
}

// larger compares by memory, and then by multiprocessors.
func larger(a, b *resourceapi.Device) bool {
	for _, name := range []resourceapi.QualifiedName{"memory", "multiprocessors"} {
		x, y := a.Capacity[name].Value, b.Capacity[name].Value
		if c := x.Cmp(y); c != 0 {
			return c > 0
		}
	}
	return what(a) == whole && what(b) != whole
}

// move names the claims to move for a whole GPU, on the GPU where they are fewest. A GPU that one
// claim has as a whole, or with taints, is no candidate.
func move(n Node) (Move, bool) {
	var best *GPU
	for i := range n.GPUs {
		g := &n.GPUs[i]
		if g.Free {
			return Move{}, false
		}
		partly := len(g.Holders) > 0 && !slices.ContainsFunc(g.Holders, func(h Holder) bool { return isWhole(h.What) }) && len(g.Taints) == 0
		offersWhole := slices.ContainsFunc(g.devices, func(d *resourceapi.Device) bool { return isWhole(what(d)) })
		if partly && offersWhole && (best == nil || len(g.Holders) < len(best.Holders)) {
			best = g
		}
	}
	if best == nil {
		return Move{}, false
	}
	m := Move{Node: n.Name, GPU: best.Name}
	for _, h := range best.Holders {
		m.Claims = append(m.Claims, h.Claim)
	}
	slices.Sort(m.Claims)
	m.Claims = slices.Compact(m.Claims)
	return m, true
}
