package model

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"
)

// Fact is a value of a model file. The file gives it alone, or with its status and source:
//
//	memoryTotalMiB: 81559
//	memoryTotalMiB: {value: 81559, status: verified, src: [SMI]}
type Fact[T any] struct {
	Value T
	// Known is false if the file does not give the value.
	Known bool
}

// UnmarshalJSON accepts a plain value, or a mapping of the value with its status and source.
func (f *Fact[T]) UnmarshalJSON(data []byte) error {
	if string(data) == "null" {
		return nil
	}
	var withSource struct {
		Value *T `json:"value"`
	}
	if data[0] == '{' {
		if err := json.Unmarshal(data, &withSource); err != nil {
			return err
		}
		if withSource.Value == nil {
			return fmt.Errorf("a value with a source needs the key %q", "value")
		}
		f.Value, f.Known = *withSource.Value, true
		return nil
	}
	if err := json.Unmarshal(data, &f.Value); err != nil {
		return err
	}
	f.Known = true
	return nil
}

// GPU is one GPU model, as a model file describes it.
type GPU struct {
	// Key is the model file's name without .yaml. Node files refer to the model by this key.
	Key string `json:"-"`

	ProductName           Fact[string] `json:"productName"`
	Brand                 Enum         `json:"brand"`
	Architecture          Enum         `json:"architecture"`
	CUDAComputeCapability Fact[string] `json:"cudaComputeCapability"`
	PCIDeviceID           Fact[string] `json:"pciDeviceId"`
	PCISubsystemID        Fact[string] `json:"pciSubsystemId"`
	MemoryTotalMiB        Fact[uint64] `json:"memoryTotalMiB"`
	Multiprocessors       Fact[uint32] `json:"multiprocessors"`
	TypicalDriverVersion  Fact[string] `json:"typicalDriverVersion"`
	TypicalCUDAVersion    Fact[string] `json:"typicalCudaVersion"`
	ECC                   Fact[bool]   `json:"ecc"`
	PowerLimitWatts       Fact[uint32] `json:"powerLimitWatts"`
	BAR1MiB               Fact[uint32] `json:"bar1MiB"`
	// AddressingMode is None, HMM, ATS or NotSupported. Without a value the simulator answers None; on
	// a real GPU the mode then depends on the node's kernel.
	AddressingMode Fact[string] `json:"addressingMode"`
	// TimeSlices says whether the GPU's time-slice interval can be set. The default is yes for Volta
	// and later architectures.
	TimeSlices Fact[bool] `json:"timeSlices"`
	// Events lists the event types that a process can register for, by the names that ParseEventType
	// knows. The default is xid; a GPU with ECC also has singleBitEcc and doubleBitEcc.
	Events Fact[[]string] `json:"events"`
	MIG    MIG            `json:"mig"`
	// MemoryInfo is false if NVML reports no memory sizes because the GPU uses the host's memory.
	MemoryInfo Fact[bool] `json:"memoryInfo"`
}

// Enum is a value for which NVML returns a number, such as an architecture or a brand.
type Enum struct {
	Value     string `json:"value"`
	NVMLEnum  string `json:"nvmlEnum"`
	NVMLValue uint32 `json:"nvmlValue"`
}

// MIG says whether a GPU supports MIG, and how it can be partitioned.
type MIG struct {
	Supported    Fact[bool]   `json:"supported"`
	MaxInstances Fact[uint32] `json:"maxInstances"`
	// NeedsReset says that a new MIG mode takes effect only at the next GPU reset, and that the MIG
	// mode survives every GPU reset.
	NeedsReset   Fact[bool] `json:"needsResetToToggle"`
	MemorySlices uint32     `json:"memorySlices"`
	Profiles     []Profile  `json:"gpuInstanceProfiles"`
	Compute      struct {
		PerGPUInstance map[string]struct {
			Profiles []ComputeProfile `json:"profiles"`
		} `json:"perGpuInstance"`
	} `json:"computeInstanceProfiles"`
}

// Profile is a GPU instance profile, with the values that nvidia-smi mig -lgip prints.
type Profile struct {
	Name         string `json:"name"`
	ID           uint32 `json:"id"`
	NVMLProfile  string `json:"nvmlProfile"`
	Slices       uint32 `json:"slices"`
	InstancesMax uint32 `json:"instancesMax"`
	MemoryMiB    uint64 `json:"memoryMiB"`
	P2P          string `json:"p2p"`
	SM           uint32 `json:"sm"`
	Decoders     uint32 `json:"dec"`
	Encoders     uint32 `json:"enc"`
	CopyEngines  uint32 `json:"ce"`
	JPEGEngines  uint32 `json:"jpeg"`
	OFAEngines   uint32 `json:"ofa"`
	// WholeComputeProfile is the ID of the compute instance profile that fills a GPU instance of this
	// profile. The file gives the ID only if it is not the usual one for the number of slices.
	WholeComputeProfile Fact[uint32] `json:"wholeComputeProfile"`
	Placements          struct {
		Starts []uint32 `json:"starts"`
		Size   uint32   `json:"size"`
	} `json:"placements"`
}

// maxMemorySlices is the largest number of memory slices on a GPU that the simulated library
// supports.
const maxMemorySlices = 31

// ComputeProfile is a compute instance profile that fits into a GPU instance.
type ComputeProfile struct {
	Name         string `json:"name"`
	ID           uint32 `json:"id"`
	InstancesMax uint32 `json:"instancesMax"`
	SM           uint32 `json:"sm"`
}

// nvmlProfiles maps the names of the NVML_GPU_INSTANCE_PROFILE_* constants in nvml.h, without that
// prefix, to their values.
var nvmlProfiles = map[string]uint32{
	"1_SLICE": 0x0, "2_SLICE": 0x1, "3_SLICE": 0x2, "4_SLICE": 0x3, "7_SLICE": 0x4, "8_SLICE": 0x5, "6_SLICE": 0x6,
	"1_SLICE_REV1": 0x7, "2_SLICE_REV1": 0x8, "1_SLICE_REV2": 0x9,
	"1_SLICE_GFX": 0xA, "2_SLICE_GFX": 0xB, "4_SLICE_GFX": 0xC, "1_SLICE_NO_ME": 0xD, "2_SLICE_NO_ME": 0xE,
	"1_SLICE_ALL_ME": 0xF, "2_SLICE_ALL_ME": 0x10, "3_SLICE_GFX": 0x11,
}

// NVMLValue returns the value of the profile's NVML_GPU_INSTANCE_PROFILE_* constant.
func (p Profile) NVMLValue() (uint32, error) {
	value, ok := nvmlProfiles[p.NVMLProfile]
	if !ok {
		return 0, fmt.Errorf("profile %q: nvmlProfile %q is no NVML_GPU_INSTANCE_PROFILE_*", p.Name, p.NVMLProfile)
	}
	return value, nil
}

// ReadGPU reads one model file.
func ReadGPU(path string) (*GPU, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read GPU model: %w", err)
	}
	gpu, err := ParseGPU(strings.TrimSuffix(filepath.Base(path), ".yaml"), data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return gpu, nil
}

// ParseGPU parses the content of a model file. key is the file's name without .yaml.
func ParseGPU(key string, data []byte) (*GPU, error) {
	gpu := &GPU{Key: key}
	if err := yaml.Unmarshal(data, gpu); err != nil {
		return nil, fmt.Errorf("GPU model %s: %w", key, err)
	}
	if err := gpu.validate(); err != nil {
		return nil, fmt.Errorf("GPU model %s: %w", key, err)
	}
	return gpu, nil
}

// ReadGPUs reads every model file of a folder. The result maps each model's Key to the model.
func ReadGPUs(folder string) (map[string]*GPU, error) {
	paths, err := filepath.Glob(filepath.Join(folder, "*.yaml"))
	if err != nil {
		return nil, err
	}
	if len(paths) == 0 {
		return nil, fmt.Errorf("no GPU model files (*.yaml) in %s", folder)
	}
	sort.Strings(paths)
	gpus := map[string]*GPU{}
	for _, path := range paths {
		gpu, err := ReadGPU(path)
		if err != nil {
			return nil, err
		}
		gpus[gpu.Key] = gpu
	}
	return gpus, nil
}

func (g *GPU) validate() error {
	switch {
	case !g.ProductName.Known || g.ProductName.Value == "":
		return fmt.Errorf("productName is missing")
	case g.HasMemoryInfo() != (g.MemoryTotalMiB.Value > 0):
		return fmt.Errorf("memoryTotalMiB is missing, or is set although memoryInfo is false")
	}
	if _, _, err := g.ComputeCapability(); err != nil {
		return err
	}
	for name, id := range map[string]Fact[string]{"pciDeviceId": g.PCIDeviceID, "pciSubsystemId": g.PCISubsystemID} {
		if _, err := ParsePCIID(id.Value); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	if _, err := g.AddressingModeValue(); err != nil {
		return err
	}
	if _, err := g.EventTypes(); err != nil {
		return err
	}
	for _, profile := range g.MIG.Profiles {
		if _, err := profile.NVMLValue(); err != nil {
			return err
		}
		if profile.Placements.Size == 0 || len(profile.Placements.Starts) == 0 {
			return fmt.Errorf("profile %q has no placements", profile.Name)
		}
		for _, start := range profile.Placements.Starts {
			if start+profile.Placements.Size > g.MIG.MemorySlices || g.MIG.MemorySlices > maxMemorySlices {
				return fmt.Errorf("profile %q at %d:%d is not within %d memory slices (at most %d)",
					profile.Name, start, profile.Placements.Size, g.MIG.MemorySlices, maxMemorySlices)
			}
		}
	}
	return nil
}

// ComputeCapability splits the CUDA compute capability, such as 9.0, into major and minor.
func (g *GPU) ComputeCapability() (major, minor uint32, err error) {
	if n, err := fmt.Sscanf(g.CUDAComputeCapability.Value, "%d.%d", &major, &minor); n != 2 || err != nil {
		return 0, 0, fmt.Errorf("cudaComputeCapability %q is not of the form 9.0", g.CUDAComputeCapability.Value)
	}
	return major, minor, nil
}

// NoAddressingMode means that NVML answers NOT_SUPPORTED when asked for the GPU's addressing mode.
const NoAddressingMode = math.MaxUint32

// AddressingModeValue returns the NVML_DEVICE_ADDRESSING_MODE_* number of the GPU's addressing
// mode, or NoAddressingMode.
func (g *GPU) AddressingModeValue() (uint32, error) {
	switch g.AddressingMode.Value {
	case "", "None":
		return 0, nil
	case "HMM":
		return 1, nil
	case "ATS":
		return 2, nil
	case "NotSupported":
		return NoAddressingMode, nil
	}
	return 0, fmt.Errorf("addressingMode %q is none of None, HMM, ATS, NotSupported", g.AddressingMode.Value)
}

// archVolta is the value of NVML_DEVICE_ARCH_VOLTA in nvml.h.
const archVolta = 5

// HasTimeSlices reports whether the GPU's time-slice interval can be set.
func (g *GPU) HasTimeSlices() bool {
	if g.TimeSlices.Known {
		return g.TimeSlices.Value
	}
	return g.Architecture.NVMLValue >= archVolta
}

// HasMemoryInfo reports whether NVML returns memory sizes for the GPU.
func (g *GPU) HasMemoryInfo() bool { return !g.MemoryInfo.Known || g.MemoryInfo.Value }

// EventTypes returns the event types that a process can register for, as a mask of nvmlEventType*
// bits.
func (g *GPU) EventTypes() (uint32, error) {
	if g.Events.Known {
		return ParseEventTypes(g.Events.Value)
	}
	if g.ECC.Value {
		return ParseEventTypes([]string{"xid", "singleBitEcc", "doubleBitEcc"})
	}
	return ParseEventTypes([]string{"xid"})
}

// ParsePCIID parses a combined PCI ID such as 0x233010DE. As in NVML, the upper half is the device
// ID and the lower half the vendor ID.
func ParsePCIID(text string) (uint32, error) {
	id, err := strconv.ParseUint(text, 0, 32)
	if err != nil {
		return 0, fmt.Errorf("%q is no PCI ID such as 0x233010DE", text)
	}
	return uint32(id), nil
}

// ParseCUDAVersion converts a CUDA version to NVML's number: 12.4 becomes 12040.
func ParseCUDAVersion(text string) (uint32, error) {
	var major, minor uint32
	if n, err := fmt.Sscanf(text, "%d.%d", &major, &minor); n != 2 || err != nil {
		return 0, fmt.Errorf("CUDA version %q is not of the form 12.4", text)
	}
	return major*1000 + minor*10, nil
}
