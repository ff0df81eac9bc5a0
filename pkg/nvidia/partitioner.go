package nvidia

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// request is one operation on one card, as the plugin sends it to the card's worker.
type request struct {
	Op   operation `json:"op"`
	Card Card      `json:"card"`
	On   bool      `json:"on,omitempty"` // wanted mode
	// Watched means that the health watch has the card open. The worker then reads the MIG mode and
	// does not change it.
	Watched bool             `json:"watched,omitempty"`
	Profile uint32           `json:"profile,omitempty"` // of the GPU instance to create
	At      device.Placement `json:"at"`                // its placement
	// Instance is the GPU instance to create, fill with a compute instance or destroy. opCreateCompute
	// uses only its ID.
	Instance device.Instance `json:"instance,omitzero"`

	// Patience is how long a worker retries while other processes briefly use the card.
	Patience time.Duration `json:"patience,omitempty"`

	ComputeMode device.ComputeMode `json:"computeMode,omitempty"` // wanted mode
	TimeSlice   device.TimeSlice   `json:"timeSlice,omitempty"`   // wanted time slice
}

type operation string

const (
	opLook           operation = "look"
	opSetMode        operation = "set-mode"
	opFabric         operation = "fabric"
	opCreateInstance operation = "create-instance"
	opCreateCompute  operation = "create-compute"
	opDestroy        operation = "destroy"
	opSetComputeMode operation = "set-compute-mode"
	opTimeSlice      operation = "time-slice"
	opSetTimeSlice   operation = "set-time-slice"
)

// phrase describes the operation and the GPU for error messages.
func (r request) phrase() string {
	what := map[operation]string{
		opLook:           "read the GPU instances",
		opSetMode:        "switch MIG mode " + map[bool]string{true: "on", false: "off"}[r.On],
		opFabric:         "wait for the NVLink fabric",
		opCreateInstance: fmt.Sprintf("create a GPU instance of profile %d at %d:%d", r.Profile, r.At.Start, r.At.Size),
		opCreateCompute:  fmt.Sprintf("create the compute instance of GPU instance %d", r.Instance.ID),
		opDestroy: fmt.Sprintf("destroy GPU instance %d (profile %d at %d:%d)", r.Instance.ID, r.Instance.ProfileID,
			r.Instance.Placement.Start, r.Instance.Placement.Size),
		opSetComputeMode: fmt.Sprintf("set the compute mode %s", r.ComputeMode),
		opTimeSlice:      "read the time slice",
		opSetTimeSlice:   "set the time slice to " + sliceName(r.TimeSlice),
	}[r.Op]
	return what + " on " + r.Card.String()
}

func (r request) fail(code FailureCode, message string, args ...any) *PartitionError {
	return &PartitionError{Op: r.phrase(), Code: code, Message: fmt.Sprintf(message, args...)}
}

// answer is the worker's reply to a request.
type answer struct {
	State    *State           `json:"state,omitempty"`
	Instance *device.Instance `json:"instance,omitempty"`
	// Waiting says what the NVLink fabric still does to register the card. It is empty when the card
	// is registered or has no fabric.
	Waiting   string            `json:"waiting,omitempty"`
	TimeSlice *device.TimeSlice `json:"timeSlice,omitempty"`
	Error     *PartitionError   `json:"error,omitempty"`
}

// partitioner carries out the requests that the plugin sends to a worker. It caches only values
// that cannot change while NVML is open.
type partitioner struct {
	*migReader
	// lock is this worker's lock on the card, or nil if the card is gone. nvidia-smi, which the worker
	// starts, inherits the lock.
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
		a.TimeSlice, err = c.setTimeSlice(r)
	default:
		err = r.fail(CodeOther, "this version does not know operation %q", r.Op)
	}
	if err == nil {
		return a
	}
	var failed *PartitionError
	if !errors.As(err, &failed) {
		failed = c.explain(r, err)
	}
	return answer{Error: failed}
}

// explain returns err as a PartitionError with the code of the NVML error and a remedy.
func (c partitioner) explain(r request, err error) *PartitionError {
	var ret nvmlError
	if !errors.As(err, &ret) {
		return r.fail(CodeOther, "%v", err)
	}
	code, remedy := CodeOther, ""
	switch nvml.Return(ret) {
	case nvml.ERROR_IN_USE:
		code, remedy = CodeInUse, "stop the processes that use the GPU, including monitoring and profiling"
	case nvml.ERROR_INSUFFICIENT_RESOURCES:
		code, remedy = CodeInsufficient, "other MIG instances occupy this placement (nvidia-smi mig -lgi lists them)"
	case nvml.ERROR_NOT_FOUND:
		code = CodeNotFound
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_INVALID_ARGUMENT, nvml.ERROR_FUNCTION_NOT_FOUND:
		code = CodeNotSupported
	case nvml.ERROR_NO_PERMISSION:
		code, remedy = CodeNoPermission, "run the plugin privileged, as root"
	case nvml.ERROR_GPU_IS_LOST:
		code = CodeLost
	}
	if remedy != "" {
		return r.fail(code, "%v: %s", err, remedy)
	}
	return r.fail(code, "%v", err)
}

// open returns the card's NVML handle by PCI address. It never uses the UUID, for which NVML
// queries every card.
func (c partitioner) open(r request) (nvml.Device, error) {
	handle, ret := c.lib.DeviceGetHandleByPciBusId(busID(r.Card.PCIAddress))
	if isAbsent(ret) {
		return nil, r.fail(CodeNotFound, "NVML lists no GPU at this PCI address: check dmesg for NVRM messages about %s", r.Card.PCIAddress)
	}
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("open the GPU: %w", toError(ret))
	}
	uuid, ret := handle.GetUUID()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("read its UUID: %w", toError(ret))
	}
	if uuid != r.Card.UUID {
		return nil, r.fail(CodeReplaced, "another GPU is at this PCI address now (%s)", uuid)
	}
	return handle, nil
}

// busID converts a PCI address to NVML's format.
func busID(a device.PCIAddress) string {
	domain, rest, _ := strings.Cut(string(a), ":")
	for len(domain) < 8 {
		domain = "0" + domain
	}
	return strings.ToUpper(domain + ":" + rest)
}

func (c partitioner) look(r request) (*State, error) {
	card, err := c.open(r)
	if err != nil {
		return nil, err
	}
	return c.state(card)
}

func (c partitioner) state(card nvml.Device) (*State, error) {
	minor, ret := card.GetMinorNumber()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("read its minor number: %w", toError(ret))
	}
	s := &State{Minor: minor, ComputeMode: computeMode(card), Persistence: persistence(card)}
	mode, err := c.mode(card)
	if err != nil {
		return nil, err
	}
	if mode != nil {
		s.MIG = *mode
	}
	if s.MIG.Enabled {
		if s.MIG.Instances, err = c.instances(card, minor); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func (c partitioner) modeOf(r request, card nvml.Device) (*device.MIG, error) {
	mode, err := c.mode(card)
	if err == nil && mode == nil {
		err = r.fail(CodeNotSupported, "the GPU or its driver has no MIG")
	}
	return mode, err
}

// usersOf lists the processes that have the card open or, if instance is set, the GPU instance with
// this ID. The list is for error messages, so it leaves out processes that usersOf cannot read.
func (c partitioner) usersOf(card nvml.Device, instance *uint32) []Process {
	minor, ret := card.GetMinorNumber()
	if ret != nvml.SUCCESS {
		return c.processes(card, instance)
	}
	if instance == nil {
		return merge(c.processes(card, nil), c.paths.usersOf(cardNode(minor)))
	}
	if of := c.paths.usersOf(c.paths.instanceNodes(minor, *instance)); len(of) > 0 {
		return of
	}
	return c.processes(card, instance)
}

// processes lists the processes that NVML reports on the card. If instance is set and NVML reports
// processes in that GPU instance, it lists only those.
func (c partitioner) processes(card nvml.Device, instance *uint32) []Process {
	lists := []func() ([]nvml.ProcessInfo, nvml.Return){card.GetComputeRunningProcesses, card.GetGraphicsRunningProcesses}
	if c.has("nvmlDeviceGetMPSComputeRunningProcesses") {
		lists = append(lists, card.GetMPSComputeRunningProcesses)
	}
	var all, inside []Process
	for _, list := range lists {
		infos, ret := list()
		if ret != nvml.SUCCESS {
			continue
		}
		for _, info := range infos {
			if slices.ContainsFunc(all, func(p Process) bool { return p.PID == info.Pid }) {
				continue
			}
			p := c.paths.process(info.Pid)
			all = append(all, p)
			if instance != nil && info.GpuInstanceId == *instance {
				inside = append(inside, p)
			}
		}
	}
	if len(inside) > 0 {
		return inside
	}
	return all
}
