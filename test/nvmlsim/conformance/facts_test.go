package conformance

import (
	"flag"
	"fmt"
	"slices"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

var factsFlag = flag.String("facts", "", "file to write what NVML said of the hardware to, as JSON; goes with -lib")

// On real hardware, this test writes what the GPU reports to a file, even if it disagrees with the
// model file. The facts are most useful for GPUs without a model file.
func TestHardwareFactsAreRecorded(t *testing.T) {
	if *factsFlag == "" {
		t.Skip("no -facts given")
	}
	models := readModels(t)
	library := initialize(t)
	found := facts.NVML{}
	version, ret := library.SystemGetDriverVersion()
	want(t, "driver version", ret, nvml.SUCCESS)
	found.DriverVersion = version
	cuda, ret := library.SystemGetCudaDriverVersion()
	want(t, "CUDA version", ret, nvml.SUCCESS)
	found.CUDAVersion = fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10)
	for _, device := range devices(t, library) {
		gpu := describe(device)
		for key, m := range models {
			if id, err := model.ParsePCIID(m.PCIDeviceID.Value); err == nil && hexID(id) == gpu.PCIDeviceID {
				gpu.Model = key
				for _, d := range Compare(device, m) {
					gpu.Differences = append(gpu.Differences, facts.Difference{What: d.What, Want: fmt.Sprint(d.Want), Got: fmt.Sprint(d.Got)})
				}
			}
		}
		found.GPUs = append(found.GPUs, gpu)
	}
	if err := facts.Write(*factsFlag, found); err != nil {
		t.Fatal(err)
	}
}

func hexID(id uint32) string { return fmt.Sprintf("0x%08X", id) }

// describe reads from a GPU everything that a model file can contain.
func describe(device Reader) facts.GPU {
	gpu := facts.GPU{Unanswered: map[string]string{}}
	note := func(question string, ret nvml.Return) {
		if ret != nvml.SUCCESS {
			gpu.Unanswered[question] = ret.Error()
		}
	}
	var ret nvml.Return
	gpu.Name, ret = device.GetName()
	note("name", ret)
	gpu.UUID, ret = device.GetUUID()
	note("UUID", ret)
	pci, ret := device.GetPciInfo()
	note("PCI address", ret)
	gpu.PCIAddress, gpu.PCIDeviceID, gpu.PCISubsystemID = text(pci.BusId[:]), hexID(pci.PciDeviceId), hexID(pci.PciSubSystemId)
	brand, ret := device.GetBrand()
	note("brand", ret)
	architecture, ret := device.GetArchitecture()
	note("architecture", ret)
	gpu.Brand, gpu.Architecture = uint32(brand), uint32(architecture)
	major, minor, ret := device.GetCudaComputeCapability()
	note("compute capability", ret)
	gpu.ComputeCapability = fmt.Sprintf("%d.%d", major, minor)
	memory, ret := device.GetMemoryInfo()
	note("memory", ret)
	gpu.MemoryTotalMiB = memory.Total >> 20
	gpu.Minor, ret = device.GetMinorNumber()
	note("minor number", ret)
	mode, _, ret := device.GetMigMode()
	note("MIG mode", ret)
	if ret == nvml.SUCCESS {
		gpu.MIGMode = &mode
	}
	for value := range nvml.GPU_INSTANCE_PROFILE_COUNT {
		if info, ret := device.GetGpuInstanceProfileInfo(value); ret == nvml.SUCCESS {
			gpu.Profiles = append(gpu.Profiles, describeProfile(device, value, info, note))
		}
	}
	return gpu
}

func describeProfile(device Reader, value int, info nvml.GpuInstanceProfileInfo, note func(string, nvml.Return)) facts.Profile {
	profile := facts.Profile{
		NVMLProfile: value, ID: info.Id, Slices: info.SliceCount, InstancesMax: info.InstanceCount, MemoryMiB: info.MemorySizeMB,
		P2P: info.IsP2pSupported != 0, SM: info.MultiprocessorCount, Decoders: info.DecoderCount, Encoders: info.EncoderCount,
		CopyEngines: info.CopyEngineCount, JPEGEngines: info.JpegCount, OFAEngines: info.OfaCount,
	}
	if named, ret := device.GetGpuInstanceProfileInfoV(value).V2(); ret == nvml.SUCCESS {
		profile.Name = text(named.Name[:])
	}
	placements, ret := device.GetGpuInstancePossiblePlacements(&info)
	note(fmt.Sprintf("placements of profile %d", info.Id), ret)
	for _, placement := range placements {
		profile.Starts = append(profile.Starts, placement.Start)
		profile.Size = placement.Size
	}
	slices.Sort(profile.Starts)
	return profile
}
