package nvidiatest

import (
	"cmp"
	"errors"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
)

const Version = "580.65.06"

// Card is a GPU of the fake NVML library. answers are the return codes by NVML function, SUCCESS
// for functions not in it. The function that hangs names returns only after until is closed.
type Card struct {
	Bus, UUID, Name string
	Minor           int
	MIG             *MIG // nil for a card without MIG
	Fabric          *nvml.GpuFabricInfo
	Virtualization  nvml.GpuVirtualizationMode
	Major           int // CUDA compute capability, default 8
	Answers         map[string]nvml.Return
	Hangs           string
	Until           <-chan struct{} // nil means forever
	Modes           *Modes          // nil for a card without these modes
	Addressing      nvml.DeviceAddressingModeType
	VBIOS           string
	ECC             nvml.EnableState
}

// Modes are the modes of a fake card. With ignoresChange, the card
// reports success for a change and keeps the old mode.
type Modes struct {
	Compute       nvml.ComputeMode
	IgnoresChange bool
}

func (c Card) ask(function string) nvml.Return {
	if c.Hangs == function {
		<-c.Until
	}
	return c.Answers[function] // SUCCESS by default
}

// Library is a fake NVML library.
type Library = mock.Interface

// HangLimit is the time limit that tests set for NVML calls, so that a hung call ends soon.
const HangLimit = 200 * time.Millisecond

// NVML returns a fake NVML library that lists these cards.
func NVML(cards ...Card) *mock.Interface {
	return &mock.Interface{
		InitFunc:                       func() nvml.Return { return nvml.SUCCESS },
		ShutdownFunc:                   func() nvml.Return { return nvml.SUCCESS },
		SystemGetDriverVersionFunc:     func() (string, nvml.Return) { return Version, nvml.SUCCESS },
		SystemGetCudaDriverVersionFunc: func() (int, nvml.Return) { return 13020, nvml.SUCCESS },
		SystemGetConfComputeStateFunc: func() (nvml.ConfComputeSystemState, nvml.Return) {
			return nvml.ConfComputeSystemState{}, nvml.ERROR_NOT_SUPPORTED
		},
		DeviceGetCountFunc: func() (int, nvml.Return) { return len(cards), nvml.SUCCESS },
		DeviceGetHandleByIndexFunc: func(i int) (nvml.Device, nvml.Return) {
			return cards[i].Handle(i), cards[i].ask("nvmlDeviceGetHandleByIndex")
		},
		DeviceGetHandleByPciBusIdFunc: func(bus string) (nvml.Device, nvml.Return) {
			for i, c := range cards {
				if c.Bus == bus {
					return c.Handle(i), c.ask("nvmlDeviceGetHandleByPciBusId")
				}
			}
			return nil, nvml.ERROR_NOT_FOUND
		},
		ExtensionsFunc: func() nvml.ExtendedInterface {
			return &mock.ExtendedInterface{LookupSymbolFunc: func(name string) error {
				if strings.HasSuffix(name, "InfoV") {
					return errors.New("an old driver") // go-nvml's handles for these functions cannot be faked
				}
				return nil
			}}
		},
	}
}

func (c Card) Handle(index int) nvml.Device {
	d := &mock.Device{
		GetIndexFunc: func() (int, nvml.Return) { return index, nvml.SUCCESS },
		GetPciInfoFunc: func() (nvml.PciInfo, nvml.Return) {
			info := nvml.PciInfo{}
			for i, b := range []byte(c.Bus) {
				info.BusId[i] = int8(b)
			}
			return info, c.ask("nvmlDeviceGetPciInfo")
		},
		GetNameFunc:        func() (string, nvml.Return) { return c.Name, c.ask("nvmlDeviceGetName") },
		GetUUIDFunc:        func() (string, nvml.Return) { return c.UUID, c.ask("nvmlDeviceGetUUID") },
		GetMinorNumberFunc: func() (int, nvml.Return) { return c.Minor, c.ask("nvmlDeviceGetMinorNumber") },
		GetMemoryInfoFunc: func() (nvml.Memory, nvml.Return) {
			return nvml.Memory{Total: 80 << 30}, c.ask("nvmlDeviceGetMemoryInfo")
		},
		GetBrandFunc: func() (nvml.BrandType, nvml.Return) { return nvml.BRAND_NVIDIA, c.ask("nvmlDeviceGetBrand") },
		GetArchitectureFunc: func() (nvml.DeviceArchitecture, nvml.Return) {
			if c.Fabric != nil { // NVML has it for Hopper or newer
				return nvml.DEVICE_ARCH_HOPPER, c.ask("nvmlDeviceGetArchitecture")
			}
			return nvml.DEVICE_ARCH_ADA, c.ask("nvmlDeviceGetArchitecture")
		},
		GetCudaComputeCapabilityFunc: func() (int, int, nvml.Return) {
			return cmp.Or(c.Major, 8), 9, nvml.SUCCESS
		},
		GetAddressingModeFunc: func() (nvml.DeviceAddressingMode, nvml.Return) {
			return nvml.DeviceAddressingMode{Value: uint32(c.Addressing)}, c.ask("nvmlDeviceGetAddressingMode")
		},
		GetVbiosVersionFunc: func() (string, nvml.Return) { return c.VBIOS, c.ask("nvmlDeviceGetVbiosVersion") },
		GetEccModeFunc: func() (nvml.EnableState, nvml.EnableState, nvml.Return) {
			return nvml.FEATURE_ENABLED, c.ECC, c.ask("nvmlDeviceGetEccMode")
		},
		IsMigDeviceHandleFunc:     func() (bool, nvml.Return) { return false, nvml.SUCCESS },
		GetMigModeFunc:            func() (int, int, nvml.Return) { return 0, 0, nvml.ERROR_NOT_SUPPORTED },
		GetVirtualizationModeFunc: func() (nvml.GpuVirtualizationMode, nvml.Return) { return c.Virtualization, nvml.SUCCESS },
	}
	d.GetComputeModeFunc = func() (nvml.ComputeMode, nvml.Return) {
		if c.Modes == nil {
			return 0, nvml.ERROR_NOT_SUPPORTED
		}
		return c.Modes.Compute, nvml.SUCCESS
	}
	d.SetComputeModeFunc = func(to nvml.ComputeMode) nvml.Return {
		if ret := c.ask("nvmlDeviceSetComputeMode"); ret != nvml.SUCCESS {
			return ret
		}
		if !c.Modes.IgnoresChange {
			c.Modes.Compute = to
		}
		return nvml.SUCCESS
	}
	no := nvml.ERROR_NOT_SUPPORTED
	d.GetFieldValuesFunc = func([]nvml.FieldValue) nvml.Return { return no }
	d.GetRemappedRowsFunc = func() (int, int, bool, bool, nvml.Return) { return 0, 0, false, false, no }
	d.GetRetiredPagesPendingStatusFunc = func() (nvml.EnableState, nvml.Return) { return 0, no }
	d.GetTotalEccErrorsFunc = func(nvml.MemoryErrorType, nvml.EccCounterType) (uint64, nvml.Return) { return 0, no }
	d.GetTotalEnergyConsumptionFunc = func() (uint64, nvml.Return) { return 0, no }
	d.GetSupportedEventTypesFunc = func() (uint64, nvml.Return) { return 0, no }
	d.GetGpuFabricInfoFunc = func() (nvml.GpuFabricInfo, nvml.Return) {
		if c.Fabric == nil {
			return nvml.GpuFabricInfo{}, nvml.ERROR_NOT_SUPPORTED
		}
		return *c.Fabric, nvml.SUCCESS
	}
	if c.MIG != nil {
		c.MIG.install(d)
	}
	return d
}

// TwoCards returns two fake cards. As on real nodes, their indices and minor numbers do not follow
// the order of their PCI addresses.
func TwoCards() []Card {
	return []Card{
		{Bus: "00000000:C3:00.0", UUID: "GPU-00000000-0000-0000-0000-0000000000c3", Name: "NVIDIA L40S", Minor: 0},
		{Bus: "00000000:1B:00.0", UUID: "GPU-00000000-0000-0000-0000-00000000001b", Name: "NVIDIA L40S", Minor: 1},
	}
}
