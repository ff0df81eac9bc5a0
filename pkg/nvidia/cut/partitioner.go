package cut

import (
	"errors"
	"fmt"
	"os"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/mig"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
)

// partitioner carries out the requests that the plugin sends to a worker. It caches only values
// that cannot change while NVML is open.
type partitioner struct {
	*mig.Reader
	// lock is this worker's lock on the card. nvidia-smi, which the worker starts, inherits it.
	lock *os.File
}

// do carries out a request and returns its result or error. If it creates a GPU instance or compute
// instance and then cannot read it back, it destroys it again.
func (c partitioner) do(r request) answer {
	var a answer
	var err error
	switch r.Op {
	case opLook:
		a.State, err = c.look(r)
	case opSetMode:
		a.State, err = c.setMode(r)
	case opFabric:
		a.Waiting, err = c.fabric(r)
	case opCreateInstance:
		a.Instance, err = c.createInstance(r)
	case opCreateCompute:
		a.Instance, err = c.createCompute(r)
	case opDestroy:
		err = c.destroy(r)
	case opSetComputeMode:
		a.State, err = c.setComputeMode(r)
	case opTimeSlice:
		a.TimeSlice, err = c.timeSlice(r)
	case opSetTimeSlice:
		err = c.setTimeSlice(r)
	case opPersistence:
		a.Persistence, err = c.persistence(r)
	case opSetPersistence:
		err = c.setPersistence(r)
	default:
		err = r.fail(device.FailureOther, "this version does not know operation %q", r.Op)
	}
	if err == nil {
		return a
	}
	var failed *nvidia.Error
	if !errors.As(err, &failed) {
		failed = c.explain(r, err)
	}
	return answer{Error: failed}
}

// explain returns err as an Error with the code of the NVML error and a remedy.
func (c partitioner) explain(r request, err error) *nvidia.Error {
	var ret nvmlx.Error
	if !errors.As(err, &ret) {
		return r.fail(device.FailureOther, "%v", err)
	}
	code, remedy := device.FailureOther, ""
	switch nvml.Return(ret) {
	case nvml.ERROR_IN_USE:
		code, remedy = device.FailureInUse, "stop the processes that use the GPU, including monitoring and profiling"
	case nvml.ERROR_INSUFFICIENT_RESOURCES:
		code, remedy = device.FailureInsufficient, "other MIG instances occupy this placement (nvidia-smi mig -lgi lists them)"
	case nvml.ERROR_NOT_FOUND:
		code = device.FailureNotFound
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_INVALID_ARGUMENT, nvml.ERROR_FUNCTION_NOT_FOUND:
		code = device.FailureNotSupported
	case nvml.ERROR_NO_PERMISSION:
		code, remedy = device.FailureNoPermission, "run the plugin privileged, as root"
	case nvml.ERROR_GPU_IS_LOST:
		code = device.FailureLost
	}
	if remedy != "" {
		return r.fail(code, "%v: %s", err, remedy)
	}
	return r.fail(code, "%v", err)
}

// open returns the card's NVML handle by PCI address. It never uses the UUID, for which NVML
// queries every card.
func (c partitioner) open(r request) (nvml.Device, error) {
	handle, ret := c.Lib.DeviceGetHandleByPciBusId(nvmlx.BusID(r.Card.PCIAddress))
	if nvmlx.IsAbsent(ret) {
		return nil, r.fail(device.FailureNotFound,
			"NVML lists no GPU at this PCI address: check dmesg for NVRM messages about %s", r.Card.PCIAddress)
	}
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("open the GPU: %w", nvmlx.ToError(ret))
	}
	uuid, ret := handle.GetUUID()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("read its UUID: %w", nvmlx.ToError(ret))
	}
	if uuid != r.Card.UUID {
		return nil, r.fail(device.FailureReplaced, "another GPU is at this PCI address now (%s)", uuid)
	}
	return handle, nil
}

func (c partitioner) look(r request) (device.CardState, error) {
	card, err := c.open(r)
	if err != nil {
		return device.CardState{}, err
	}
	return c.state(card)
}

func (c partitioner) state(card nvml.Device) (device.CardState, error) {
	minor, ret := card.GetMinorNumber()
	if ret != nvml.SUCCESS {
		return device.CardState{}, fmt.Errorf("read its minor number: %w", nvmlx.ToError(ret))
	}
	s := device.CardState{Minor: minor, ComputeMode: computeMode(card)}
	mode, err := nvmlx.MIGMode(c.Lib, card)
	if err != nil {
		return device.CardState{}, err
	}
	if mode != nil {
		s.MIG = *mode
	}
	if s.MIG.Enabled {
		if s.MIG.Instances, err = c.Instances(card, minor); err != nil {
			return device.CardState{}, err
		}
	}
	return s, nil
}

func (c partitioner) modeOf(r request, card nvml.Device) (*device.MIG, error) {
	mode, err := nvmlx.MIGMode(c.Lib, card)
	if err == nil && mode == nil {
		err = r.fail(device.FailureNotSupported, "the GPU or its driver has no MIG")
	}
	return mode, err
}

// refusal returns the error of a change that NVML refused with err. If the card is in use, or the
// GPU instance with the ID instance, refusal names the processes. It is transient even then: the
// driver's own use of a GPU ends soon.
func (c partitioner) refusal(r request, card nvml.Device, instance *uint32, err error) *nvidia.Error {
	e := c.explain(r, err)
	if e.Code == device.FailureInUse {
		e.Processes, e.Transient = c.usersOf(r.Card.PCIAddress, card, instance), true
	}
	return e
}

// usersOf lists the processes that have the card open or, if instance is set, the GPU instance with
// this ID. The list is for error messages, so it leaves out processes that /proc does not show.
// NVML's own lists are of no use: they leave out processes of other PID namespaces, and the plugin
// has one of its own.
func (c partitioner) usersOf(gpu device.PCIAddress, card nvml.Device, instance *uint32) []nvidia.Process {
	minor, ret := card.GetMinorNumber()
	if ret != nvml.SUCCESS {
		return nil
	}
	nodes := host.GPUNodes(c.Paths, gpu, minor)
	if instance != nil {
		nodes = host.InstanceNodes(c.Paths, minor, *instance)
	}
	return host.UsersForError(c.Paths, nodes)
}
