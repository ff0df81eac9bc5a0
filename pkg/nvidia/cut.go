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

// request is one operation on one card, as it travels to the worker.
type request struct {
	Op       operation        `json:"op"`
	Card     Card             `json:"card"`
	On       bool             `json:"on,omitempty"`      // the wanted mode
	Watched  bool             `json:"watched,omitempty"` // the watcher has the card open: only read the mode
	Profile  uint32           `json:"profile,omitempty"` // of the GPU instance to make
	At       device.Placement `json:"at"`                // where
	Instance device.Instance  `json:"instance,omitzero"` // the one meant; of opCreateCompute only the ID counts

	// Patience is how long a worker retries while the card is in use for a moment.
	Patience time.Duration `json:"patience,omitempty"`

	ComputeMode device.ComputeMode `json:"computeMode,omitempty"` // the wanted one
	TimeSlice   device.TimeSlice   `json:"timeSlice,omitempty"`   // the wanted one
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

// phrase says what is done to which GPU, for people.
func (r request) phrase() string {
	what := map[operation]string{
		opLook:           "read the GPU instances",
		opSetMode:        "turn MIG mode " + map[bool]string{true: "on", false: "off"}[r.On],
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

func (r request) fail(code CutCode, message string, args ...any) *CutError {
	return &CutError{Op: r.phrase(), Code: code, Message: fmt.Sprintf(message, args...)}
}

// answer is what the worker says to a request.
type answer struct {
	State    *State           `json:"state,omitempty"`
	Instance *device.Instance `json:"instance,omitempty"`
	// Waiting says what the fabric is still doing; empty when it is ready or there is none.
	Waiting   string            `json:"waiting,omitempty"`
	TimeSlice *device.TimeSlice `json:"timeSlice,omitempty"`
	Error     *CutError         `json:"error,omitempty"`
}

// cutter carries out requests on one card. It keeps nothing of the card but what cannot change while NVML is held.
type cutter struct {
	*migReader
	// lock is this worker's hold of the card, for a process that it starts to have as well. It may be nil.
	lock *os.File
}

// do makes each call to NVML on its own and looks at each answer. What it made itself it takes away again if it cannot answer for it.
func (c cutter) do(r request) answer {
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
		err = r.fail(CodeOther, "this version knows no operation %q", r.Op)
	}
	if err == nil {
		return a
	}
	var cut *CutError
	if !errors.As(err, &cut) {
		cut = c.because(r, err)
	}
	return answer{Error: cut}
}

// because explains an error of NVML.
func (c cutter) because(r request, err error) *CutError {
	var ret nvmlError
	if !errors.As(err, &ret) {
		return r.fail(CodeOther, "%v", err)
	}
	code, remedy := CodeOther, ""
	switch nvml.Return(ret) {
	case nvml.ERROR_IN_USE:
		code, remedy = CodeInUse, "stop what uses it (monitoring and profiling count too)"
	case nvml.ERROR_INSUFFICIENT_RESOURCES:
		code, remedy = CodeInsufficient, "other instances take its place (nvidia-smi mig -lgi lists them)"
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

// open finds the card by its place, never by its UUID, for which NVML would ask every card.
func (c cutter) open(r request) (nvml.Device, error) {
	handle, ret := c.lib.DeviceGetHandleByPciBusId(busID(r.Card.PCIAddress))
	if isAbsent(ret) {
		return nil, r.fail(CodeNotFound, "NVML lists no GPU at this place: look at dmesg for NVRM messages about %s", r.Card.PCIAddress)
	}
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("open the GPU: %w", toError(ret))
	}
	uuid, ret := handle.GetUUID()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("read its UUID: %w", toError(ret))
	}
	if uuid != r.Card.UUID {
		return nil, r.fail(CodeReplaced, "another GPU is at this place now (%s)", uuid)
	}
	return handle, nil
}

// busID is an address as NVML writes it.
func busID(a device.PCIAddress) string {
	domain, rest, _ := strings.Cut(string(a), ":")
	for len(domain) < 8 {
		domain = "0" + domain
	}
	return strings.ToUpper(domain + ":" + rest)
}

func (c cutter) look(r request) (*State, error) {
	card, err := c.open(r)
	if err != nil {
		return nil, err
	}
	return c.state(card)
}

func (c cutter) state(card nvml.Device) (*State, error) {
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

func (c cutter) modeOf(r request, card nvml.Device) (*device.MIG, error) {
	mode, err := c.mode(card)
	if err == nil && mode == nil {
		err = r.fail(CodeNotSupported, "the GPU or its driver has no MIG")
	}
	return mode, err
}

// holders lists the processes that have the card open, or one GPU instance of it. It serves error
// messages, so it leaves out what it cannot read.
func (c cutter) holders(card nvml.Device, instance *uint32) []Process {
	minor, ret := card.GetMinorNumber()
	if ret != nvml.SUCCESS {
		return c.processes(card, instance)
	}
	if instance == nil {
		return merge(c.processes(card, nil), c.paths.holders(cardNode(minor)))
	}
	if of := c.paths.holders(c.paths.instanceNodes(minor, *instance)); len(of) > 0 {
		return of
	}
	return c.processes(card, instance)
}

// processes lists the processes that compute on the card or one GPU instance, as NVML says.
func (c cutter) processes(card nvml.Device, instance *uint32) []Process {
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
