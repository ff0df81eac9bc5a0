package preview

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// WriteTable writes a table of the GPUs that a node has, the devices that it offers, and why it
// does not offer more.
func WriteTable(out io.Writer, p Offer) error {
	var text bytes.Buffer // no write to it fails
	writeGPUs(&text, p)
	writeMIG(&text, p)
	writeOffer(&text, p)
	writeList(&text, "Not listed by NVML", p.unlisted)
	writeList(&text, "Not offered, or only in part", p.whyNotMore())
	writeList(&text, "Left out", p.omitted())
	writeList(&text, "Open in other processes", p.holders())
	_, err := text.WriteTo(out)
	return err
}

func writeGPUs(out *bytes.Buffer, p Offer) {
	node := p.Node
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "Driver %s, CUDA %s\n\n", cmp.Or(node.Driver.Version, "missing"), cmp.Or(node.Driver.CUDAVersion, "unknown"))
	if len(node.GPUs) > 0 {
		fmt.Fprintln(w, "NAME\tPRODUCT\tMEMORY\tNUMA\tPCIE ROOT\tMINOR\tUUID")
	}
	for _, g := range node.GPUs {
		numa := "-"
		if g.NUMANode != nil {
			numa = strconv.Itoa(*g.NUMANode)
		}
		memory := "-"
		if g.MemoryBytes > 0 {
			//nolint:gosec // no card has 8 EiB
			memory = resource.NewQuantity(int64(g.MemoryBytes), resource.BinarySI).String()
		}
		minor := strconv.Itoa(g.Minor)
		if g.PassthroughOnly() {
			minor = "-"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n",
			g.WholeName(), cmp.Or(g.ProductName, "-"), memory, numa, cmp.Or(g.PCIeRoot, "-"), minor, cmp.Or(g.UUID, "-"))
	}
	_ = w.Flush()
}

// writeList writes the lines below the title, if there are any.
func writeList(out *bytes.Buffer, title string, lines []string) {
	if len(lines) > 0 {
		fmt.Fprintf(out, "\n%s:\n  %s\n", title, strings.Join(lines, "\n  "))
	}
}

func (p Offer) whyNotMore() (lines []string) {
	for _, problem := range p.Node.Problems {
		lines = append(lines, problem.String())
	}
	for _, g := range p.Node.GPUs {
		for _, reason := range p.reasons[g.WholeName()] {
			lines = append(lines, g.WholeName()+": "+reason)
		}
	}
	return lines
}

// omitted lists what the scan left out although the GPUs are offered.
func (p Offer) omitted() (lines []string) {
	for _, problem := range p.Node.Omissions {
		lines = append(lines, problem.String())
	}
	return lines
}

// holders lists the processes that have a GPU open. Such a process blocks a reset of the GPU and,
// if it is not this driver's, a change of its MIG mode.
func (p Offer) holders() (lines []string) {
	for _, g := range p.Node.GPUs {
		var names []string
		for _, process := range p.Holders[g.PCIAddress] {
			names = append(names, process.String())
		}
		if len(names) > 0 {
			lines = append(lines, g.WholeName()+": "+strings.Join(names, ", "))
		}
	}
	return lines
}

// writeOffer writes how many devices of each kind each GPU would publish. It counts all devices,
// even those that cannot be allocated at the same time.
func writeOffer(out *bytes.Buffer, p Offer) {
	if len(p.Node.GPUs) == 0 {
		return
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "\nNAME\tMIG POLICY\tDEVICES OFFERED")
	for _, g := range p.Node.GPUs {
		policy := "-"
		if g.MIG != nil {
			policy = p.policies.For(g.GPU).String()
		}
		kinds, devices := p.offered(g.GPU)
		for i, kind := range kinds {
			kinds[i] = fmt.Sprintf("%d x %s", devices[kind], kind)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\n", g.WholeName(), policy, cmp.Or(strings.Join(kinds, ", "), "none"))
	}
	_ = w.Flush()
}

// WriteSlices writes the ResourceSlices that a node would publish, as YAML documents. If nodeName
// is empty, WriteSlices uses the machine's host name.
func WriteSlices(out io.Writer, p Offer, driverName, nodeName string) error {
	if nodeName == "" {
		nodeName, _ = os.Hostname()
	}
	for _, slice := range p.Slices(driverName, nodeName) {
		data, err := yaml.Marshal(slice)
		if err != nil {
			return fmt.Errorf("write a ResourceSlice: %w", err)
		}
		if _, err := fmt.Fprintf(out, "---\n%s", data); err != nil {
			return err
		}
	}
	return nil
}

// Slices returns the slices of the offer, with the names, driver, pool and node that the plugin
// would set.
func (p Offer) Slices(driverName, nodeName string) []resourceapi.ResourceSlice {
	split := device.Slices(p.shapes, p.Node.Driver, false)
	slices := make([]resourceapi.ResourceSlice, len(split))
	for i, s := range split {
		slices[i] = resourceapi.ResourceSlice{
			TypeMeta:   metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceSlice"},
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%s-%d", nodeName, driverName, i)},
			Spec: resourceapi.ResourceSliceSpec{
				Driver:         driverName,
				Pool:           resourceapi.ResourcePool{Name: nodeName, Generation: 1, ResourceSliceCount: int64(len(split))},
				NodeName:       &nodeName,
				SharedCounters: s.SharedCounters,
				Devices:        s.Devices,
			},
		}
	}
	return slices
}
