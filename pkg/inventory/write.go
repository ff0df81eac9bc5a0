package inventory

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"strconv"
	"text/tabwriter"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// WriteTable shows people what a node offers, and of the rest why not.
func WriteTable(out io.Writer, node nvidia.Node) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "Driver %s, CUDA %s\n\n", node.Driver.Version, cmp.Or(node.Driver.CUDAVersion, "unknown"))
	if len(node.GPUs) > 0 {
		fmt.Fprintln(w, "NAME\tPRODUCT\tMEMORY\tNUMA\tPCIE ROOT\tMINOR\tUUID")
	}
	for _, g := range node.GPUs {
		numa := "-"
		if g.NUMANode != nil {
			numa = strconv.Itoa(*g.NUMANode)
		}
		memory := resource.NewQuantity(int64(g.MemoryBytes), resource.BinarySI) //nolint:gosec // no card has 8 EiB
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%d\t%s\n", g.WholeName(), g.ProductName, memory, numa, cmp.Or(g.PCIeRoot, "-"), g.Minor, g.UUID)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if err := writeCuts(out, node); err != nil {
		return err
	}
	for i, p := range node.Problems {
		if i == 0 {
			fmt.Fprintln(out, "\nNot offered, or not in every shape:")
		}
		if _, err := fmt.Fprintf(out, "  %s\n", p); err != nil {
			return err
		}
	}
	return nil
}

// WriteSlices shows the ResourceSlices that a node would publish, as YAML documents. Without a node name the machine's own stands in.
func WriteSlices(out io.Writer, node nvidia.Node, driverName, nodeName string) error {
	if nodeName == "" {
		nodeName, _ = os.Hostname()
	}
	for _, slice := range resourceSlices(node, driverName, nodeName) {
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

// resourceSlices gives the slices what the publisher adds to them: name, driver, pool and node. The publisher also has records, by which it tells
// instances that claims made from those of an admin, and knows the cluster: here every instance is an admin's, and the cluster keeps counters.
func resourceSlices(node nvidia.Node, driverName, nodeName string) []resourceapi.ResourceSlice {
	offerings := make([]device.Offering, len(node.GPUs))
	for i, g := range node.GPUs {
		layout, _ := device.Decide(g.GPU, nil, device.PolicyDynamic, true)
		offerings[i] = device.Offering{GPU: g.GPU, Layout: layout}
	}
	cut := device.Slices(device.Offer(offerings), node.Driver)
	slices := make([]resourceapi.ResourceSlice, len(cut))
	for i, s := range cut {
		slices[i] = resourceapi.ResourceSlice{
			TypeMeta:   metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceSlice"},
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%s-%d", nodeName, driverName, i)},
			Spec: resourceapi.ResourceSliceSpec{
				Driver:         driverName,
				Pool:           resourceapi.ResourcePool{Name: nodeName, Generation: 1, ResourceSliceCount: int64(len(cut))},
				NodeName:       &nodeName,
				SharedCounters: s.SharedCounters,
				Devices:        s.Devices,
			},
		}
	}
	return slices
}
