package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// errOffersNothing makes the exit code tell scripts what the text tells people.
var errOffersNothing = errors.New("this node has NVIDIA GPUs and offers none of them")

// runInventory looks at this node once and shows what it would offer. It needs no cluster and changes nothing.
// It fails if there is a GPU on the PCI bus and nothing can be offered.
func runInventory(ctx context.Context, args []string, out io.Writer) error {
	format := ""
	cfg, err := config.Load("gpu-kubelet-plugin inventory", args, os.Environ(), func(f *pflag.FlagSet) {
		f.StringVarP(&format, "output", "o", "table", "table, yaml for the ResourceSlices that would be published, or cdi for the CDI specs that containers would get")
	})
	if err != nil {
		return asUsage(err)
	}
	if format != "table" && format != "yaml" && format != "cdi" {
		return usageError{fmt.Errorf("--output: %q is neither table nor yaml nor cdi", format)}
	}
	present, err := nvidia.HasNVIDIADevice(cfg.SysfsRoot)
	if err == nil && !present {
		_, err := fmt.Fprintln(out, "There is no NVIDIA GPU on this node's PCI bus: it offers nothing, and the plugin idles here.")
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find the program to start for looking at the GPUs: %w", err)
	}
	node, err := nvidia.Isolated(driver.Paths(cfg), self, driver.ScanCommand)(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", errOffersNothing, err)
	}
	if err := show(out, format, cfg.NodeName, node); err != nil {
		return err
	}
	if len(node.GPUs) == 0 {
		return errOffersNothing
	}
	return nil
}

func show(out io.Writer, format, nodeName string, node nvidia.Node) error {
	switch format {
	case "yaml":
		return inventory.WriteSlices(out, node, driver.DriverName, nodeName)
	case "cdi":
		return writeCDI(out, node)
	default:
		return inventory.WriteTable(out, node)
	}
}

// previewClaim stands for the claim's UID in the specs that are shown.
const previewClaim types.UID = "claim"

// writeCDI shows the base spec and the spec of a claim that holds every GPU of the node, as two JSON documents.
func writeCDI(out io.Writer, node nvidia.Node) error {
	if len(node.GPUs) == 0 {
		return nil // a spec without devices is none
	}
	devices := make([]cdi.ClaimDevice, len(node.GPUs))
	for i, g := range node.GPUs {
		devices[i] = cdi.ClaimDevice{Name: cdi.ClaimDeviceName(previewClaim, g.WholeName(), nil), Edits: g.Edits}
	}
	base, claim, err := cdi.Render(node.Common, devices)
	if err != nil {
		return err
	}
	for _, spec := range [][]byte{base, claim} {
		var indented bytes.Buffer
		if err := json.Indent(&indented, spec, "", "  "); err != nil {
			return fmt.Errorf("write a CDI spec: %w", err)
		}
		if _, err := fmt.Fprintln(out, indented.String()); err != nil {
			return err
		}
	}
	return nil
}
