// Package status lists the GPUs of a fleet with their claims, free capacity and taints. It reads a
// [fleet.Snapshot] and counts as the scheduler does. It does not decide whether a claim fits:
// package explain asks the allocator for that.
package status

import (
	"cmp"
	"slices"
	"strconv"
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
	Free    bool   `json:"free"`

	devices []*resourceapi.Device
	left    map[string]resource.Quantity
	total   map[string]resource.Quantity
}

// Holder is a claim with the part of a GPU that it is allocated.
type Holder struct {
	Letter string `json:"letter"`
	Claim  string `json:"claim"`
	What   string `json:"what"`
	Pods   int    `json:"pods"`
	Device string `json:"device"`
}

// Move is advice: without these claims, the GPU would be free as a whole.
type Move struct {
	Node   string   `json:"node"`
	GPU    string   `json:"gpu"`
	Claims []string `json:"claims"`
}

// whole is how Largest calls a whole GPU.
const whole = "GPU"

// Of returns the state of all nodes with GPUs, or of the node with this name.
func Of(s *fleet.Snapshot, node string) Report {
	holders := s.Holders()
	pods := podsByClaim(s)
	var r Report
	byNode := s.SlicesOf()
	names := make([]string, 0, len(byNode))
	for name := range byNode {
		if node == "" || name == node {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		n := nodeOf(name, byNode[name], holders, pods)
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

func podsByClaim(s *fleet.Snapshot) map[string]int {
	count := map[string]int{}
	for _, p := range s.Pods {
		if fleet.Ended(p) {
			continue
		}
		for _, ref := range p.Spec.ResourceClaims {
			if name, _ := fleet.ClaimName(p, ref); name != "" {
				count[p.Namespace+"/"+name]++
			}
		}
		if e := p.Status.ExtendedResourceClaimStatus; e != nil {
			count[p.Namespace+"/"+e.ResourceClaimName]++
		}
	}
	return count
}

func nodeOf(name string, all []*resourceapi.ResourceSlice, holders map[fleet.DeviceID][]fleet.Holder, pods map[string]int) Node {
	n := Node{Name: name}
	newest := int64(0)
	for _, s := range all {
		newest = max(newest, s.Spec.Pool.Generation)
	}
	gpus := map[string]*GPU{}
	get := func(name string) *GPU {
		if gpus[name] == nil {
			gpus[name] = &GPU{Name: name}
		}
		return gpus[name]
	}
	have := int64(0)
	for _, s := range all {
		if s.Spec.Pool.Generation != newest {
			continue
		}
		have++
		n.Incomplete = s.Spec.Pool.ResourceSliceCount > have
		for _, set := range s.Spec.SharedCounters {
			g := get(set.Name)
			g.left, g.total = map[string]resource.Quantity{}, map[string]resource.Quantity{}
			for counter, c := range set.Counters {
				g.left[counter], g.total[counter] = c.Value.DeepCopy(), c.Value.DeepCopy()
			}
		}
		for i := range s.Spec.Devices {
			d := &s.Spec.Devices[i]
			if parsed, ok := device.ParseName(d.Name); ok {
				g := get(parsed.GPU)
				g.devices = append(g.devices, d)
			}
		}
	}
	claims := map[string]bool{}
	for _, g := range gpus {
		g.fill(name, holders, pods)
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
	n.Largest = largestOf(n.GPUs)
	return n
}

// fill computes the claims on the GPU and its free capacity.
func (g *GPU) fill(node string, holders map[fleet.DeviceID][]fleet.Holder, pods map[string]int) {
	held := map[string]bool{}
	slices.SortStableFunc(g.devices, func(a, b *resourceapi.Device) int { return cmp.Compare(placement(a), placement(b)) })
	bar := strings.Repeat(".", g.width())
	for _, d := range g.devices {
		g.Product = cmp.Or(g.Product, attribute(d, "productName"))
		for _, t := range d.Taints {
			if text := strings.TrimSuffix(t.Key+"="+t.Value, "=") + ":" + string(t.Effect); !slices.Contains(g.Taints, text) {
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
			claim := fleet.Key(h.Claim)
			g.Holders = append(g.Holders, Holder{Letter: letter, Claim: claim, What: what(d), Pods: pods[claim], Device: d.Name})
			bar = g.draw(bar, d, letter)
		}
	}
	g.Bar = bar
	g.Free = len(g.Holders) == 0 && g.usable(held, whole)
	g.Largest = g.largest(held)
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
	kind := cmp.Or(attribute(d, "profile"), whole)
	if strings.HasSuffix(attribute(d, "type"), "-share") {
		return "share of " + kind
	}
	return kind
}

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

func (g *GPU) usable(held map[string]bool, kind string) bool {
	return slices.ContainsFunc(g.devices, func(d *resourceapi.Device) bool { return what(d) == kind && g.free(d, held) })
}

// largest returns the free device with the most memory. Of equal ones, it is the one with the most
// multiprocessors.
func (g *GPU) largest(held map[string]bool) string {
	var best *resourceapi.Device
	for _, d := range g.devices {
		if g.free(d, held) && (best == nil || larger(d, best)) {
			best = d
		}
	}
	if best == nil {
		return ""
	}
	return what(best)
}

func larger(a, b *resourceapi.Device) bool {
	for _, name := range []resourceapi.QualifiedName{"memory", "multiprocessors"} {
		x, y := a.Capacity[name].Value, b.Capacity[name].Value
		if c := x.Cmp(y); c != 0 {
			return c > 0
		}
	}
	return what(a) == whole && what(b) != whole
}

// largestOf returns the largest of what the GPUs have free.
func largestOf(gpus []GPU) string {
	best, size := "", -1.0
	for _, g := range gpus {
		if g.Largest == "" {
			continue
		}
		if s := sizeOf(g.Largest); s > size {
			best, size = g.Largest, s
		}
	}
	return best
}

// sizeOf orders profiles of one model: by compute slices, then by memory.
func sizeOf(profile string) float64 {
	if profile == whole {
		return 1e9
	}
	slicesText, rest, _ := strings.Cut(profile, "g.")
	n, err := strconv.Atoi(slicesText[max(0, strings.LastIndex(slicesText, ".")+1):])
	if err != nil {
		return 0
	}
	memory, err := strconv.Atoi(strings.SplitN(rest, "gb", 2)[0])
	if err != nil {
		return float64(n)
	}
	return float64(n) + float64(memory)/1e4
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
		partly := len(g.Holders) > 0 && !slices.ContainsFunc(g.Holders, func(h Holder) bool { return h.What == whole }) && len(g.Taints) == 0
		offersWhole := slices.ContainsFunc(g.devices, func(d *resourceapi.Device) bool { return what(d) == whole })
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
