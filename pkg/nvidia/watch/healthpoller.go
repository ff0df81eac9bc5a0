package watch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
)

// healthPoller reads the health of one card through NVML. It changes nothing on the card. Only one
// goroutine at a time may use it.
type healthPoller struct {
	paths nvidia.Paths
	lib   nvml.Interface
	// progress is called after each NVML answer, so that many slow answers do not look like a hang.
	progress func()
	card     device.Card // its UUID is empty until the card has answered
}

func newHealthPoller(p nvidia.Paths, lib nvml.Interface, progress func(), at device.PCIAddress) *healthPoller {
	return &healthPoller{paths: p, lib: lib, progress: progress, card: device.Card{PCIAddress: at}}
}

var errOffBus = errors.New("it has left the PCI bus")

// condition reads the card's health. If a query fails, the result has its error and the values of
// the queries that succeeded.
func (p *healthPoller) condition() device.Condition {
	start := time.Now()
	c := device.Condition{Reach: device.ReachOK}
	err := p.read(&c)
	if err != nil {
		c.Reach, c.Error = reachOf(err), err.Error()
	}
	c.Card, c.At = p.card, time.Now()
	c.Took = c.At.Sub(start)
	return c
}

// reachOf returns what the error of a poll says about the card: it is lost, needs a reset, or the
// poll failed for another reason.
func reachOf(err error) device.Reach {
	is := func(r nvml.Return) bool { return errors.Is(err, nvmlx.Error(r)) }
	switch {
	case errors.Is(err, errOffBus), is(nvml.ERROR_GPU_IS_LOST), is(nvml.ERROR_NOT_FOUND):
		return device.ReachLost
	case is(nvml.ERROR_RESET_REQUIRED):
		return device.ReachNeedsReset
	default:
		return device.ReachFailed
	}
}

// read runs all health queries even if one fails, because a later query may show a graver fault. If
// the card is lost, read skips the remaining queries.
func (p *healthPoller) read(c *device.Condition) error {
	bus := filepath.Join(p.paths.Sysfs, "bus", "pci", "devices")
	if !hostfile.Exists(filepath.Join(bus, string(p.card.PCIAddress))) && hostfile.Exists(bus) {
		return errOffBus
	}
	handle, err := p.open()
	if err != nil {
		return err
	}
	recoveryAction := func(handle nvml.Device, c *device.Condition) (err error) {
		c.Recovery, err = p.recovery(handle)
		return err
	}
	var failed []error
	for _, query := range []func(nvml.Device, *device.Condition) error{recoveryAction, p.remap, p.eccErrors, p.energy, p.migMode, p.fabric} {
		if err := query(handle, c); err != nil {
			failed = append(failed, err)
			if reachOf(err) == device.ReachLost {
				break
			}
		}
	}
	return errors.Join(failed...)
}

// open gets a new NVML handle for each poll, because another card may be at the PCI address or its
// modes may have changed.
func (p *healthPoller) open() (nvml.Device, error) {
	handle, ret := p.lib.DeviceGetHandleByPciBusId(nvmlx.BusID(p.card.PCIAddress))
	p.progress()
	if ret == nvml.ERROR_INVALID_ARGUMENT {
		ret = nvml.ERROR_NOT_FOUND // NVML knows no card at this address
	}
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("open the GPU: %w", nvmlx.ToError(ret))
	}
	uuid, ret := handle.GetUUID()
	p.progress()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("read its UUID: %w", nvmlx.ToError(ret))
	}
	p.card.UUID = uuid
	return handle, nil
}

// query returns what call read, nil for an unsupported call, which is no error. The parameter what
// names it in errors. function is the NVML function that an old driver's library may lack. It is
// empty if call looks for it itself.
func query[T any](p *healthPoller, what, function string, call func() (T, nvml.Return)) (*T, error) {
	if function != "" && !nvmlx.Has(p.lib, function) {
		return nil, nil
	}
	value, ret := call()
	p.progress()
	if ret == nvml.SUCCESS {
		return &value, nil
	}
	if isUnsupported(ret) {
		return nil, nil
	}
	return nil, fmt.Errorf("read its %s: %w", what, nvmlx.ToError(ret))
}

// isUnsupported reports whether ret means that the card or its driver does not support the query.
// That says nothing about the card's health.
func isUnsupported(ret nvml.Return) bool {
	switch ret {
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_INVALID_ARGUMENT, nvml.ERROR_FUNCTION_NOT_FOUND,
		nvml.ERROR_NO_PERMISSION, nvml.ERROR_DEPRECATED,
		nvml.ERROR_ARGUMENT_VERSION_MISMATCH:
		return true
	}
	return false
}

var recoveryActions = map[uint32]device.RecoveryAction{
	uint32(nvml.GPU_RECOVERY_ACTION_NONE): device.RecoveryNone, uint32(nvml.GPU_RECOVERY_ACTION_GPU_RESET): device.RecoveryReset,
	uint32(nvml.GPU_RECOVERY_ACTION_NODE_REBOOT): device.RecoveryReboot, uint32(nvml.GPU_RECOVERY_ACTION_DRAIN_P2P): device.RecoveryDrainP2P,
	uint32(nvml.GPU_RECOVERY_ACTION_DRAIN_AND_RESET):     device.RecoveryDrainAndReset,
	uint32(nvml.GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN): device.RecoveryIMEXDomain,
	uint32(nvml.GPU_RECOVERY_ACTION_BUS_RESET):           device.RecoveryBusReset,
	uint32(nvml.GPU_RECOVERY_ACTION_SYSTEM_REBOOT):       device.RecoverySystemReboot,
}

// recovery returns the recovery action that the driver recommends. The action is unknown on drivers
// before 565, because they lack this field.
func (p *healthPoller) recovery(handle nvml.Device) (device.RecoveryAction, error) {
	value, err := query(p, "recovery action", "nvmlDeviceGetFieldValues", func() (uint32, nvml.Return) {
		values := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
		if ret := handle.GetFieldValues(values); ret != nvml.SUCCESS {
			return 0, ret
		}
		// The value is the first four bytes of the union, in little-endian order, as on every machine
		// with NVIDIA GPUs.
		return binary.LittleEndian.Uint32(values[0].Value[:]), nvml.Return(values[0].NvmlReturn) //nolint:gosec // NVML's own number
	})
	if value == nil {
		return device.RecoveryUnknown, err
	}
	if action, known := recoveryActions[*value]; known {
		return action, nil
	}
	return device.RecoveryOther, nil
}

// remap reads the state of bad memory. Ampere and later cards remap rows, older cards retire pages.
// A card with MIG instances refuses the function for rows (nvml.h), but may have the fields.
func (p *healthPoller) remap(handle nvml.Device, c *device.Condition) (err error) {
	c.Remap, err = query(p, "row remapping", "nvmlDeviceGetRemappedRows", func() (device.Remap, nvml.Return) {
		_, _, pending, failed, ret := handle.GetRemappedRows()
		return device.Remap{Pending: pending, Failed: failed}, ret
	})
	if c.Remap != nil || err != nil {
		return err
	}
	c.Remap, err = query(p, "row remapping", "nvmlDeviceGetFieldValues", func() (device.Remap, nvml.Return) {
		values := []nvml.FieldValue{{FieldId: nvml.FI_DEV_REMAPPED_PENDING}, {FieldId: nvml.FI_DEV_REMAPPED_FAILURE}}
		if ret := handle.GetFieldValues(values); ret != nvml.SUCCESS {
			return device.Remap{}, ret
		}
		for _, v := range values {
			if ret := nvml.Return(v.NvmlReturn); ret != nvml.SUCCESS { //nolint:gosec // NVML's own number
				return device.Remap{}, ret
			}
		}
		is := func(v nvml.FieldValue) bool { return binary.LittleEndian.Uint32(v.Value[:]) != 0 }
		return device.Remap{Pending: is(values[0]), Failed: is(values[1])}, nvml.SUCCESS
	})
	if c.Remap != nil || err != nil {
		return err
	}
	c.Remap, err = query(p, "page retirement", "nvmlDeviceGetRetiredPagesPendingStatus", func() (device.Remap, nvml.Return) {
		pending, ret := handle.GetRetiredPagesPendingStatus()
		return device.Remap{Pending: pending == nvml.FEATURE_ENABLED}, ret
	})
	return err
}

func (p *healthPoller) eccErrors(handle nvml.Device, c *device.Condition) (err error) {
	c.Uncorrected, err = query(p, "ECC errors", "nvmlDeviceGetTotalEccErrors", func() (uint64, nvml.Return) {
		return handle.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
	})
	return err
}

func (p *healthPoller) energy(handle nvml.Device, c *device.Condition) (err error) {
	c.EnergyMillijoules, err = query(p, "energy", "nvmlDeviceGetTotalEnergyConsumption", handle.GetTotalEnergyConsumption)
	return err
}

var fabricStates = map[uint8]device.FabricState{
	nvml.GPU_FABRIC_STATE_NOT_STARTED: device.FabricNotStarted, nvml.GPU_FABRIC_STATE_IN_PROGRESS: device.FabricInProgress,
	nvml.GPU_FABRIC_STATE_COMPLETED: device.FabricCompleted,
}

// fabric reads the state of the card's NVLink fabric into c, if the card has one. A card in MIG
// mode has left the fabric, which is no fault, so fabric then sets FabricNotUsed.
func (p *healthPoller) fabric(handle nvml.Device, c *device.Condition) (err error) {
	c.Fabric, err = query(p, "fabric state", "", func() (device.Fabric, nvml.Return) {
		state, status, ret := nvmlx.FabricInfo(p.lib, handle)
		known, is := fabricStates[state]
		if ret == nvml.SUCCESS && !is {
			ret = nvml.ERROR_NOT_SUPPORTED // no fabric, or a state of a newer driver
		}
		fabric := device.Fabric{State: known}
		if failed := nvmlx.ToError(status); known == device.FabricCompleted && failed != nil {
			fabric.Error = failed.Error()
		}
		return fabric, ret
	})
	if (c.Fabric == nil || c.Fabric.State != device.FabricCompleted) && c.MIG != nil && c.MIG.Enabled {
		c.Fabric = &device.Fabric{State: device.FabricNotUsed}
	}
	return err
}

// migMode reads the MIG mode into c. It ignores a failure, because that says nothing about the
// card's health.
func (p *healthPoller) migMode(handle nvml.Device, c *device.Condition) error {
	mode, err := nvmlx.MIGMode(p.lib, handle)
	p.progress()
	if err == nil && mode != nil {
		c.MIG = &device.MIGMode{Enabled: mode.Enabled, Pending: mode.Pending}
	}
	return nil
}
