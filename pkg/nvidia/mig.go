package nvidia

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	nvlib "github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// migReader reads how one GPU can be partitioned and changes nothing. It caches values that cannot
// change while NVML is open.
type migReader struct {
	paths Paths
	lib   nvml.Interface
	// progress is called after each NVML answer, so that many slow answers do not look like a hang.
	progress func()
	// kinds are the card's GPU instance profiles.
	kinds []kind
	// names are the names of the GPU instance profiles by profile ID.
	names map[uint32]string
	// compute are the compute instance profiles by GPU instance profile ID.
	compute map[uint32][]nvml.ComputeInstanceProfileInfo
}

// kind is a GPU instance profile. number is the argument with which NVML was queried for it, and
// differs from the profile ID.
type kind struct {
	number int
	nvml.GpuInstanceProfileInfo
}

func newMIGReader(p Paths, library nvml.Interface, progress func()) *migReader {
	return &migReader{
		paths: p, lib: library, progress: progress,
		names: map[uint32]string{}, compute: map[uint32][]nvml.ComputeInstanceProfileInfo{},
	}
}

// has reports whether the driver's library has an NVML function. A call of a missing function would
// crash the process.
func (m *migReader) has(function string) bool {
	return m.lib.Extensions().LookupSymbol(function) == nil
}

// mode reads the MIG mode of a card. The result is nil for a card without MIG.
func (m *migReader) mode(card nvml.Device) (*device.MIG, error) {
	if !m.has("nvmlDeviceGetMigMode") {
		return nil, nil
	}
	current, pending, ret := card.GetMigMode()
	if ret == nvml.ERROR_NOT_SUPPORTED {
		return nil, nil
	}
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("read the MIG mode: %w", toError(ret))
	}
	return &device.MIG{Enabled: current == nvml.DEVICE_MIG_ENABLE, Pending: pending == nvml.DEVICE_MIG_ENABLE}, nil
}

// firstWithoutReset is the major CUDA compute capability of Hopper. Earlier cards change MIG mode
// only with a reset:
// https://docs.nvidia.com/datacenter/tesla/mig-user-guide/getting-started-with-mig.html.
const firstWithoutReset = 9

// setLimits sets ModeFixed if the MIG mode of this card cannot change without a reset, as before
// Hopper or if the generation is unknown. It sets ReadOnly for a vGPU, which can use the host's MIG
// instances but create none.
func setLimits(card nvml.Device, to *device.MIG) {
	major, _, ret := card.GetCudaComputeCapability()
	to.ModeFixed = ret != nvml.SUCCESS || major < firstWithoutReset
	if mode, ret := card.GetVirtualizationMode(); ret == nvml.SUCCESS {
		to.ReadOnly = mode == nvml.GPU_VIRTUALIZATION_MODE_VGPU
	}
}

// kindLimit is how many GPU instance profile numbers are tried. It is larger than the count in
// today's nvml.h. NVML returns an error for an unknown number.
const kindLimit = 32

// readKinds lists the card's GPU instance profiles. If a query fails, it returns the error and the
// profiles read before.
func (m *migReader) readKinds(card nvml.Device) ([]kind, error) {
	if m.kinds != nil {
		return m.kinds, nil
	}
	var found []kind
	for n := range kindLimit {
		info, ret := card.GetGpuInstanceProfileInfo(n)
		m.progress()
		if isAbsent(ret) {
			continue
		}
		if ret != nvml.SUCCESS {
			return found, fmt.Errorf("read the GPU instance profile of kind %d: %w", n, toError(ret))
		}
		if !slices.ContainsFunc(found, func(k kind) bool { return k.Id == info.Id }) {
			found = append(found, kind{n, info})
		}
	}
	m.kinds = found
	return found, nil
}

// isAbsent reports whether ret means that the requested object does not exist.
func isAbsent(ret nvml.Return) bool {
	return ret == nvml.ERROR_NOT_SUPPORTED || ret == nvml.ERROR_INVALID_ARGUMENT || ret == nvml.ERROR_NOT_FOUND
}

// profiles lists the card's MIG profiles by ID. It leaves out a profile that has no placement, or
// placements of several sizes, because such a profile cannot be offered.
func (m *migReader) profiles(card nvml.Device) ([]device.Profile, error) {
	kinds, err := m.readKinds(card)
	if err != nil {
		return nil, err
	}
	var profiles []device.Profile
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
		if ret != nvml.SUCCESS && !isAbsent(ret) {
			return nil, fmt.Errorf("read the placements of GPU instance profile %s: %w", p.Name, toError(ret))
		}
		if ret == nvml.SUCCESS && setPlacements(&p, places) {
			profiles = append(profiles, p)
		}
	}
	slices.SortFunc(profiles, func(a, b device.Profile) int { return cmp.Compare(a.ID, b.ID) })
	return profiles, nil
}

// setPlacements sets the placements of p. It returns false if the profile cannot be offered,
// because it has no placement, placements of several sizes, or no instances.
func setPlacements(p *device.Profile, places []nvml.GpuInstancePlacement) bool {
	for i, place := range places {
		if i > 0 && place.Size != p.Size {
			return false
		}
		p.Size = place.Size
		p.Starts = append(p.Starts, place.Start)
	}
	slices.Sort(p.Starts)
	p.Starts = slices.Compact(p.Starts)
	return p.Size > 0 && p.MaxInstances > 0
}

// profileName returns the driver's name of a profile, without the "MIG " prefix.
func (m *migReader) profileName(card nvml.Device, k kind) string {
	if name, ok := m.names[k.Id]; ok {
		return name
	}
	name := ""
	if m.has("nvmlDeviceGetGpuInstanceProfileInfoV") {
		if info, ret := card.GetGpuInstanceProfileInfoV(k.number).V2(); ret == nvml.SUCCESS {
			name = strings.TrimPrefix(cString(info.Name[:]), "MIG ")
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
func (m *migReader) customaryName(card nvml.Device, k kind) string {
	memory, ret := card.GetMemoryInfo()
	whole, ok := fillingProfiles[k.SliceCount]
	if ret == nvml.SUCCESS && memory.Total > 0 && ok {
		p, err := nvlib.New(m.lib).NewMigProfile(k.number, whole, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, k.MemorySizeMB, memory.Total)
		if err == nil {
			return p.String()
		}
	}
	return fmt.Sprintf("%dg.%dgb", k.SliceCount, (k.MemorySizeMB+512)/1024)
}

func cString(chars []int8) string {
	var text []byte
	for _, c := range chars {
		if c == 0 {
			break
		}
		text = append(text, byte(c)) //nolint:gosec // the bytes of a C string
	}
	return string(text)
}

// computeKinds lists the compute instance profiles of the GPU instance of handle. They are equal
// for all GPU instances with one profile, so they are cached by profileID.
func (m *migReader) computeKinds(handle nvml.GpuInstance, profileID uint32) ([]nvml.ComputeInstanceProfileInfo, error) {
	if known, ok := m.compute[profileID]; ok {
		return known, nil
	}
	var found []nvml.ComputeInstanceProfileInfo
	for n := range kindLimit {
		info, ret := handle.GetComputeInstanceProfileInfo(n, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		m.progress()
		if isAbsent(ret) {
			continue
		}
		if ret != nvml.SUCCESS {
			return nil, fmt.Errorf("read the compute instance profile of kind %d: %w", n, toError(ret))
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
