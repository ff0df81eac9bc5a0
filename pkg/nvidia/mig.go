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

// migReader reads how one GPU can be cut. It changes nothing. What cannot change while NVML is held is read once.
type migReader struct {
	paths    Paths
	lib      nvml.Interface
	progress func() // told after each answer, so that many slow ones are not taken for one that never comes
	// kinds are the GPU instance profiles of the card, names theirs, and compute the compute instance profiles of their instances, all by the profile's ID.
	kinds   []kind
	names   map[uint32]string
	compute map[uint32][]nvml.ComputeInstanceProfileInfo
}

// kind is a GPU instance profile with the number by which NVML is asked for it, which is not its ID.
type kind struct {
	number int
	nvml.GpuInstanceProfileInfo
}

func newMIGReader(p Paths, library nvml.Interface, progress func()) *migReader {
	return &migReader{paths: p, lib: library, progress: progress, names: map[uint32]string{}, compute: map[uint32][]nvml.ComputeInstanceProfileInfo{}}
}

// has says whether the driver's library has a function. Calling one that is missing would end the process.
func (m *migReader) has(function string) bool {
	return m.lib.Extensions().LookupSymbol(function) == nil
}

// mode is nil for a card that cannot be cut.
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

// firstWithoutReset is the major CUDA compute capability of Hopper: cards before it change their MIG mode with a reset only
// (https://docs.nvidia.com/datacenter/tesla/mig-user-guide/getting-started-with-mig.html).
const firstWithoutReset = 9

// limits fills in what this machine does not allow. A card whose age is unknown is taken for an old one. The guest of a virtual GPU can use the
// instances that its host made, and make none.
func limits(card nvml.Device, to *device.MIG) {
	major, _, ret := card.GetCudaComputeCapability()
	to.ModeFixed = ret != nvml.SUCCESS || major < firstWithoutReset
	if mode, ret := card.GetVirtualizationMode(); ret == nvml.SUCCESS {
		to.Uncuttable = mode == nvml.GPU_VIRTUALIZATION_MODE_VGPU
	}
}

// kindLimit is how many kinds of GPU instances NVML is asked for. It is more than nvml.h knew when this was written: a library answers for
// kinds that it does not know with an error, and for new ones with their data.
const kindLimit = 32

// readKinds lists the card's GPU instance profiles. What was found before a failure is returned with it.
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

// isAbsent says that NVML's answer means "there is no such thing", not that something went wrong.
func isAbsent(ret nvml.Return) bool {
	return ret == nvml.ERROR_NOT_SUPPORTED || ret == nvml.ERROR_INVALID_ARGUMENT || ret == nvml.ERROR_NOT_FOUND
}

// profiles lists what the card can be cut into, by ID. A profile that has no place, or places of several sizes, cannot be offered and is left out.
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
		if ret == nvml.SUCCESS && settle(&p, places) {
			profiles = append(profiles, p)
		}
	}
	slices.SortFunc(profiles, func(a, b device.Profile) int { return cmp.Compare(a.ID, b.ID) })
	return profiles, nil
}

// settle fills in where a profile fits, and says whether it can be offered there.
func settle(p *device.Profile, places []nvml.GpuInstancePlacement) bool {
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

// profileName is the driver's own name for a profile, without the "MIG " in front.
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

// filling are the compute instances that take as many slices as there are.
var filling = map[uint32]int{
	1: nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 2: nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 3: nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE,
	4: nvml.COMPUTE_INSTANCE_PROFILE_4_SLICE, 6: nvml.COMPUTE_INSTANCE_PROFILE_6_SLICE, 7: nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE,
	8: nvml.COMPUTE_INSTANCE_PROFILE_8_SLICE,
}

// customaryName is how NVIDIA's tools call a profile where the driver has no names.
func (m *migReader) customaryName(card nvml.Device, k kind) string {
	memory, ret := card.GetMemoryInfo()
	whole, ok := filling[k.SliceCount]
	if ret == nvml.SUCCESS && memory.Total > 0 && ok {
		if p, err := nvlib.New(m.lib).NewMigProfile(k.number, whole, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, k.MemorySizeMB, memory.Total); err == nil {
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

// computeKinds lists the compute instance profiles of a GPU instance. They are the same in every instance of one profile.
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
	if len(found) > 0 { // none at all may also mean that the instance has gone
		m.compute[profileID] = found
	}
	return found, nil
}
