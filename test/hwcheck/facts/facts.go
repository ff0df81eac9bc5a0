// Package facts is what a check of real hardware found, in the form in which it is kept below test/hardware: the conformance suite writes what NVML
// said of the GPUs, and hwcheck adds the machine, the driver and the verdicts. Serial numbers, host names and processes have no place in it.
package facts

import (
	"encoding/json"
	"fmt"
	"os"
)

// Report is one run on one machine.
type Report struct {
	// Format is the version of this form.
	Format int    `json:"format"`
	Date   string `json:"date"`
	// Plugin is the version of the gpu-kubelet-plugin that was run.
	Plugin  string  `json:"plugin"`
	Machine Machine `json:"machine"`
	// Driver is where the driver was found; empty where it was not.
	Driver *Driver `json:"driver,omitempty"`
	NVML   *NVML   `json:"nvml,omitempty"`
	Checks []Check `json:"checks"`
	// Agreed says that every check that counts agreed.
	Agreed bool `json:"agreed"`
}

// CurrentFormat is the Format of what this package writes.
const CurrentFormat = 1

// Machine is what the report says of the machine itself.
type Machine struct {
	Architecture string `json:"architecture"`
	Kernel       string `json:"kernel"`
	OS           string `json:"os,omitempty"`
	Cgroups      string `json:"cgroups"`
	// PCI lists NVIDIA's display controllers on the bus, as sysfs knows them.
	PCI []PCIFunction `json:"pci,omitempty"`
	// DeviceNodes are the NVIDIA names in the folder of device nodes.
	DeviceNodes []string `json:"deviceNodes,omitempty"`
}

// PCIFunction is one card on the bus.
type PCIFunction struct {
	Address string `json:"address"`
	Device  string `json:"device"`
	Driver  string `json:"driver,omitempty"`
}

// Driver is the installation that was found.
type Driver struct {
	Root    string `json:"root"`
	Library string `json:"library"`
	DevRoot string `json:"devRoot"`
	// Passed names the places that were tried before, each with why it was passed over.
	Passed []string `json:"passed,omitempty"`
}

// NVML is what the library said.
type NVML struct {
	DriverVersion string `json:"driverVersion"`
	CUDAVersion   string `json:"cudaVersion"`
	GPUs          []GPU  `json:"gpus"`
}

// GPU is one card in NVML's words. A question that was not answered leaves its name and NVML's answer in Unanswered.
type GPU struct {
	Name              string            `json:"name"`
	UUID              string            `json:"uuid"`
	PCIAddress        string            `json:"pciAddress"`
	PCIDeviceID       string            `json:"pciDeviceId"`
	PCISubsystemID    string            `json:"pciSubsystemId"`
	Brand             uint32            `json:"brand"`
	Architecture      uint32            `json:"architecture"`
	ComputeCapability string            `json:"cudaComputeCapability"`
	MemoryTotalMiB    uint64            `json:"memoryTotalMiB"`
	Minor             int               `json:"minor"`
	MIGMode           *int              `json:"migMode,omitempty"`
	Profiles          []Profile         `json:"gpuInstanceProfiles,omitempty"`
	Unanswered        map[string]string `json:"unanswered,omitempty"`
	// Model is the model file with this PCI ID; empty where there is none.
	Model       string       `json:"model,omitempty"`
	Differences []Difference `json:"differences,omitempty"`
}

// Profile is a GPU instance profile, with the names of the model files.
type Profile struct {
	Name         string   `json:"name,omitempty"`
	NVMLProfile  int      `json:"nvmlProfile"`
	ID           uint32   `json:"id"`
	Slices       uint32   `json:"slices"`
	InstancesMax uint32   `json:"instancesMax"`
	MemoryMiB    uint64   `json:"memoryMiB"`
	P2P          bool     `json:"p2p"`
	SM           uint32   `json:"sm"`
	Decoders     uint32   `json:"dec"`
	Encoders     uint32   `json:"enc"`
	CopyEngines  uint32   `json:"ce"`
	JPEGEngines  uint32   `json:"jpeg"`
	OFAEngines   uint32   `json:"ofa"`
	Starts       []uint32 `json:"starts,omitempty"`
	Size         uint32   `json:"size,omitempty"`
}

// Difference is one point in which a GPU and its model file disagree.
type Difference struct {
	What string `json:"what"`
	Want string `json:"modelFile"`
	Got  string `json:"nvml"`
}

// Verdict is how one check ended.
type Verdict string

// The verdicts.
const (
	Agreed    Verdict = "agreed"
	Differed  Verdict = "differed"
	Failed    Verdict = "failed"
	NotProven Verdict = "not proven"
)

// Check is one question and its answer.
type Check struct {
	Name    string  `json:"name"`
	Verdict Verdict `json:"verdict"`
	// Detail says what was found, and what was not shown by it.
	Detail string `json:"detail"`
}

// Write writes a value of this package as indented JSON.
func Write(path string, value any) error {
	data, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return fmt.Errorf("write facts: %w", err)
	}
	return os.WriteFile(path, append(data, '\n'), 0o644) //nolint:gosec // to be read by everyone
}
