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

// Fact is a value that may be written alone or with where it comes from:
//
//	memoryTotalMiB: 81559
//	memoryTotalMiB: {value: 81559, status: verified, src: [SMI]}
type Fact[T any] struct {
	Value T
	// Known is false where the file does not give the value.
	Known bool
}

// UnmarshalJSON accepts both forms.
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

// GPU is one GPU model.
type GPU struct {
	// Key is the file's name without its ending; node files name the model by it.
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
	// AddressingMode is None without it: then it depends on the node's kernel what a card says.
	AddressingMode Fact[string] `json:"addressingMode"`
	// TimeSlices says whether the length of a time-slice can be set; without it, whether the GPU is of Volta or later.
	TimeSlices Fact[bool] `json:"timeSlices"`
	// Events are the kinds of events that can be registered for, by the names of EventTypes. Without it xid, and with ECC singleBitEcc and doubleBitEcc.
	Events Fact[[]string] `json:"events"`
	MIG    MIG            `json:"mig"`
	// MemoryInfo is false where NVML has no figures of the memory, because it is the host's; without it true.
	MemoryInfo Fact[bool] `json:"memoryInfo"`
}

// Enum is a value that NVML gives as a number.
type Enum struct {
	Value     string `json:"value"`
	NVMLEnum  string `json:"nvmlEnum"`
	NVMLValue uint32 `json:"nvmlValue"`
}

// MIG describes how a GPU can be partitioned.
type MIG struct {
	Supported    Fact[bool]   `json:"supported"`
	MaxInstances Fact[uint32] `json:"maxInstances"`
	// NeedsReset says that a change of MIG mode waits for a reset of the GPU, and outlives it.
	NeedsReset   Fact[bool] `json:"needsResetToToggle"`
	MemorySlices uint32     `json:"memorySlices"`
	Profiles     []Profile  `json:"gpuInstanceProfiles"`
	Compute      struct {
		PerGPUInstance map[string]struct {
			Profiles []ComputeProfile `json:"profiles"`
		} `json:"perGpuInstance"`
	} `json:"computeInstanceProfiles"`
}

// Profile is a GPU instance profile, with the figures that nvidia-smi mig -lgip prints.
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
	// WholeComputeProfile is the ID of the compute instance profile that fills an instance, where it is not the usual one of its slices.
	WholeComputeProfile Fact[uint32] `json:"wholeComputeProfile"`
	Placements          struct {
		Starts []uint32 `json:"starts"`
		Size   uint32   `json:"size"`
	} `json:"placements"`
}

// maxMemorySlices is how many the library counts with.
const maxMemorySlices = 31

// ComputeProfile is a compute instance profile within a GPU instance.
type ComputeProfile struct {
	Name         string `json:"name"`
	ID           uint32 `json:"id"`
	InstancesMax uint32 `json:"instancesMax"`
	SM           uint32 `json:"sm"`
}

// NVML_GPU_INSTANCE_PROFILE_* of nvml.h, by the name after that prefix.
var nvmlProfiles = map[string]uint32{
	"1_SLICE": 0x0, "2_SLICE": 0x1, "3_SLICE": 0x2, "4_SLICE": 0x3, "7_SLICE": 0x4, "8_SLICE": 0x5, "6_SLICE": 0x6,
	"1_SLICE_REV1": 0x7, "2_SLICE_REV1": 0x8, "1_SLICE_REV2": 0x9,
	"1_SLICE_GFX": 0xA, "2_SLICE_GFX": 0xB, "4_SLICE_GFX": 0xC, "1_SLICE_NO_ME": 0xD, "2_SLICE_NO_ME": 0xE,
	"1_SLICE_ALL_ME": 0xF, "2_SLICE_ALL_ME": 0x10, "3_SLICE_GFX": 0x11,
}

// NVMLValue is the NVML_GPU_INSTANCE_PROFILE_* number.
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
	gpu := &GPU{Key: strings.TrimSuffix(filepath.Base(path), ".yaml")}
	if err := yaml.Unmarshal(data, gpu); err != nil {
		return nil, fmt.Errorf("GPU model %s: %w", path, err)
	}
	if err := gpu.validate(); err != nil {
		return nil, fmt.Errorf("GPU model %s: %w", path, err)
	}
	return gpu, nil
}

// ReadGPUs reads every model file of a folder, by key.
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
		return fmt.Errorf("memoryTotalMiB is missing, or is there although memoryInfo is false")
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

// ComputeCapability is the CUDA compute capability as two numbers.
func (g *GPU) ComputeCapability() (major, minor uint32, err error) {
	if n, err := fmt.Sscanf(g.CUDAComputeCapability.Value, "%d.%d", &major, &minor); n != 2 || err != nil {
		return 0, 0, fmt.Errorf("cudaComputeCapability %q is not of the form 9.0", g.CUDAComputeCapability.Value)
	}
	return major, minor, nil
}

// NoAddressingMode stands for a GPU whose addressing mode NVML does not support.
const NoAddressingMode = math.MaxUint32

// AddressingModeValue is the NVML_DEVICE_ADDRESSING_MODE_* number, or NoAddressingMode.
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

// archVolta is NVML_DEVICE_ARCH_VOLTA.
const archVolta = 5

// HasTimeSlices tells whether the length of a time-slice can be set.
func (g *GPU) HasTimeSlices() bool {
	if g.TimeSlices.Known {
		return g.TimeSlices.Value
	}
	return g.Architecture.NVMLValue >= archVolta
}

// HasMemoryInfo tells whether NVML has figures of the memory.
func (g *GPU) HasMemoryInfo() bool { return !g.MemoryInfo.Known || g.MemoryInfo.Value }

// EventTypes are the nvmlEventType* that can be registered for.
func (g *GPU) EventTypes() (uint32, error) {
	if g.Events.Known {
		return ParseEventTypes(g.Events.Value)
	}
	if g.ECC.Value {
		return ParseEventTypes([]string{"xid", "singleBitEcc", "doubleBitEcc"})
	}
	return ParseEventTypes([]string{"xid"})
}

// ParsePCIID reads a combined ID such as 0x233010DE: device in the upper half, vendor in the lower, as NVML gives it.
func ParsePCIID(text string) (uint32, error) {
	id, err := strconv.ParseUint(text, 0, 32)
	if err != nil {
		return 0, fmt.Errorf("%q is no PCI ID such as 0x233010DE", text)
	}
	return uint32(id), nil
}

// ParseCUDAVersion gives 12.4 as NVML does: 12040.
func ParseCUDAVersion(text string) (uint32, error) {
	var major, minor uint32
	if n, err := fmt.Sscanf(text, "%d.%d", &major, &minor); n != 2 || err != nil {
		return 0, fmt.Errorf("CUDA version %q is not of the form 12.4", text)
	}
	return major*1000 + minor*10, nil
}
