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
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory/preview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/scan"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
)

// errOffersNothing is the error of the command inventory on a node whose GPUs would not be offered.
// Because of it the command ends with exit code 1, which scripts can test.
var errOffersNothing = errors.New("this node has NVIDIA GPUs and offers none of them")

// runInventory scans this node once and prints the devices that the plugin would publish, given its
// configuration and its checkpoint records of claims. It calls no API server and changes nothing.
// If the node has an NVIDIA GPU and the plugin would publish none, it returns errOffersNothing.
func runInventory(ctx context.Context, args []string, out io.Writer) error {
	format, configuration := "", settings.Default
	cfg, err := config.Load("gpu-kubelet-plugin inventory", args, os.LookupEnv, func(f *pflag.FlagSet) {
		f.StringVarP(&format, "output", "o", "table", "table, yaml for the ResourceSlices that would be published, cdi for the "+
			"CDI specs that containers would get, or model for the hardware as kubectl gpu slices reads it")
		f.StringVar(&configuration, "configuration", configuration, "name of the configuration in the settings, which the Node's labels choose "+
			"for the plugin")
	})
	if err != nil {
		return asUsage(err)
	}
	if !slices.Contains([]string{"table", "yaml", "cdi", "model"}, format) {
		return usageError{fmt.Errorf("--output: %q is neither table nor yaml nor cdi nor model", format)}
	}
	present, err := scan.HasNVIDIADevice(cfg.SysfsRoot)
	if err == nil && !present {
		_, err := fmt.Fprintln(out, "There is no NVIDIA GPU on this node's PCI bus. The node offers nothing, and the plugin idles.")
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find the program that scans the GPUs: %w", err)
	}
	driver.FindHooks(cfg)
	node, err := scan.Isolated(driver.Paths(cfg), self, driver.ScanCommand)(ctx)
	var unready *nvidia.NotReadyError
	if errors.As(err, &unready) && len(unready.Passthrough) > 0 { // virtual machines need no NVIDIA driver
		node = nvidia.Node{Passthrough: unready.Passthrough, Problems: []nvidia.Problem{{Message: unready.Error()}}}
	} else if err != nil {
		return fmt.Errorf("%w: %w", errOffersNothing, err)
	}
	if _, known := cfg.Settings.Configurations[configuration]; !known && configuration != settings.Default {
		return usageError{fmt.Errorf("--configuration: the settings have no configuration %q", configuration)}
	}
	set, err := cfg.Settings.Compile(configuration)
	if err != nil {
		return asUsage(err)
	}
	rules := preview.Rules{Policies: set.Policies, Shares: set.Shares}
	var recordsErr error
	rules.Records, recordsErr = recordsOf(cfg)
	offer, err := rules.Offer(node)
	if err != nil {
		return err
	}
	var gpus []device.GPU
	for _, g := range node.GPUs {
		gpus = append(gpus, g.GPU)
	}
	offer.Holders = scan.Users(driver.Paths(cfg), gpus)
	if err := show(out, format, driver.Paths(cfg), cfg.NodeName, offer, recordsErr); err != nil {
		return err
	}
	if offer.Empty() {
		return errOffersNothing
	}
	return nil
}

// notChecked is printed after the devices. It lists what also decides which devices the plugin
// publishes, but cannot be found out on the node alone.
const notChecked = `Not checked here:
  the Node's annotations gpu.nvidia.com/mig-policy and gpu.nvidia.com/passthrough, which take precedence over the policies above
  the Node's labels, which choose a configuration: see --configuration
  published devices that claims hold: they stay unchanged until the claims end, and overlapping devices are not offered
  the cluster's features: without shared counters or consumable capacities there are fewer devices and no shares
  NVIDIA's device plugin on this node, and claims of NVIDIA's DRA driver: their GPUs are not offered
  whether the kubelet has registered the plugin, the container runtime injects CDI devices, and the host can run the hooks
  the GPUs' health: unhealthy GPUs have taints
The plugin on this node reports all of these at /readyz (of its Pod's --http-address) and in Events (kubectl describe node).
`

// recordsOf returns the plugin's checkpoint records of the claims on this node. It creates nothing,
// and returns an error if there is no directory of records.
func recordsOf(cfg *config.Config) (preview.Records, error) {
	records := checkpoint.At(cfg.StateDir(), durable.OS{})
	if _, err := records.List(); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("no records in %s (--plugin-dir)", cfg.StateDir())
	} else if err != nil {
		return nil, err
	}
	bootID, err := durable.BootID(cfg.ProcRoot)
	if err != nil {
		return nil, err
	}
	return ledger.New(records, bootID, nil), nil
}

// show prints the devices of p, and then notChecked. It leaves notChecked out of CDI specs and the
// model, which describe hardware. recordsErr is nil, or says why the checkpoint records of claims
// cannot be read.
func show(out io.Writer, format string, paths nvidia.Paths, nodeName string, p preview.Offer, recordsErr error) error {
	notes := notChecked
	if recordsErr != nil {
		notes = strings.Replace(notes, "\n", "\n  the plugin's records, so that MIG instances of claims are shown as an "+
			"admin's: "+recordsErr.Error()+"\n", 1)
	}
	switch format {
	case "yaml":
		if err := preview.WriteSlices(out, p, driver.DriverName, nodeName); err != nil {
			return err
		}
		notes = "# " + strings.ReplaceAll(strings.TrimSpace(notes), "\n", "\n# ") + "\n"
	case "cdi":
		return writeCDI(out, paths, p)
	case "model":
		return preview.ModelOf(listed(p.Node)).Write(out)
	default:
		if err := preview.WriteTable(out, p); err != nil {
			return err
		}
		notes = "\n" + notes
	}
	_, err := fmt.Fprint(out, notes)
	return err
}

// listed returns the node without the GPUs that NVML does not list.
func listed(node nvidia.Node) nvidia.Node {
	node.GPUs = slices.DeleteFunc(slices.Clone(node.GPUs), func(g nvidia.GPU) bool { return g.PassthroughOnly() })
	return node
}

// previewClaim stands for a claim's UID in the CDI specs that the command inventory prints.
const previewClaim types.UID = "claim"

// writeCDI prints two JSON documents: the base CDI spec, and the CDI spec of an imaginary claim to
// which every device that the node offers to containers is allocated. It leaves out partitions that
// are not created yet, because only their capabilities' numbers make their edits.
func writeCDI(out io.Writer, paths nvidia.Paths, p preview.Offer) error {
	var devices []specs.Device
	for _, name := range p.Devices() {
		if edits, ok := editsOf(paths, p.Node, name); ok {
			devices = append(devices, specs.Device{Name: cdi.ClaimDeviceName(previewClaim, name.String(), nil), ContainerEdits: edits})
		}
	}
	if len(devices) == 0 {
		return nil // A CDI spec without devices would be invalid.
	}
	base, claim, err := cdi.Render(p.Node.Common, devices)
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

// editsOf returns the edits of a device for containers. The second result is false for any other,
// and for a partition that does not exist.
func editsOf(paths nvidia.Paths, node nvidia.Node, name device.Name) (specs.ContainerEdits, bool) {
	for _, g := range node.GPUs {
		switch {
		case g.WholeName() != name.GPU || name.Passthrough || g.PassthroughOnly():
		case name.Partition == nil:
			return g.Edits, true
		case g.MIG != nil:
			for _, in := range g.MIG.Instances {
				if c, ok := in.Part(*name.Partition); ok {
					return scan.CapabilityEdits(paths, g.Edits, in, c), true
				}
			}
		}
	}
	return specs.ContainerEdits{}, false
}
