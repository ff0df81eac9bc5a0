package model

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"sort"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// Node is a simulated machine with GPUs, as a node file describes it.
type Node struct {
	Name string `json:"name"`
	// Note says where the values in the node file come from.
	Note string `json:"note,omitempty"`
	// DriverVersion and CUDAVersion are the versions that the installed driver reports. The layout's
	// options can override both.
	DriverVersion string `json:"driverVersion"`
	CUDAVersion   string `json:"cudaVersion"`
	GPUs          []Card `json:"gpus"`
	// Others are PCI devices that are not GPUs, such as NVSwitches and network cards. They appear only
	// in sysfs.
	Others []PCIDevice `json:"otherDevices,omitempty"`
	// ClientBlocksMode, ClientBlocksDestroy and CreateInUse say when the simulated driver refuses a
	// MIG change because the GPU is in use: see the Block constants of package state.
	// ClientBlocksDestroy is on by default, the other two are off.
	ClientBlocksMode    bool  `json:"clientBlocksMode,omitempty"`
	ClientBlocksDestroy *bool `json:"clientBlocksDestroy,omitempty"`
	CreateInUse         bool  `json:"createInUse,omitempty"`
	// NoUVMTools leaves out /dev/nvidia-uvm-tools, which only profilers need. NoCapabilityNodes leaves
	// out the device nodes of MIG instances, as on a host without nvidia-modprobe.
	NoUVMTools        bool `json:"noUvmTools,omitempty"`
	NoCapabilityNodes bool `json:"noCapabilityNodes,omitempty"`
	// DRMNodes gives each GPU its DRM device nodes, as the kernel module nvidia-drm does.
	DRMNodes bool `json:"drmNodes,omitempty"`
	// DRMModeset is that module's parameter modeset. Before driver 580.105.08 it keeps each GPU of a
	// node with DRMNodes open for good.
	DRMModeset bool `json:"drmModeset,omitempty"`
	// HostNodesInPart gives the host's /dev only the control node and the first GPU's, of all the
	// device nodes that a driver container has in its own root.
	HostNodesInPart bool `json:"hostNodesInPart,omitempty"`
	// NoLdconfig moves ldconfig from /sbin to bin/ldconfig of the layout's folder, as on hosts that
	// have it elsewhere. It needs the layout's MountRoot.
	NoLdconfig bool `json:"noLdconfig,omitempty"`
	// SettingsStay keeps the time slice and the compute mode of a GPU that no process has open, even
	// without persistence mode.
	SettingsStay bool `json:"settingsStay,omitempty"`
	// TopologyStays keeps MIG mode and instances over a reset and a driver load. A reboot removes
	// them.
	TopologyStays bool `json:"topologyStays,omitempty"`
	// UUIDBySyspipe makes the UUID of a MIG device depend on the syspipe that it got, so that an
	// instance made again in another order has another UUID.
	UUIDBySyspipe bool `json:"uuidBySyspipe,omitempty"`
	// FabricByInstances makes a GPU leave its NVLink fabric with its first GPU instance and return to
	// it after the last. By default it returns when MIG mode ends.
	FabricByInstances bool `json:"fabricByInstances,omitempty"`
	// NoRemapFields makes the field values of row remaps unsupported on a GPU with MIG instances, as
	// nvmlDeviceGetRemappedRows always is there.
	NoRemapFields bool `json:"noRemapFields,omitempty"`
	// EarlyWait makes nvmlEventSetWait report a timeout before the time is over.
	EarlyWait bool `json:"earlyWait,omitempty"`
	// LostGPU is what a GPU answers that fell off the bus: lost (the default), unknown or silent.
	LostGPU string `json:"lostGPU,omitempty"`
	// ConfidentialComputing is "", notReady or ready. While it is notReady, the GPUs accept no work.
	ConfidentialComputing string `json:"confidentialComputing,omitempty"`
	// AttachCost is how long the driver takes to open a closed GPU; it opens GPUs one after another.
	// If AttachCost is set, GPUs start without persistence mode.
	AttachCost metav1.Duration `json:"attachCost,omitzero"`
	// Passthrough gives the node a sysfs that behaves: see package sysfs. VFIO describes the kernel's
	// part of it.
	Passthrough bool `json:"passthrough,omitempty"`
	VFIO        VFIO `json:"vfio,omitzero"`
}

// The values of ConfidentialComputing that switch it on.
const (
	ConfComputeNotReady = "notReady"
	ConfComputeReady    = "ready"
)

// The values of LostGPU. A silent GPU lets each call run into a timeout, and reports XID 119.
const (
	LostGPULost    = "lost"
	LostGPUUnknown = "unknown"
	LostGPUSilent  = "silent"
)

// Card is a GPU of the node with its PCI slot.
type Card struct {
	Model string `json:"model"`
	// PCI is the GPU's PCI address as sysfs writes it: 0000:1b:00.0.
	PCI      string   `json:"pci"`
	PCIRoot  string   `json:"pciRoot"`
	Bridges  []string `json:"bridges,omitempty"`
	NUMANode int32    `json:"numaNode"`
	// Minor is the N of the GPU's device node /dev/nvidiaN. It can differ from the NVML index. The
	// default is the GPU's position in the order of PCI addresses.
	Minor *uint32 `json:"minor,omitempty"`
	// UUID is the GPU's UUID. By default it is derived from the seed, the node's name and the PCI
	// address.
	UUID   string  `json:"uuid,omitempty"`
	Serial string  `json:"serial,omitempty"`
	Module *uint32 `json:"moduleId,omitempty"`
	// IOMMUGroup is the GPU's IOMMU group, or nil if the machine's IOMMU is off.
	IOMMUGroup *uint32 `json:"iommuGroup,omitempty"`
	Fabric     *Fabric `json:"fabric,omitempty"`
	// Virtualization is none, passthrough or vgpu. A vGPU guest can change neither the GPU's MIG mode
	// nor its MIG instances.
	Virtualization string `json:"virtualization,omitempty"`
	// MIG is the GPU's MIG state when the node is created. A simulated reboot resets the state as a
	// reboot of a real machine does.
	MIG *CardMIG `json:"mig,omitempty"`
	// NoMemoryInfo says that NVML reports no memory sizes for this GPU, even if the GPU's model file
	// has memory sizes.
	NoMemoryInfo bool `json:"noMemoryInfo,omitempty"`
	// Driver is the kernel driver that the GPU has at boot: nvidia (the default) or vfio-pci. It
	// needs Passthrough, as do the next fields.
	Driver string `json:"driver,omitempty"`
	// ResetMethod is the content of reset_method, or none. The default is "flr bus".
	ResetMethod string `json:"resetMethod,omitempty"`
	// TotalVFs and VFs are the SR-IOV virtual functions that the GPU can have and has.
	TotalVFs uint32 `json:"totalVFs,omitempty"`
	VFs      uint32 `json:"vfs,omitempty"`
	// BridgeInGroup puts the nearest bridge into the GPU's IOMMU group.
	BridgeInGroup bool `json:"bridgeInGroup,omitempty"`
}

// CardMIG is a GPU's MIG mode and the MIG instances that an administrator created.
type CardMIG struct {
	Enabled bool `json:"enabled"`
	// Pending is the MIG mode after the next reset, if it differs from Enabled.
	Pending   *bool          `json:"pending,omitempty"`
	Instances []CardInstance `json:"instances,omitempty"`
}

// CardInstance is a GPU instance that exists when the node is created.
type CardInstance struct {
	// Profile is the ID of a GPU instance profile from the GPU's model file.
	Profile uint32 `json:"profile"`
	Start   uint32 `json:"start"`
	// Compute lists the profile IDs of the GPU instance's compute instances, in order. By default one
	// compute instance fills the GPU instance.
	Compute *[]uint32 `json:"compute,omitempty"`
}

// Fabric says to which NVLink cluster and clique a GPU belongs.
type Fabric struct {
	// State is the GPU's fabric state: notSupported, notStarted, inProgress or completed.
	State       string `json:"state"`
	ClusterUUID string `json:"clusterUUID,omitempty"`
	CliqueID    uint32 `json:"cliqueID,omitempty"`
}

// PCIDevice is a PCI device without a simulated driver. It appears only in sysfs.
type PCIDevice struct {
	PCI      string   `json:"pci"`
	PCIRoot  string   `json:"pciRoot"`
	Bridges  []string `json:"bridges,omitempty"`
	NUMANode int32    `json:"numaNode"`
	Vendor   string   `json:"vendor"`
	Device   string   `json:"device"`
	Class    string   `json:"class"`
	Driver   string   `json:"driver,omitempty"`
	// IOMMUGroup and ResetMethod are those of Card.
	IOMMUGroup  *uint32 `json:"iommuGroup,omitempty"`
	ResetMethod string  `json:"resetMethod,omitempty"`
}

// PCIAddress is the parsed PCI address of a device function.
type PCIAddress struct {
	Domain, Bus, Device, Function uint32
}

var (
	pciAddress = regexp.MustCompile(`^([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])$`)
	pciRoot    = regexp.MustCompile(`^pci[0-9a-f]{4,8}:[0-9a-f]{2}$`)
)

// ParsePCIAddress parses an address such as 0000:1b:00.0.
func ParsePCIAddress(text string) (PCIAddress, error) {
	var a PCIAddress
	if !pciAddress.MatchString(text) {
		return a, fmt.Errorf("%q is no PCI address such as 0000:1b:00.0 (lower case)", text)
	}
	_, err := fmt.Sscanf(text, "%x:%x:%x.%x", &a.Domain, &a.Bus, &a.Device, &a.Function)
	return a, err
}

func (a PCIAddress) less(b PCIAddress) bool {
	if a.Domain != b.Domain {
		return a.Domain < b.Domain
	}
	if a.Bus != b.Bus {
		return a.Bus < b.Bus
	}
	return a.Device < b.Device
}

// ReadNode reads a node file. It sorts the GPUs by PCI address, which is the order of NVML's
// indexes, and fills in each GPU's missing minor, UUID and module. Each edit changes what the file
// says.
func ReadNode(path, seed string, edits ...func(*Node) error) (*Node, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read node file: %w", err)
	}
	node := &Node{}
	if err := yaml.UnmarshalStrict(data, node); err != nil {
		return nil, fmt.Errorf("node file %s: %w", path, err)
	}
	if node.Name == "" {
		node.Name = strings.TrimSuffix(filepath.Base(path), ".yaml")
	}
	for _, edit := range edits {
		if err := edit(node); err != nil {
			return nil, fmt.Errorf("node file %s: %w", path, err)
		}
	}
	if err := node.complete(seed); err != nil {
		return nil, fmt.Errorf("node file %s: %w", path, err)
	}
	return node, nil
}

func (n *Node) complete(seed string) error {
	switch n.ConfidentialComputing {
	case "", ConfComputeNotReady, ConfComputeReady:
	default:
		return fmt.Errorf("confidentialComputing is %q: want %s, %s or nothing", n.ConfidentialComputing, ConfComputeNotReady, ConfComputeReady)
	}
	switch n.LostGPU {
	case "", LostGPULost, LostGPUUnknown, LostGPUSilent:
	default:
		return fmt.Errorf("lostGPU is %q: want %s, %s or %s", n.LostGPU, LostGPULost, LostGPUUnknown, LostGPUSilent)
	}
	addresses := map[string]PCIAddress{}
	for _, card := range n.GPUs {
		address, err := ParsePCIAddress(card.PCI)
		if err != nil {
			return err
		}
		if _, twice := addresses[card.PCI]; twice {
			return fmt.Errorf("two GPUs have the PCI address %s", card.PCI)
		}
		if address.Function != 0 {
			return fmt.Errorf("GPU at %s: a GPU must be PCI function 0", card.PCI)
		}
		if !pciRoot.MatchString(card.PCIRoot) {
			return fmt.Errorf("GPU at %s: %q is no PCI root such as pci0000:15", card.PCI, card.PCIRoot)
		}
		addresses[card.PCI] = address
	}
	for _, other := range n.Others {
		if _, err := ParsePCIAddress(other.PCI); err != nil {
			return err
		}
	}
	sort.Slice(n.GPUs, func(i, j int) bool { return addresses[n.GPUs[i].PCI].less(addresses[n.GPUs[j].PCI]) })

	if err := n.giveMinors(); err != nil {
		return err
	}
	for i := range n.GPUs {
		card := &n.GPUs[i]
		if card.Module == nil {
			module := uint32(i + 1)
			card.Module = &module
		}
		if card.UUID == "" {
			card.UUID = deriveUUID(seed, n.Name, card.PCI)
		}
		if _, err := card.Fabric.StateValue(); err != nil {
			return fmt.Errorf("GPU at %s: %w", card.PCI, err)
		}
		if _, err := card.VirtualizationValue(); err != nil {
			return fmt.Errorf("GPU at %s: %w", card.PCI, err)
		}
		if _, err := card.Fabric.Cluster(); err != nil {
			return fmt.Errorf("GPU at %s: %w", card.PCI, err)
		}
	}
	return n.completePassthrough()
}

// giveMinors gives a minor to every GPU whose node file names none. A GPU that another driver has
// at boot uses up none.
func (n *Node) giveMinors() error {
	minors := map[uint32]string{}
	next := uint32(0)
	for i := range n.GPUs {
		card := &n.GPUs[i]
		if card.Minor == nil {
			minor := next
			card.Minor = &minor
		}
		if card.StartsAway() {
			continue
		}
		next++
		if other, twice := minors[*card.Minor]; twice {
			return fmt.Errorf("minor %d belongs to the GPUs at %s and %s", *card.Minor, other, card.PCI)
		}
		minors[*card.Minor] = card.PCI
	}
	return nil
}

// deriveUUID hashes the parts into a GPU UUID. The same parts give the same UUID at every boot.
func deriveUUID(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	b := sum[:16]
	b[6] = b[6]&0x0f | 0x40 // version 4
	b[8] = b[8]&0x3f | 0x80 // variant of RFC 9562
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:16])
}

// StateValue returns the NVML_GPU_FABRIC_STATE_* number of the fabric state.
func (f *Fabric) StateValue() (uint32, error) {
	if f == nil {
		return 0, nil
	}
	switch f.State {
	case "", "notSupported":
		return 0, nil
	case "notStarted":
		return 1, nil
	case "inProgress":
		return 2, nil
	case "completed":
		return 3, nil
	}
	return 0, fmt.Errorf("fabric state %q is none of notSupported, notStarted, inProgress, completed", f.State)
}

// VirtualizationValue returns the NVML_GPU_VIRTUALIZATION_MODE_* number of the GPU.
func (c Card) VirtualizationValue() (uint32, error) {
	switch c.Virtualization {
	case "", "none":
		return 0, nil
	case "passthrough":
		return 1, nil
	case "vgpu":
		return 2, nil
	}
	return 0, fmt.Errorf("virtualization %q is none of none, passthrough, vgpu", c.Virtualization)
}

// Cluster returns the cluster's UUID as bytes, or zeros if the file gives no UUID.
func (f *Fabric) Cluster() ([16]byte, error) {
	var cluster [16]byte
	if f == nil || f.ClusterUUID == "" {
		return cluster, nil
	}
	raw, err := hex.DecodeString(strings.ReplaceAll(f.ClusterUUID, "-", ""))
	if err != nil || len(raw) != len(cluster) {
		return cluster, fmt.Errorf("fabric clusterUUID %q is no UUID", f.ClusterUUID)
	}
	copy(cluster[:], raw)
	return cluster, nil
}
