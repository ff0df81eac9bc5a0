package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

// errOffersNothing makes the exit code tell scripts what the text tells people.
var errOffersNothing = errors.New("this node has NVIDIA GPUs and offers none of them")

// runInventory looks at this node once and shows what it would offer by its configuration and by the plugin's records. It needs no cluster, and so cannot say what
// the cluster has a part in; it changes nothing. It fails if there is a GPU on the PCI bus and nothing can be offered.
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
	rules, err := rulesOf(cfg)
	if err != nil {
		return asUsage(err)
	}
	var unread error
	rules.Records, unread = recordsOf(cfg)
	preview, err := rules.Preview(node)
	if err != nil {
		return err
	}
	preview.Holders = map[string][]nvidia.Process{}
	for _, g := range node.GPUs {
		preview.Holders[g.WholeName()] = driver.Paths(cfg).Holders(g.Minor)
	}
	if err := show(out, format, cfg.NodeName, preview, unread); err != nil {
		return err
	}
	if preview.Empty() {
		return errOffersNothing
	}
	return nil
}

// unseen is what decides about a node's offer, too, and does not show on the node.
const unseen = `Not looked at here:
  the Node's annotation gpu.nvidia.com/mig-policy, which goes before the policies that are shown
  what is published: devices that claims hold stay there as they are until the claims end, and GPUs offer nothing beside them that overlaps
  what the cluster keeps: without shared counters or consumable capacities there are fewer shapes and no shares
  NVIDIA's device plugin on this node, and claims of NVIDIA's own DRA driver: GPUs that these have are not offered
  whether the kubelet has registered the plugin, the container runtime injects CDI devices, and the host can run the hooks
  the GPUs' health: those that are ill have taints
The plugin that serves this node tells of all that: at /readyz (of its Pod's --http-address), and in Events (kubectl describe node).
`

// rulesOf are those of the configuration.
func rulesOf(cfg *config.Config) (inventory.Rules, error) {
	policies, err := device.ParsePolicies(cfg.MIGPolicy)
	shares, sharesErr := device.ParseShares(cfg.Shares)
	return inventory.Rules{Policies: policies, Shares: shares}, errors.Join(err, sharesErr)
}

// recordsOf are those that the plugin keeps on this node. Nothing is made where there are none.
func recordsOf(cfg *config.Config) (inventory.Records, error) {
	records, err := checkpoint.Open(cfg.StateDir(), durable.ReadOnly{})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("there are none in %s (--plugin-dir)", cfg.StateDir())
	}
	if err != nil {
		return nil, err
	}
	bootID, err := durable.BootID(cfg.ProcRoot)
	if err != nil {
		return nil, err
	}
	return prepare.New(prepare.Options{Records: records, BootID: bootID}), nil
}

// show ends with what was not looked at; unread is why the records are among that. The CDI specs, which are JSON, have no room for it.
func show(out io.Writer, format, nodeName string, p inventory.Preview, unread error) error {
	told := unseen
	if unread != nil {
		told = strings.Replace(told, "\n", "\n  the plugin's records, without which MIG instances of claims are shown as an admin's: "+unread.Error()+"\n", 1)
	}
	switch format {
	case "yaml":
		if err := inventory.WriteSlices(out, p, driver.DriverName, nodeName); err != nil {
			return err
		}
		told = "# " + strings.ReplaceAll(strings.TrimSpace(told), "\n", "\n# ") + "\n"
	case "cdi":
		return writeCDI(out, p.Node)
	default:
		if err := inventory.WriteTable(out, p); err != nil {
			return err
		}
		told = "\n" + told
	}
	_, err := fmt.Fprint(out, told)
	return err
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
