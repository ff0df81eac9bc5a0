// Package facts defines the results of a check of real hardware, in the format of test/hardware.
// The conformance suite writes NVML's answers about the GPUs. Hwcheck adds the machine, the driver
// and the verdicts. The results contain no serial numbers, host names or processes.
package facts

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
)

// Report has the results of one run on one machine.
type Report struct {
	// Format is the version of the report's format.
	Format int    `json:"format"`
	Date   string `json:"date"`
	// Plugin is the version of the gpu-kubelet-plugin.
	Plugin  string  `json:"plugin"`
	Machine Machine `json:"machine"`
	// Driver is the installed driver, or nil if none was found.
	Driver *Driver `json:"driver,omitempty"`
	NVML   *NVML   `json:"nvml,omitempty"`
	// Getters, Libraries, Watcher, CUDA and MPS have the results of the check of the same name. They
	// are nil if that check did not come so far.
	Getters   *Getters   `json:"getters,omitempty"`
	Libraries *Libraries `json:"libraries,omitempty"`
	Watcher   *Watcher   `json:"watcher,omitempty"`
	CUDA      *CUDA      `json:"cuda,omitempty"`
	MPS       *MPS       `json:"mps,omitempty"`
	Checks    []Check    `json:"checks"`
	// Agreed is set when every check has the verdict Agreed.
	Agreed bool `json:"agreed"`
}

// CurrentFormat is the Format that this package writes.
const CurrentFormat = 2

// Machine describes the machine that was checked.
type Machine struct {
	Architecture string `json:"architecture"`
	Kernel       string `json:"kernel"`
	OS           string `json:"os,omitempty"`
	Cgroups      string `json:"cgroups"`
	// PCI lists NVIDIA's display controllers that sysfs shows.
	PCI []PCIFunction `json:"pci,omitempty"`
	// DeviceNodes are the names of the NVIDIA device nodes in /dev. NumberLinks counts the links in
	// /dev/char that lead to one.
	DeviceNodes []string `json:"deviceNodes,omitempty"`
	NumberLinks int      `json:"numberLinks"`
	// KernelDriver is what procfs says about the driver, or nil if it is not loaded.
	KernelDriver *KernelDriver `json:"kernelDriver,omitempty"`
}

// KernelDriver has the content of files in /proc/driver/nvidia, and NVIDIA's lines of
// /proc/devices.
type KernelDriver struct {
	Version    string   `json:"version"`
	Parameters []string `json:"parameters,omitempty"`
	// Capabilities are the paths of the files below /proc/driver/nvidia/capabilities.
	Capabilities []string `json:"capabilities,omitempty"`
	Majors       []string `json:"majors,omitempty"`
}

// PCIFunction is one GPU as the PCI bus shows it.
type PCIFunction struct {
	Address string `json:"address"`
	Device  string `json:"device"`
	Driver  string `json:"driver,omitempty"`
}

// Driver says where the driver is installed.
type Driver struct {
	Root    string `json:"root"`
	Library string `json:"library"`
	DevRoot string `json:"devRoot"`
	// Simulated says that the libraries are those of the simulator, so the report proves nothing about
	// hardware.
	Simulated bool `json:"simulated,omitempty"`
	// Passed lists the other driver roots that were tried, each with the reason why it was not chosen.
	Passed []string `json:"passed,omitempty"`
}

// NVML has the answers of the NVML library.
type NVML struct {
	DriverVersion string `json:"driverVersion"`
	CUDAVersion   string `json:"cudaVersion"`
	GPUs          []GPU  `json:"gpus"`
}

// GPU has NVML's answers about one GPU. Unanswered maps each query that failed to NVML's error.
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
	// Model is the name of the file that describes the GPU model with this PCI ID, or empty if there
	// is no such file.
	Model       string       `json:"model,omitempty"`
	Differences []Difference `json:"differences,omitempty"`
}

// Profile is a GPU instance profile, with the field names of the model files.
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

// Difference is a value for which NVML and the GPU's model file differ.
type Difference struct {
	What string `json:"what"`
	Want string `json:"modelFile"`
	Got  string `json:"nvml"`
}

// Answers maps each question of the getters to NVML's answer. A question begins with the GPU's PCI
// address, or with "machine".
type Answers map[string]Answer

// Answer is a value, or the reason why there is none: one of the constants below, or NVML's text.
type Answer struct {
	Value string `json:"value,omitempty"`
	Error string `json:"error,omitempty"`
}

func (a Answer) String() string {
	if a.Error != "" {
		return a.Error
	}
	return a.Value
}

// These are the reasons for which a getter has no value. Only the last is a fault: the others say
// that this GPU or driver does not have something.
const (
	NotSupported    = "not supported"
	NotFound        = "not found"
	InvalidArgument = "invalid argument"
	NoFunction      = "no such function in this driver"
	NoPermission    = "no permission"
)

// Refused reports whether NVML did not answer, although this GPU and driver have what was asked.
func (a Answer) Refused() bool {
	return a.Error != "" && !slices.Contains([]string{NotSupported, NotFound, InvalidArgument, NoFunction}, a.Error)
}

// Getters has the getters' answers to a process with CAP_SYS_ADMIN, and to one without any
// capability. Privileged is nil if hwcheck itself lacks that capability.
type Getters struct {
	Privileged   Answers `json:"privileged,omitempty"`
	Unprivileged Answers `json:"unprivileged,omitempty"`
}

// Libraries says which C library the driver's files need, and which this machine has. In a
// container the machine's C library is that of the image.
type Libraries struct {
	CLibrary string `json:"cLibrary"`
	// GLIBC is the highest version of glibc's symbols that CLibrary defines.
	GLIBC string        `json:"glibc"`
	Files []LibraryFile `json:"files"`
}

// LibraryFile is a library or program of the driver.
type LibraryFile struct {
	Name   string   `json:"name"`
	Needed []string `json:"needed,omitempty"`
	// GLIBC is the highest version of glibc's symbols that the file needs. It is empty for a static
	// program.
	GLIBC string `json:"glibc,omitempty"`
}

// Watcher has what was measured of the plugin's watcher process, and of scans while it ran.
type Watcher struct {
	// AttachMillis is the time from the start of the process until it had NVML, and AnswerMillis until
	// each GPU had answered and delivered events. AnswerMillis is 0 if that did not happen.
	AttachMillis int64 `json:"attachMillis"`
	AnswerMillis int64 `json:"answerMillis"`
	EndMillis    int64 `json:"endMillis"`
	Events       bool  `json:"events"`
	// Descriptors counts the open descriptors of each NVIDIA device node at rest.
	Descriptors map[string]int `json:"descriptors"`
	// Start and End are the process's use before and after the scans.
	Start Usage `json:"start"`
	End   Usage `json:"end"`
	Polls int   `json:"polls"`
	Scans Scans `json:"scans"`
}

// Usage is what a process holds.
type Usage struct {
	Descriptors int `json:"descriptors"`
	MemoryKiB   int `json:"memoryKiB"`
}

// Scans has the number of scans of the hardware and how long they took.
type Scans struct {
	Count         int   `json:"count"`
	FirstMillis   int64 `json:"firstMillis"`
	MedianMillis  int64 `json:"medianMillis"`
	LongestMillis int64 `json:"longestMillis"`
}

// CUDA has what the CUDA program printed in a container with one GPU, and in one without.
type CUDA struct {
	WithGPU    CUDAResult `json:"withGPU"`
	WithoutGPU CUDAResult `json:"withoutGPU"`
}

// CUDAResult is the output of the CUDA program. Step is the call that failed with Error, a
// CUresult, or "done".
type CUDAResult struct {
	Step          string `json:"step"`
	Error         int    `json:"error"`
	DriverVersion int    `json:"driverVersion"`
	Devices       int    `json:"devices"`
	UUID          string `json:"uuid"`
	Correct       int    `json:"correct"`
	Wrong         int    `json:"wrong"`
}

// MPS is what the CUDA program printed about an MPS daemon of its own and its clients, each with a
// pinned memory limit. Step and Error are those of CUDAResult, of the first client that failed. If
// FreeMiB could not be read, they are the call of NVML that failed and its error.
type MPS struct {
	Step  string `json:"step"`
	Error int    `json:"error"`
	// FreeMiB is the GPU's free memory before the daemon started.
	FreeMiB int64 `json:"freeMiB"`
	Started bool  `json:"started"`
	Servers int   `json:"servers"`
	Clients int   `json:"clients"`
	// Allocated and Refused count the clients that got memory below the limit, and that were refused
	// memory above it.
	Allocated int `json:"allocated"`
	Refused   int `json:"refused"`
	// Ended is true if daemon, server and clients ended.
	Ended bool `json:"ended"`
}

// Verdict is the result of one check.
type Verdict string

// These are the possible verdicts. Agreed and Differed are results of a comparison. Failed means
// that a program failed, and NotProven that this machine did not allow the comparison. Recorded
// means that there was an answer, and nothing to compare it with.
const (
	Agreed    Verdict = "agreed"
	Differed  Verdict = "differed"
	Failed    Verdict = "failed"
	NotProven Verdict = "not proven"
	Recorded  Verdict = "recorded"
)

// Check is one comparison of the machine with this project's model, with its result.
type Check struct {
	Name    string  `json:"name"`
	Verdict Verdict `json:"verdict"`
	// Detail says what was found, and what the verdict does not prove.
	Detail string `json:"detail"`
	// Answer is what was answered, word for word. Only checks that ask for something new have one.
	Answer string `json:"answer,omitempty"`
	// Millis is how long the check took, with the preparations since the check before it.
	Millis int64 `json:"millis"`
}

// Write writes value, a value of this package, as indented JSON to the file at path.
func Write(path string, value any) error {
	data, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return fmt.Errorf("write facts: %w", err)
	}
	return os.WriteFile(path, append(data, '\n'), 0o644) //nolint:gosec // to be read by everyone
}
