package nvidia

import (
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// patient asks one card how it is. It changes nothing. One goroutine at a time may use it.
type patient struct {
	*migReader
	card device.Card // its UUID is empty until the card has said it
	// absent are the questions that the card or its driver has no answer to, and until when they are not asked again: a change of its modes may change that.
	absent map[string]time.Time
}

// absentFor is how long a question without an answer is not asked again.
const absentFor = time.Minute

func newPatient(m *migReader, at device.PCIAddress) *patient {
	return &patient{migReader: m, card: device.Card{PCIAddress: at}, absent: map[string]time.Time{}}
}

var errOffBus = errors.New("it has left the PCI bus")

// condition asks the card for all that is known about its health. It says as well whether the card has left the PCI bus.
func (p *patient) condition() (c device.Condition, gone bool) {
	start := time.Now()
	c = device.Condition{Reach: device.ReachOK}
	err := p.read(&c)
	if err != nil {
		c.Reach, c.Error = reachOf(err), err.Error()
	}
	c.Card, c.At = p.card, time.Now()
	c.Took = c.At.Sub(start)
	return c, errors.Is(err, errOffBus)
}

// reachOf tells a card that is gone, or that must be reset, from one that answers with another error.
func reachOf(err error) device.Reach {
	is := func(r nvml.Return) bool { return errors.Is(err, nvmlError(r)) }
	switch {
	case errors.Is(err, errOffBus), is(nvml.ERROR_GPU_IS_LOST), is(nvml.ERROR_NOT_FOUND):
		return device.ReachLost
	case is(nvml.ERROR_RESET_REQUIRED):
		return device.ReachNeedsReset
	default:
		return device.ReachFailed
	}
}

// read asks everything, whatever of it fails, unless the card is gone: what one question says may be graver than that another has no answer.
func (p *patient) read(c *device.Condition) error {
	if dir := filepath.Join(p.paths.Sysfs, "bus", "pci", "devices"); !exists(filepath.Join(dir, string(p.card.PCIAddress))) && exists(dir) {
		return errOffBus
	}
	handle, err := p.open()
	if err != nil {
		return err
	}
	recommended := func(handle nvml.Device, c *device.Condition) (err error) {
		c.Recovery, err = p.recovery(handle)
		return err
	}
	var failed []error
	for _, question := range []func(nvml.Device, *device.Condition) error{recommended, p.remap, p.uncorrected, p.energy, p.cuttable, p.fabric} {
		if err := question(handle, c); err != nil {
			failed = append(failed, err)
			if reachOf(err) == device.ReachLost {
				break
			}
		}
	}
	return errors.Join(failed...)
}

// open takes the handle anew each time: it may have changed with the card or its modes.
func (p *patient) open() (nvml.Device, error) {
	handle, ret := p.lib.DeviceGetHandleByPciBusId(busID(p.card.PCIAddress))
	p.progress()
	if ret == nvml.ERROR_INVALID_ARGUMENT {
		ret = nvml.ERROR_NOT_FOUND // NVML knows no card at this place
	}
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("open the GPU: %w", toError(ret))
	}
	uuid, ret := handle.GetUUID()
	p.progress()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("read its UUID: %w", toError(ret))
	}
	p.card.UUID = uuid
	return handle, nil
}

// ask runs a question unless the card had no answer to it a moment ago. What it has no answer to is no error.
func (p *patient) ask(what string, question func() nvml.Return) (answered bool, err error) {
	if time.Now().Before(p.absent[what]) {
		return false, nil
	}
	ret := question()
	p.progress()
	if ret == nvml.SUCCESS {
		return true, nil
	}
	if hasNoAnswer(ret) {
		p.absent[what] = time.Now().Add(absentFor)
		return false, nil
	}
	return false, fmt.Errorf("read its %s: %w", what, toError(ret))
}

// hasNoAnswer says that the card or its driver does not know, which is no sign of its health.
func hasNoAnswer(ret nvml.Return) bool {
	switch ret {
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_INVALID_ARGUMENT, nvml.ERROR_FUNCTION_NOT_FOUND, nvml.ERROR_NO_PERMISSION, nvml.ERROR_DEPRECATED,
		nvml.ERROR_ARGUMENT_VERSION_MISMATCH:
		return true
	}
	return false
}

// askFor is [patient.ask] for a function that an old library may lack.
func (p *patient) askFor(what, function string, question func() nvml.Return) (answered bool, err error) {
	return p.ask(what, func() nvml.Return {
		if !p.has(function) {
			return nvml.ERROR_FUNCTION_NOT_FOUND
		}
		return question()
	})
}

var recoveryActions = map[uint32]device.RecoveryAction{
	uint32(nvml.GPU_RECOVERY_ACTION_NONE): device.RecoveryNone, uint32(nvml.GPU_RECOVERY_ACTION_GPU_RESET): device.RecoveryReset,
	uint32(nvml.GPU_RECOVERY_ACTION_NODE_REBOOT): device.RecoveryReboot, uint32(nvml.GPU_RECOVERY_ACTION_DRAIN_P2P): device.RecoveryDrainP2P,
	uint32(nvml.GPU_RECOVERY_ACTION_DRAIN_AND_RESET):     device.RecoveryDrainAndReset,
	uint32(nvml.GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN): device.RecoveryIMEXDomain,
	uint32(nvml.GPU_RECOVERY_ACTION_BUS_RESET):           device.RecoveryBusReset, uint32(nvml.GPU_RECOVERY_ACTION_SYSTEM_REBOOT): device.RecoverySystemReboot,
}

// recovery is unknown for a driver that has no such field: that is before 565. It is asked each time.
func (m *migReader) recovery(handle nvml.Device) (device.RecoveryAction, error) {
	values := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	ret := handle.GetFieldValues(values)
	m.progress()
	if ret == nvml.SUCCESS {
		ret = nvml.Return(values[0].NvmlReturn) //nolint:gosec // NVML's own number
	}
	if hasNoAnswer(ret) {
		return device.RecoveryUnknown, nil
	}
	if ret != nvml.SUCCESS {
		return device.RecoveryUnknown, fmt.Errorf("read its recovery action: %w", toError(ret))
	}
	// The union's 32 bits lie first, whatever the type says: every machine with NVIDIA GPUs is little-endian.
	if action, known := recoveryActions[binary.LittleEndian.Uint32(values[0].Value[:])]; known {
		return action, nil
	}
	return device.RecoveryOther, nil
}

// remap reads what becomes of bad memory: rows are remapped on Ampere and later, pages are retired before.
func (p *patient) remap(handle nvml.Device, c *device.Condition) error {
	answered, err := p.askFor("row remapping", "nvmlDeviceGetRemappedRows", func() nvml.Return {
		_, _, pending, failed, ret := handle.GetRemappedRows()
		if ret == nvml.SUCCESS {
			c.Remap = &device.Remap{Pending: pending, Failed: failed}
		}
		return ret
	})
	if answered || err != nil {
		return err
	}
	_, err = p.askFor("page retirement", "nvmlDeviceGetRetiredPagesPendingStatus", func() nvml.Return {
		pending, ret := handle.GetRetiredPagesPendingStatus()
		if ret == nvml.SUCCESS {
			c.Remap = &device.Remap{Pending: pending == nvml.FEATURE_ENABLED}
		}
		return ret
	})
	return err
}

func (p *patient) uncorrected(handle nvml.Device, c *device.Condition) error {
	_, err := p.ask("ECC errors", func() nvml.Return {
		count, ret := handle.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
		if ret == nvml.SUCCESS {
			c.Uncorrected = &count
		}
		return ret
	})
	return err
}

func (p *patient) energy(handle nvml.Device, c *device.Condition) error {
	_, err := p.askFor("energy", "nvmlDeviceGetTotalEnergyConsumption", func() nvml.Return {
		used, ret := handle.GetTotalEnergyConsumption()
		if ret == nvml.SUCCESS {
			c.EnergyMillijoules = &used
		}
		return ret
	})
	return err
}

var fabricStates = map[uint8]device.FabricState{
	nvml.GPU_FABRIC_STATE_NOT_STARTED: device.FabricNotStarted, nvml.GPU_FABRIC_STATE_IN_PROGRESS: device.FabricInProgress,
	nvml.GPU_FABRIC_STATE_COMPLETED: device.FabricCompleted,
}

// fabric is nil for a card that is in no NVLink fabric. In MIG mode a card has left it, whatever it says of it then: that is no fault.
func (p *patient) fabric(handle nvml.Device, c *device.Condition) error {
	_, err := p.ask("fabric state", func() nvml.Return {
		state, status, ret := p.fabricInfo(handle)
		known, is := fabricStates[state]
		if ret != nvml.SUCCESS || !is {
			return ret
		}
		c.Fabric = &device.Fabric{State: known}
		if err := toError(status); known == device.FabricCompleted && err != nil {
			c.Fabric.Error = err.Error()
		}
		return ret
	})
	if (c.Fabric == nil || c.Fabric.State != device.FabricCompleted) && c.MIG != nil && c.MIG.Enabled {
		c.Fabric = &device.Fabric{State: device.FabricNotUsed}
	}
	return err
}

// cuttable reads the MIG mode. That it cannot be read is no sign of the card's health.
func (p *patient) cuttable(handle nvml.Device, c *device.Condition) error {
	_, _ = p.ask("MIG mode", func() nvml.Return {
		mode, err := p.mode(handle)
		switch {
		case err != nil:
			return nvml.ERROR_UNKNOWN
		case mode == nil:
			return nvml.ERROR_NOT_SUPPORTED
		}
		c.MIG = &device.MIGMode{Enabled: mode.Enabled, Pending: mode.Pending}
		return nvml.SUCCESS
	})
	return nil
}
