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

// Node is a machine with GPUs.
type Node struct {
	Name string `json:"name"`
	// Note says where the file's values come from.
	Note string `json:"note,omitempty"`
	// DriverVersion and CUDAVersion are what the driver reports unless the layout is told another version.
	DriverVersion string `json:"driverVersion"`
	CUDAVersion   string `json:"cudaVersion"`
	GPUs          []Card `json:"gpus"`
	// Others are PCI devices that are no GPUs: NVSwitches, network cards. They stand in sysfs only.
	Others []PCIDevice `json:"otherDevices,omitempty"`
	// ClientBlocksMode and ClientBlocksDestroy (on unless it says false) say what processes that
	// only have NVML open keep others from, CreateInUse that the first GPU instance of a GPU is
	// refused once.
	ClientBlocksMode    bool  `json:"clientBlocksMode,omitempty"`
	ClientBlocksDestroy *bool `json:"clientBlocksDestroy,omitempty"`
	CreateInUse         bool  `json:"createInUse,omitempty"`
	// AttachCost is how long the driver takes to open a GPU that nobody has open, one GPU after
	// another. With it GPUs begin without persistence mode.
	AttachCost metav1.Duration `json:"attachCost,omitzero"`
}

// Card is one GPU in its slot.
type Card struct {
	Model string `json:"model"`
	// PCI is the address as sysfs writes it: 0000:1b:00.0.
	PCI      string   `json:"pci"`
	PCIRoot  string   `json:"pciRoot"`
	Bridges  []string `json:"bridges,omitempty"`
	NUMANode int32    `json:"numaNode"`
	// Minor is N of /dev/nvidiaN; the driver counts in the order in which it finds the GPUs.
	Minor *uint32 `json:"minor,omitempty"`
	// UUID, where not given, is derived from seed, node and PCI address.
	UUID   string  `json:"uuid,omitempty"`
	Serial string  `json:"serial,omitempty"`
	Module *uint32 `json:"moduleId,omitempty"`
	// IOMMUGroup is absent where the IOMMU is off.
	IOMMUGroup *uint32 `json:"iommuGroup,omitempty"`
	Fabric     *Fabric `json:"fabric,omitempty"`
	// Virtualization is one of none, passthrough, vgpu: a vGPU guest can neither change its MIG mode nor make or remove instances.
	Virtualization string `json:"virtualization,omitempty"`
	// MIG is how the GPU is cut when the node is made. A reboot forgets it, as far as the hardware does.
	MIG *CardMIG `json:"mig,omitempty"`
	// NoMemoryInfo says that NVML has no figures of the GPU's memory, whatever the model file says.
	NoMemoryInfo bool `json:"noMemoryInfo,omitempty"`
}

// CardMIG is a GPU's MIG mode and what an administrator made of it.
type CardMIG struct {
	Enabled bool `json:"enabled"`
	// Pending, where given, is another mode that waits for a reset.
	Pending   *bool          `json:"pending,omitempty"`
	Instances []CardInstance `json:"instances,omitempty"`
}

// CardInstance is a GPU instance.
type CardInstance struct {
	// Profile is the ID of a GPU instance profile of the model.
	Profile uint32 `json:"profile"`
	Start   uint32 `json:"start"`
	// Compute are the compute instances, one after the other, by profile ID. Without it there is one that fills the GPU instance.
	Compute *[]uint32 `json:"compute,omitempty"`
}

// Fabric is a GPU's place in an NVLink fabric.
type Fabric struct {
	// State is one of notSupported, notStarted, inProgress, completed.
	State       string `json:"state"`
	ClusterUUID string `json:"clusterUUID,omitempty"`
	CliqueID    uint32 `json:"cliqueID,omitempty"`
}

// PCIDevice is a device that only sysfs knows.
type PCIDevice struct {
	PCI      string   `json:"pci"`
	PCIRoot  string   `json:"pciRoot"`
	Bridges  []string `json:"bridges,omitempty"`
	NUMANode int32    `json:"numaNode"`
	Vendor   string   `json:"vendor"`
	Device   string   `json:"device"`
	Class    string   `json:"class"`
	Driver   string   `json:"driver,omitempty"`
}

// PCIAddress is a parsed address of a function.
type PCIAddress struct {
	Domain, Bus, Device, Function uint32
}

var (
	pciAddress = regexp.MustCompile(`^([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])$`)
	pciRoot    = regexp.MustCompile(`^pci[0-9a-f]{4,8}:[0-9a-f]{2}$`)
)

// ParsePCIAddress reads an address such as 0000:1b:00.0.
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

// ReadNode reads a node file. Its GPUs come back in the order of their PCI addresses, which is the order of NVML's
// indexes, each with its minor, UUID and module set.
func ReadNode(path, seed string) (*Node, error) {
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
	if err := node.complete(seed); err != nil {
		return nil, fmt.Errorf("node file %s: %w", path, err)
	}
	return node, nil
}

func (n *Node) complete(seed string) error {
	addresses := map[string]PCIAddress{}
	for _, card := range n.GPUs {
		address, err := ParsePCIAddress(card.PCI)
		if err != nil {
			return err
		}
		if _, twice := addresses[card.PCI]; twice {
			return fmt.Errorf("two GPUs at %s", card.PCI)
		}
		if address.Function != 0 {
			return fmt.Errorf("GPU at %s: a GPU is function 0", card.PCI)
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

	minors := map[uint32]string{}
	for i := range n.GPUs {
		card := &n.GPUs[i]
		if card.Minor == nil {
			minor := uint32(i)
			card.Minor = &minor
		}
		if other, twice := minors[*card.Minor]; twice {
			return fmt.Errorf("minor %d belongs to the GPUs at %s and %s", *card.Minor, other, card.PCI)
		}
		minors[*card.Minor] = card.PCI
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
	return nil
}

// deriveUUID gives each GPU of each node its own UUID, the same at every boot.
func deriveUUID(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	b := sum[:16]
	b[6] = b[6]&0x0f | 0x40 // version 4
	b[8] = b[8]&0x3f | 0x80 // variant of RFC 9562
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:16])
}

// StateValue is the NVML_GPU_FABRIC_STATE_* number.
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

// VirtualizationValue is the NVML_GPU_VIRTUALIZATION_MODE_* number.
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

// Cluster is the cluster's UUID as bytes, all zero where there is none.
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
