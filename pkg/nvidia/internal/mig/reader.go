package mig

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	nvlib "github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
)

// Reader reads how one GPU can be partitioned and changes nothing. It caches values that cannot
// change while NVML is open.
type Reader struct {
	Paths nvidia.Paths
	Lib   nvml.Interface
	// progress is called after each NVML answer, so that many slow answers do not look like a hang.
	progress func()
	// kinds are the card's GPU instance profiles.
	kinds []Kind
	// names are the names of the GPU instance profiles by profile ID.
	names map[uint32]string
	// compute are the compute instance profiles by GPU instance profile ID.
	compute map[uint32][]nvml.ComputeInstanceProfileInfo
}

// Kind is a GPU instance profile. number is the argument with which NVML was queried for it, and
// differs from the profile ID.
type Kind struct {
	number int
	nvml.GpuInstanceProfileInfo
}

// NewReader returns a reader for one card. progress is called after each NVML answer.
func NewReader(p nvidia.Paths, library nvml.Interface, progress func()) *Reader {
	return &Reader{
		Paths: p, Lib: library, progress: progress,
		names: map[uint32]string{}, compute: map[uint32][]nvml.ComputeInstanceProfileInfo{},
	}
}

// kindLimit is how many GPU instance profile numbers are tried. It is larger than the count in
// today's nvml.h. NVML returns an error for an unknown number.
const kindLimit = 32

// Kinds lists the card's GPU instance profiles. If a query fails, it returns the error and the
// profiles read before.
func (m *Reader) Kinds(card nvml.Device) ([]Kind, error) {
	if m.kinds != nil {
		return m.kinds, nil
	}
	var found []Kind
	for n := range kindLimit {
		info, ret := card.GetGpuInstanceProfileInfo(n)
		m.progress()
		if nvmlx.IsAbsent(ret) {
			continue
		}
		if ret != nvml.SUCCESS {
			return found, fmt.Errorf("read the GPU instance profile of kind %d: %w", n, nvmlx.ToError(ret))
		}
		if !slices.ContainsFunc(found, func(k Kind) bool { return k.Id == info.Id }) {
			found = append(found, Kind{n, info})
		}
	}
	m.kinds = found
	return found, nil
}

// Profiles lists the card's MIG profiles by ID. It leaves out a profile without placements or
// instances. unknown has the names of those with placements of several sizes, which cannot be
// offered.
func (m *Reader) Profiles(card nvml.Device) (profiles []device.Profile, unknown []string, _ error) {
	kinds, err := m.Kinds(card)
	if err != nil {
		return nil, nil, err
	}
	for _, k := range kinds {
		p := device.Profile{
			ID: k.Id, Name: m.profileName(card, k), Slices: k.SliceCount, MaxInstances: k.InstanceCount, MemoryBytes: k.MemorySizeMB << 20,
			Engines: device.Engines{
				Multiprocessors: k.MultiprocessorCount, CopyEngines: k.CopyEngineCount, Decoders: k.DecoderCount,
				Encoders: k.EncoderCount, JPEGEngines: k.JpegCount, OFAEngines: k.OfaCount,
			},
		}
		places, ret := card.GetGpuInstancePossiblePlacements(&k.GpuInstanceProfileInfo)
		m.progress()
		if ret != nvml.SUCCESS && !nvmlx.IsAbsent(ret) {
			return nil, nil, fmt.Errorf("read the placements of GPU instance profile %s: %w", p.Name, nvmlx.ToError(ret))
		}
		if slices.ContainsFunc(places, func(o nvml.GpuInstancePlacement) bool { return o.Size != places[0].Size }) {
			unknown = append(unknown, p.Name)
		} else if ret == nvml.SUCCESS && setPlacements(&p, places) {
			profiles = append(profiles, p)
		}
	}
	slices.SortFunc(profiles, func(a, b device.Profile) int { return cmp.Compare(a.ID, b.ID) })
	return profiles, unknown, nil
}

// setPlacements sets the placements of p. It returns false if the profile cannot be offered,
// because it has no placement or no instances.
func setPlacements(p *device.Profile, places []nvml.GpuInstancePlacement) bool {
	for _, place := range places {
		p.Size = place.Size
		p.Starts = append(p.Starts, place.Start)
	}
	slices.Sort(p.Starts)
	p.Starts = slices.Compact(p.Starts)
	return p.Size > 0 && p.MaxInstances > 0
}

// profileName returns the driver's name of a profile, without the "MIG " prefix.
func (m *Reader) profileName(card nvml.Device, k Kind) string {
	if name, ok := m.names[k.Id]; ok {
		return name
	}
	name := ""
	if nvmlx.Has(m.Lib, "nvmlDeviceGetGpuInstanceProfileInfoV") {
		if info, ret := card.GetGpuInstanceProfileInfoV(k.number).V2(); ret == nvml.SUCCESS {
			name = strings.TrimPrefix(nvmlx.CString(info.Name[:]), "MIG ")
		}
		m.progress()
	}
	if name == "" {
		name = m.customaryName(card, k)
	}
	m.names[k.Id] = name
	return name
}

// fillingProfiles are NVML's numbers of the compute instance profiles by the number of slices that
// they fill.
var fillingProfiles = map[uint32]int{
	1: nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 2: nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 3: nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE,
	4: nvml.COMPUTE_INSTANCE_PROFILE_4_SLICE, 6: nvml.COMPUTE_INSTANCE_PROFILE_6_SLICE, 7: nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE,
	8: nvml.COMPUTE_INSTANCE_PROFILE_8_SLICE,
}

// customaryName returns the name that NVIDIA's tools give to a GPU instance profile, such as
// 1g.10gb. It is for drivers that report no profile names.
func (m *Reader) customaryName(card nvml.Device, k Kind) string {
	memory, ret := card.GetMemoryInfo()
	whole, ok := fillingProfiles[k.SliceCount]
	if ret == nvml.SUCCESS && memory.Total > 0 && ok {
		p, err := nvlib.New(m.Lib).NewMigProfile(k.number, whole, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, k.MemorySizeMB, memory.Total)
		if err == nil {
			return p.String()
		}
	}
	return fmt.Sprintf("%dg.%dgb", k.SliceCount, (k.MemorySizeMB+512)/1024)
}

// ComputeKinds lists the compute instance profiles of the GPU instance of handle. They are equal
// for all GPU instances with one profile, so they are cached by profileID.
func (m *Reader) ComputeKinds(handle nvml.GpuInstance, profileID uint32) ([]nvml.ComputeInstanceProfileInfo, error) {
	if known, ok := m.compute[profileID]; ok {
		return known, nil
	}
	var found []nvml.ComputeInstanceProfileInfo
	for n := range kindLimit {
		info, ret := handle.GetComputeInstanceProfileInfo(n, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		m.progress()
		if nvmlx.IsAbsent(ret) {
			continue
		}
		if ret != nvml.SUCCESS {
			return nil, fmt.Errorf("read the compute instance profile of kind %d: %w", n, nvmlx.ToError(ret))
		}
		if !slices.ContainsFunc(found, func(o nvml.ComputeInstanceProfileInfo) bool { return o.Id == info.Id }) {
			found = append(found, info)
		}
	}
	if len(found) > 0 { // an empty list may mean that the instance vanished
		m.compute[profileID] = found
	}
	return found, nil
}
