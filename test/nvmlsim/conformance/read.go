package conformance

import (
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// Reader is the part of nvml.Device that Compare needs. It has no function that changes a GPU.
type Reader interface {
	GetName() (string, nvml.Return)
	GetUUID() (string, nvml.Return)
	GetMinorNumber() (int, nvml.Return)
	GetPciInfo() (nvml.PciInfo, nvml.Return)
	GetBrand() (nvml.BrandType, nvml.Return)
	GetArchitecture() (nvml.DeviceArchitecture, nvml.Return)
	GetCudaComputeCapability() (int, int, nvml.Return)
	GetMemoryInfo() (nvml.Memory, nvml.Return)
	GetMemoryInfo_v2() (nvml.Memory_v2, nvml.Return)
	GetMigMode() (int, int, nvml.Return)
	GetMaxMigDeviceCount() (int, nvml.Return)
	IsMigDeviceHandle() (bool, nvml.Return)
	GetGpuInstanceProfileInfo(int) (nvml.GpuInstanceProfileInfo, nvml.Return)
	GetGpuInstanceProfileInfoV(int) nvml.GpuInstanceProfileInfoHandler
	GetGpuInstancePossiblePlacements(*nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstancePlacement, nvml.Return)
	GetSupportedEventTypes() (uint64, nvml.Return)
	GetAddressingMode() (nvml.DeviceAddressingMode, nvml.Return)
}

// Difference is one value that a GPU and its model file give differently.
type Difference struct {
	What      string
	Want, Got any
}

func (d Difference) String() string {
	return fmt.Sprintf("%s: the model file says %v, NVML %v", d.What, d.Want, d.Got)
}

// comparison collects the differences between a GPU and its model file.
type comparison struct {
	differences []Difference
}

func (c *comparison) equal(what string, want, got any, ret nvml.Return) {
	if ret != nvml.SUCCESS {
		got = ret
	}
	if want != got {
		c.differences = append(c.differences, Difference{what, want, got})
	}
}

// Compare reads a GPU and returns every difference from the model want.
func Compare(device Reader, want *model.GPU) []Difference {
	c := &comparison{}
	c.identity(device, want)
	c.mig(device, want)
	return c.differences
}

func (c *comparison) identity(device Reader, want *model.GPU) {
	name, ret := device.GetName()
	c.equal("productName", want.ProductName.Value, name, ret)

	pci, ret := device.GetPciInfo()
	deviceID, _ := model.ParsePCIID(want.PCIDeviceID.Value)
	c.equal("pciDeviceId", fmt.Sprintf("%#08x", deviceID), fmt.Sprintf("%#08x", pci.PciDeviceId), ret)
	subsystem, _ := model.ParsePCIID(want.PCISubsystemID.Value)
	c.equal("pciSubsystemId", fmt.Sprintf("%#08x", subsystem), fmt.Sprintf("%#08x", pci.PciSubSystemId), ret)

	brand, ret := device.GetBrand()
	c.equal("brand", want.Brand.NVMLValue, uint32(brand), ret)
	architecture, ret := device.GetArchitecture()
	c.equal("architecture", want.Architecture.NVMLValue, uint32(architecture), ret)
	major, minor, ret := device.GetCudaComputeCapability()
	c.equal("cudaComputeCapability", want.CUDAComputeCapability.Value, fmt.Sprintf("%d.%d", major, minor), ret)

	c.addressing(device, want)
	isMIG, ret := device.IsMigDeviceHandle()
	c.equal("is a MIG device", false, isMIG, ret)

	memory, ret := device.GetMemoryInfo()
	memoryV2, retV2 := device.GetMemoryInfo_v2()
	if !want.HasMemoryInfo() {
		c.equal("memory information", nvml.ERROR_NOT_SUPPORTED, ret, nvml.SUCCESS)
		c.equal("memory information (version 2)", nvml.ERROR_NOT_SUPPORTED, retV2, nvml.SUCCESS)
		return
	}
	c.equal("memoryTotalMiB", want.MemoryTotalMiB.Value, memory.Total>>20, ret)
	c.equal("memoryTotalMiB (version 2)", want.MemoryTotalMiB.Value, memoryV2.Total>>20, retV2)
}

// addressing compares the addressing mode if the model file gives one. Otherwise the mode depends
// on the node: only some kernels support HMM.
func (c *comparison) addressing(device Reader, want *model.GPU) {
	if !want.AddressingMode.Known {
		return
	}
	value, _ := want.AddressingModeValue()
	mode, ret := device.GetAddressingMode()
	if value == model.NoAddressingMode {
		c.equal("addressing mode", nvml.ERROR_NOT_SUPPORTED, ret, nvml.SUCCESS)
		return
	}
	c.equal("addressing mode", value, mode.Value, ret)
}

func (c *comparison) mig(device Reader, want *model.GPU) {
	mode, _, ret := device.GetMigMode()
	if !want.MIG.Supported.Value {
		c.equal("MIG mode of a GPU without MIG", nvml.ERROR_NOT_SUPPORTED, ret, nvml.SUCCESS)
	} else {
		c.equal("MIG mode can be read", nvml.SUCCESS, ret, nvml.SUCCESS)
	}
	// nvml.h says of nvmlDeviceGetMaxMigDeviceCount: "Returns zero if MIG is not supported or
	// enabled."
	maximum := 0
	if mode == nvml.DEVICE_MIG_ENABLE {
		maximum = int(want.MIG.MaxInstances.Value)
	}
	count, ret := device.GetMaxMigDeviceCount()
	c.equal("mig.maxInstances, in this MIG mode", maximum, count, ret)

	byValue := map[uint32]model.Profile{}
	for _, profile := range want.MIG.Profiles {
		value, err := profile.NVMLValue()
		if err == nil {
			byValue[value] = profile
		}
	}
	for value := range uint32(nvml.GPU_INSTANCE_PROFILE_COUNT) {
		profile, expected := byValue[value]
		info, ret := device.GetGpuInstanceProfileInfo(int(value))
		if !expected {
			if ret == nvml.SUCCESS {
				c.differences = append(
					c.differences,
					Difference{fmt.Sprintf("GPU instance profile %#x", value), "not there", fmt.Sprintf("ID %d", info.Id)},
				)
			}
			continue
		}
		c.profile(device, profile, int(value), info, ret)
	}
}

func (c *comparison) profile(device Reader, want model.Profile, value int, info nvml.GpuInstanceProfileInfo, ret nvml.Return) {
	at := func(what string) string { return want.Name + ": " + what }
	if ret != nvml.SUCCESS {
		c.equal(at("can be read"), nvml.SUCCESS, ret, nvml.SUCCESS)
		return
	}
	for _, field := range []struct {
		what      string
		want, got uint32
	}{
		{"id", want.ID, info.Id}, {"slices", want.Slices, info.SliceCount}, {"instancesMax", want.InstancesMax, info.InstanceCount},
		{"sm", want.SM, info.MultiprocessorCount}, {"ce", want.CopyEngines, info.CopyEngineCount}, {"dec", want.Decoders, info.DecoderCount},
		{"enc", want.Encoders, info.EncoderCount}, {"jpeg", want.JPEGEngines, info.JpegCount}, {"ofa", want.OFAEngines, info.OfaCount},
	} {
		c.equal(at(field.what), field.want, field.got, nvml.SUCCESS)
	}
	c.equal(at("p2p"), want.P2P == "Yes", info.IsP2pSupported != 0, nvml.SUCCESS)
	c.equal(at("memoryMiB"), want.MemoryMiB, info.MemorySizeMB, nvml.SUCCESS)

	named, ret := device.GetGpuInstanceProfileInfoV(value).V2()
	c.equal(at("name"), want.Name, text(named.Name[:]), ret)
	c.equal(at("id (version 2)"), want.ID, named.Id, ret)
	latest, ret := device.GetGpuInstanceProfileInfoV(value).V3()
	if name := text(latest.Name[:]); name != "" { // driver 580.159.04 leaves it empty
		c.equal(at("name (version 3)"), want.Name, name, ret)
	}
	c.equal(at("memoryMiB (version 3)"), want.MemoryMiB, latest.MemorySizeMB, ret)

	placements, ret := device.GetGpuInstancePossiblePlacements(&info)
	var starts []uint32
	for _, placement := range placements {
		starts = append(starts, placement.Start)
		c.equal(at("placement size"), want.Placements.Size, placement.Size, ret)
	}
	slices.Sort(starts)
	c.equal(at("placements"), fmt.Sprint(want.Placements.Starts), fmt.Sprint(starts), ret)
}

// text returns the C string in an array. go-nvml has arrays of signed and of unsigned characters.
func text[C ~int8 | ~uint8](chars []C) string {
	var b []byte
	for _, char := range chars {
		if char == 0 {
			break
		}
		b = append(b, byte(char))
	}
	return string(b)
}
