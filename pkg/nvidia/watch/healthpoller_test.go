package watch

import (
	"encoding/binary"
	"reflect"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
)

// conditionOf returns the polled condition of a fake card. change sets the card's NVML answers.
func conditionOf(t *testing.T, change func(*mock.Device)) device.Condition {
	t.Helper()
	h := nvidiatest.NewHost(t)
	cards := nvidiatest.TwoCards()
	library := nvidiatest.NVML(cards...)
	library.DeviceGetHandleByPciBusIdFunc = func(string) (nvml.Device, nvml.Return) {
		d, ok := cards[1].Handle(1).(*mock.Device)
		if !ok {
			t.Fatal("not a fake")
		}
		d.GetArchitectureFunc = func() (nvml.DeviceArchitecture, nvml.Return) { return nvml.DEVICE_ARCH_HOPPER, nvml.SUCCESS }
		change(d)
		return d, nvml.SUCCESS
	}
	c := newHealthPoller(h.Paths().WithDefaults(), library, func() {}, "0000:1b:00.0").condition()
	if c.Card.UUID != cards[1].UUID {
		t.Errorf("%+v", c)
	}
	return c
}

func TestRecoveryActions(t *testing.T) {
	for number, want := range map[uint32]device.RecoveryAction{
		0: device.RecoveryNone, 1: device.RecoveryReset, 2: device.RecoveryReboot, 3: device.RecoveryDrainP2P, 4: device.RecoveryDrainAndReset,
		5: device.RecoveryIMEXDomain, 6: device.RecoveryBusReset, 7: device.RecoverySystemReboot, 8: device.RecoveryOther,
	} {
		c := conditionOf(t, func(d *mock.Device) {
			d.GetFieldValuesFunc = func(values []nvml.FieldValue) nvml.Return {
				if values[0].FieldId != 230 || len(values) != 1 {
					return nvml.ERROR_NOT_SUPPORTED // those of row remaps
				}
				binary.LittleEndian.PutUint32(values[0].Value[:], number)
				return nvml.SUCCESS
			}
		})
		if c.Recovery != want || c.Reach != device.ReachOK {
			t.Errorf("%d: %+v", number, c)
		}
	}
	for ret, want := range map[nvml.Return]device.Reach{
		nvml.ERROR_NOT_SUPPORTED: device.ReachOK, nvml.ERROR_INVALID_ARGUMENT: device.ReachOK, nvml.ERROR_GPU_IS_LOST: device.ReachLost,
		nvml.ERROR_UNKNOWN: device.ReachFailed,
	} {
		c := conditionOf(t, func(d *mock.Device) {
			d.GetFieldValuesFunc = func(values []nvml.FieldValue) nvml.Return {
				if values[0].FieldId != 230 {
					return nvml.ERROR_NOT_SUPPORTED
				}
				values[0].NvmlReturn = uint32(ret)
				return nvml.SUCCESS
			}
		})
		if c.Recovery != device.RecoveryUnknown || c.Reach != want {
			t.Errorf("%v: %+v", ret, c)
		}
	}
}

func TestConditionReportsCardState(t *testing.T) {
	c := conditionOf(t, func(d *mock.Device) {
		d.GetRetiredPagesPendingStatusFunc = func() (nvml.EnableState, nvml.Return) { return nvml.FEATURE_ENABLED, nvml.SUCCESS }
		d.GetTotalEccErrorsFunc = func(kind nvml.MemoryErrorType, counter nvml.EccCounterType) (uint64, nvml.Return) {
			if kind != nvml.MEMORY_ERROR_TYPE_UNCORRECTED || counter != nvml.VOLATILE_ECC {
				t.Error("queried other errors")
			}
			return 3, nvml.SUCCESS
		}
		d.GetTotalEnergyConsumptionFunc = func() (uint64, nvml.Return) { return 4711, nvml.SUCCESS }
		d.GetGpuFabricInfoFunc = func() (nvml.GpuFabricInfo, nvml.Return) {
			return nvml.GpuFabricInfo{State: nvml.GPU_FABRIC_STATE_COMPLETED, Status: uint32(nvml.ERROR_UNKNOWN)}, nvml.SUCCESS
		}
	})
	if c.Remap == nil || !c.Remap.Pending || c.Remap.Failed || *c.Uncorrected != 3 || *c.EnergyMillijoules != 4711 ||
		c.Fabric.State != device.FabricCompleted || c.Fabric.Error == "" {
		t.Errorf("%+v", c)
	}
	c = conditionOf(t, func(d *mock.Device) {
		d.GetRemappedRowsFunc = func() (int, int, bool, bool, nvml.Return) { return 1, 2, false, true, nvml.SUCCESS }
		d.GetGpuFabricInfoFunc = func() (nvml.GpuFabricInfo, nvml.Return) {
			return nvml.GpuFabricInfo{State: nvml.GPU_FABRIC_STATE_IN_PROGRESS}, nvml.SUCCESS
		}
	})
	if c.Remap == nil || c.Remap.Pending || !c.Remap.Failed || c.Uncorrected != nil || c.EnergyMillijoules != nil ||
		c.Fabric.State != device.FabricInProgress {
		t.Errorf("%+v", c)
	}
	// A card in MIG mode has left the NVLink fabric, so the test expects FabricNotUsed and no
	// fault.
	for _, ret := range []nvml.Return{nvml.SUCCESS, nvml.ERROR_NOT_SUPPORTED} {
		c = conditionOf(t, func(d *mock.Device) {
			d.GetMigModeFunc = func() (int, int, nvml.Return) { return nvml.DEVICE_MIG_ENABLE, nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS }
			d.GetGpuFabricInfoFunc = func() (nvml.GpuFabricInfo, nvml.Return) {
				return nvml.GpuFabricInfo{State: nvml.GPU_FABRIC_STATE_NOT_STARTED}, ret
			}
		})
		if c.Fabric == nil || c.Fabric.State != device.FabricNotUsed || c.Reach != device.ReachOK || c.MIG == nil ||
			*c.MIG != (device.MIGMode{Enabled: true, Pending: true}) {
			t.Errorf("%+v", c)
		}
	}
}

// nvml.h: the fabric is for Hopper or newer. What an older card answers about it means nothing.
func TestFabricOfCardsBeforeHopperIsNotRead(t *testing.T) {
	for architecture, want := range map[nvml.DeviceArchitecture]bool{
		nvml.DEVICE_ARCH_AMPERE: false, nvml.DEVICE_ARCH_ADA: false, nvml.DEVICE_ARCH_HOPPER: true, nvml.DEVICE_ARCH_UNKNOWN: true,
	} {
		c := conditionOf(t, func(d *mock.Device) {
			d.GetArchitectureFunc = func() (nvml.DeviceArchitecture, nvml.Return) { return architecture, nvml.SUCCESS }
			d.GetGpuFabricInfoFunc = func() (nvml.GpuFabricInfo, nvml.Return) {
				return nvml.GpuFabricInfo{State: nvml.GPU_FABRIC_STATE_NOT_STARTED}, nvml.SUCCESS
			}
		})
		if (c.Fabric != nil) != want || c.Reach != device.ReachOK {
			t.Errorf("architecture %d: %+v", architecture, c)
		}
	}
}

// nvml.h: with MIG instances, nvmlDeviceGetRemappedRows is not supported. Fields say the same.
func TestRowRemapsOfAPartitionedCardComeFromFields(t *testing.T) {
	for name, tc := range map[string]struct {
		values map[uint32]uint32 // of the fields that answer
		want   *device.Remap
	}{
		"none":    {map[uint32]uint32{142: 5, 143: 2, 144: 0, 145: 0}, &device.Remap{}},
		"pending": {map[uint32]uint32{144: 1, 145: 0}, &device.Remap{Pending: true}},
		"failed":  {map[uint32]uint32{144: 0, 145: 1}, &device.Remap{Failed: true}},
		"refused": {nil, nil},
		"in part": {map[uint32]uint32{144: 1}, nil},
	} {
		c := conditionOf(t, func(d *mock.Device) {
			d.GetMigModeFunc = func() (int, int, nvml.Return) { return nvml.DEVICE_MIG_ENABLE, nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS }
			d.GetFieldValuesFunc = func(values []nvml.FieldValue) nvml.Return {
				for i := range values {
					value, answers := tc.values[values[i].FieldId]
					if !answers {
						values[i].NvmlReturn = uint32(nvml.ERROR_NOT_SUPPORTED)
					}
					binary.LittleEndian.PutUint32(values[i].Value[:], value)
				}
				return nvml.SUCCESS
			}
		})
		if c.Reach != device.ReachOK || !reflect.DeepEqual(c.Remap, tc.want) {
			t.Errorf("%s: %s %s, %+v, want %+v", name, c.Reach, c.Error, c.Remap, tc.want)
		}
	}
}

func TestFailedQueryDoesNotHideOthers(t *testing.T) {
	for ret, want := range map[nvml.Return]device.Reach{
		nvml.ERROR_UNKNOWN: device.ReachFailed, nvml.ERROR_RESET_REQUIRED: device.ReachNeedsReset, nvml.ERROR_GPU_IS_LOST: device.ReachLost,
	} {
		c := conditionOf(t, func(d *mock.Device) {
			d.GetFieldValuesFunc = func(values []nvml.FieldValue) nvml.Return {
				binary.LittleEndian.PutUint32(values[0].Value[:], uint32(nvml.GPU_RECOVERY_ACTION_NODE_REBOOT))
				return nvml.SUCCESS
			}
			d.GetRemappedRowsFunc = func() (int, int, bool, bool, nvml.Return) { return 0, 0, true, true, ret }
			d.GetTotalEccErrorsFunc = func(nvml.MemoryErrorType, nvml.EccCounterType) (uint64, nvml.Return) { return 0, ret }
			d.GetTotalEnergyConsumptionFunc = func() (uint64, nvml.Return) { return 4711, nvml.SUCCESS }
		})
		if c.Reach != want || c.Error == "" || c.Recovery != device.RecoveryReboot || c.Remap != nil || c.Uncorrected != nil {
			t.Errorf("%v: %+v", ret, c)
		}
		// The poller reads the energy after the failing query. The test expects it for every card
		// that is not lost.
		if (c.EnergyMillijoules != nil) != (want != device.ReachLost) {
			t.Errorf("%v: %+v", ret, c)
		}
	}
}
