package inventory

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// writeCuts shows how GPUs can be cut, how they are cut and for whom, where any of them has MIG.
func writeCuts(out io.Writer, p Preview) error {
	able := slices.DeleteFunc(slices.Clone(p.Node.GPUs), func(g nvidia.GPU) bool { return g.MIG == nil })
	if len(able) == 0 {
		return nil
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "\nNAME\tMIG MODE\tPROFILES")
	for _, g := range able {
		fmt.Fprintf(w, "%s\t%s\t%s\n", g.WholeName(), mode(*g.MIG), cmp.Or(profiles(*g.MIG), "-"))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	w = tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	head := "\nINSTANCE\tID\tPLACEMENT\tPROFILE\tMADE FOR\tUUID\n"
	for _, g := range able {
		for _, i := range g.MIG.Instances {
			fmt.Fprint(w, head)
			head = ""
			writeInstance(w, g.GPU, i, p.madeFor(g.WholeName(), i))
		}
	}
	return w.Flush()
}

func mode(m device.MIG) string {
	words := map[bool]string{true: "on", false: "off"}
	text := words[m.Enabled]
	if m.Pending != m.Enabled {
		text += fmt.Sprintf(" (%s after a reset)", words[m.Pending])
	}
	if m.Uncuttable {
		text += " (fixed by the host of this virtual GPU)"
	}
	return text
}

// profiles says how many instances of each profile there can be at most.
func profiles(m device.MIG) string {
	texts := make([]string, len(m.Profiles))
	for n, p := range m.Profiles {
		texts[n] = fmt.Sprintf("%d x %s", p.MaxInstances, p.Name)
	}
	return strings.Join(texts, ", ")
}

// writeInstance has a line for each MIG device, under the name that it is offered by.
func writeInstance(w io.Writer, g device.GPU, i device.Instance, madeFor string) {
	place := fmt.Sprintf("%d:%d", i.Placement.Start, i.Placement.Size)
	if len(i.Compute) == 0 {
		name := device.Name{GPU: g.WholeName(), Partition: &device.PartitionName{ProfileID: i.ProfileID, Start: i.Placement.Start}}
		profile, _ := g.Profile(i.ProfileID)
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\tnone: it has no compute instance\n", name, i.ID, place, cmp.Or(profile.Name, "-"), madeFor)
	}
	for _, shape := range device.Offer([]device.Offering{{GPU: g, Layout: device.Layout{Instances: []device.Instance{i}}}}) {
		attributes := shape.Device(device.Driver{}).Attributes
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\t%s\n", shape.Name(), i.ID, place, *attributes["profile"].StringValue, madeFor, *attributes["uuid"].StringValue)
	}
}
