package preview

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// writeMIG writes the profiles and MIG instances of each MIG-capable GPU, and who created each MIG
// instance.
func writeMIG(out *bytes.Buffer, p Offer) {
	migCapable := slices.DeleteFunc(slices.Clone(p.Node.GPUs), func(g nvidia.GPU) bool { return g.MIG == nil })
	if len(migCapable) == 0 {
		return
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "\nNAME\tMIG MODE\tPROFILES")
	for _, g := range migCapable {
		fmt.Fprintf(w, "%s\t%s\t%s\n", g.WholeName(), modeText(*g.MIG), cmp.Or(profilesText(*g.MIG), "-"))
	}
	_ = w.Flush()
	w = tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	head := "\nINSTANCE\tID\tPLACEMENT\tPROFILE\tMADE FOR\tUUID\n"
	for _, g := range migCapable {
		for _, i := range g.MIG.Instances {
			fmt.Fprint(w, head)
			head = ""
			writeInstance(w, g.GPU, i, p.ownerOf(g.WholeName(), i))
		}
	}
	_ = w.Flush()
}

func modeText(m device.MIG) string {
	words := map[bool]string{true: "on", false: "off"}
	text := words[m.Enabled]
	if m.Pending != m.Enabled {
		text += fmt.Sprintf(" (%s after a reset)", words[m.Pending])
	}
	if m.ReadOnly {
		text += " (controlled by the vGPU host)"
	}
	return text
}

// profilesText returns the names of the profiles, each with how many MIG instances of it fit on the
// GPU.
func profilesText(m device.MIG) string {
	texts := make([]string, len(m.Profiles))
	for n, p := range m.Profiles {
		texts[n] = fmt.Sprintf("%d x %s", p.MaxInstances, p.Name)
	}
	return strings.Join(texts, ", ")
}

// writeInstance writes one line for each MIG device of the GPU instance, or one line if it has no
// compute instance.
func writeInstance(w io.Writer, g device.GPU, i device.Instance, owner string) {
	place := fmt.Sprintf("%d:%d", i.Placement.Start, i.Placement.Size)
	if len(i.Compute) == 0 {
		name := device.Name{GPU: g.WholeName(), Partition: &device.PartitionName{ProfileID: i.ProfileID, Start: i.Placement.Start}}
		profile, _ := g.Profile(i.ProfileID)
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\tnone: no compute instance\n", name, i.ID, place, cmp.Or(profile.Name, "-"), owner)
	}
	for _, shape := range device.Offer([]device.Offering{{GPU: g, Layout: device.Layout{Instances: []device.Instance{i}}}}) {
		attributes := shape.Attributes(device.Driver{})
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\t%s\n",
			shape.Name(), i.ID, place, *attributes["profile"].StringValue, owner, *attributes["uuid"].StringValue)
	}
}
