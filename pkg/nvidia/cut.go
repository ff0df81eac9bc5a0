package nvidia

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// request is one operation on one card, as it travels to the worker.
type request struct {
	Op       operation        `json:"op"`
	Card     Card             `json:"card"`
	On       bool             `json:"on,omitempty"`      // the wanted mode
	Profile  uint32           `json:"profile,omitempty"` // of the GPU instance to make
	At       device.Placement `json:"at"`                // where
	Instance device.Instance  `json:"instance,omitzero"` // the one meant; of opCreateCompute only the ID counts
}

type operation string

const (
	opLook           operation = "look"
	opSetMode        operation = "set-mode"
	opFabric         operation = "fabric"
	opCreateInstance operation = "create-instance"
	opCreateCompute  operation = "create-compute"
	opDestroy        operation = "destroy"
)

// phrase says what is done to which GPU, for people.
func (r request) phrase() string {
	what := map[operation]string{
		opLook:           "look at how the GPU is cut,",
		opSetMode:        "turn MIG mode " + map[bool]string{true: "on", false: "off"}[r.On],
		opFabric:         "wait for the NVLink fabric",
		opCreateInstance: fmt.Sprintf("create a GPU instance of profile %d at %d:%d", r.Profile, r.At.Start, r.At.Size),
		opCreateCompute:  fmt.Sprintf("create the compute instance of GPU instance %d", r.Instance.ID),
		opDestroy: fmt.Sprintf("destroy GPU instance %d (profile %d at %d:%d)", r.Instance.ID, r.Instance.ProfileID,
			r.Instance.Placement.Start, r.Instance.Placement.Size),
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
	Waiting string    `json:"waiting,omitempty"`
	Error   *CutError `json:"error,omitempty"`
}

// cutter carries out requests on one card. It keeps nothing of the card but what cannot change while NVML is held.
type cutter struct{ *migReader }

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
	handle, ret := c.library.DeviceGetHandleByPciBusId(busID(r.Card.PCIAddress))
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
	return c.state(r, card)
}

func (c cutter) state(r request, card nvml.Device) (*State, error) {
	minor, ret := card.GetMinorNumber()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("read its minor number: %w", toError(ret))
	}
	mode, err := c.modeOf(r, card)
	if err != nil {
		return nil, err
	}
	s := &State{Minor: minor, MIG: *mode}
	if mode.Enabled {
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

// setMode changes the MIG mode, unless it is as wanted. Whatever NVML answers to that, the mode that is in force afterwards decides.
func (c cutter) setMode(r request) (*State, error) {
	card, err := c.open(r)
	if err != nil {
		return nil, err
	}
	before, err := c.modeOf(r, card)
	if err != nil {
		return nil, err
	}
	if before.Enabled == r.On {
		return c.state(r, card)
	}
	activation, ret := card.SetMigMode(modeNumber(r.On))
	// The change may have reset the card: its handle, and with it everything that was read, is not to be relied on.
	if card, err = c.open(r); err != nil {
		return nil, err
	}
	now, err := c.modeOf(r, card)
	if err != nil {
		return nil, err
	}
	if now.Enabled == r.On {
		return c.state(r, card)
	}
	if ret == nvml.SUCCESS {
		ret = activation
	}
	refusal := c.modeRefusal(r, card, ret)
	if now.Pending == r.On { // else the next reset, whoever does it, would change the mode behind everybody's back
		if _, ret := card.SetMigMode(modeNumber(before.Pending)); ret != nvml.SUCCESS {
			refusal.Message += fmt.Sprintf("; the mode changes at the next reset of the GPU, because that could not be taken back (%v)", toError(ret))
		}
	}
	return nil, refusal
}

func modeNumber(on bool) int {
	if on {
		return nvml.DEVICE_MIG_ENABLE
	}
	return nvml.DEVICE_MIG_DISABLE
}

// modeRefusal explains why the mode has not changed.
func (c cutter) modeRefusal(r request, card nvml.Device, ret nvml.Return) *CutError {
	switch ret {
	case nvml.SUCCESS, nvml.ERROR_RESET_REQUIRED:
		return r.fail(CodeReset, "this machine changes the mode with a reset of the GPU only: set it while nothing runs (nvidia-smi -mig, then --gpu-reset), or reboot")
	case nvml.ERROR_IN_USE:
		refusal := c.because(r, toError(ret))
		refusal.Processes = c.processes(card, nil)
		return refusal
	default:
		return c.because(r, toError(ret))
	}
}

// createInstance makes a GPU instance at exactly the place that is asked for.
func (c cutter) createInstance(r request) (*device.Instance, error) {
	card, err := c.open(r)
	if err != nil {
		return nil, err
	}
	minor, ret := card.GetMinorNumber()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("read its minor number: %w", toError(ret))
	}
	handle, ret := card.CreateGpuInstanceWithPlacement(&nvml.GpuInstanceProfileInfo{Id: r.Profile}, &nvml.GpuInstancePlacement{Start: r.At.Start, Size: r.At.Size})
	if ret != nvml.SUCCESS {
		refusal := c.because(r, toError(ret))
		if refusal.Code == CodeInUse {
			refusal.Processes = c.processes(card, nil)
		}
		return nil, refusal
	}
	made, err := c.identify(handle)
	if err == nil && (made.ProfileID != r.Profile || made.Placement != r.At) {
		err = fmt.Errorf("the driver made one of profile %d at %d:%d instead", made.ProfileID, made.Placement.Start, made.Placement.Size)
	}
	if err == nil {
		made.Minor, err = c.paths.instanceMinor(minor, made.ID)
	}
	if err != nil {
		return nil, r.fail(CodeOther, "%v%s", err, takenBack(handle.Destroy()))
	}
	return &made, nil
}

// takenBack says what has become of something that was made and is of no use.
func takenBack(ret nvml.Return) string {
	if ret == nvml.SUCCESS || ret == nvml.ERROR_NOT_FOUND {
		return "; it was destroyed again"
	}
	return fmt.Sprintf("; it could not be destroyed again (%v)", toError(ret))
}

// createCompute makes the one compute instance that fills a GPU instance.
func (c cutter) createCompute(r request) (*device.Instance, error) {
	card, err := c.open(r)
	if err != nil {
		return nil, err
	}
	l := look{migReader: c.migReader, card: card}
	var ret nvml.Return
	if l.minor, ret = card.GetMinorNumber(); ret != nvml.SUCCESS {
		return nil, fmt.Errorf("read its minor number: %w", toError(ret))
	}
	parent, ret := card.GetGpuInstanceById(int(r.Instance.ID))
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("open the GPU instance: %w", toError(ret))
	}
	in, err := c.identify(parent)
	if err == nil {
		in.Minor, err = c.paths.instanceMinor(l.minor, in.ID)
	}
	if err != nil {
		return nil, fmt.Errorf("read the GPU instance: %w", err)
	}
	whole, err := c.wholeProfile(card, parent, in)
	if err != nil {
		return nil, err
	}
	handle, ret := parent.CreateComputeInstance(&whole)
	if ret != nvml.SUCCESS {
		return nil, c.because(r, toError(ret))
	}
	made, err := l.computeInstance(in, parent, whole, handle)
	if err == nil {
		err = c.paths.makeCapabilityNodes(l.minor, in.ID, made.ID)
	}
	if err != nil {
		return nil, r.fail(CodeOther, "%v%s", err, takenBack(handle.Destroy()))
	}
	in.Compute = []device.ComputeInstance{made}
	return &in, nil
}

// wholeProfile chooses the compute instance profile that fills a GPU instance: of those with all its slices the one with most multiprocessors. There
// may be two: an instance of one slice and double memory (1g.20gb of an H100) has more multiprocessors than the smallest compute instance.
func (c cutter) wholeProfile(card nvml.Device, parent nvml.GpuInstance, in device.Instance) (nvml.ComputeInstanceProfileInfo, error) {
	var whole nvml.ComputeInstanceProfileInfo
	kinds, err := c.readKinds(card)
	if err != nil {
		return whole, err
	}
	n := slices.IndexFunc(kinds, func(k kind) bool { return k.Id == in.ProfileID })
	if n < 0 {
		return whole, fmt.Errorf("the driver does not describe profile %d, which the GPU instance is of", in.ProfileID)
	}
	compute, err := c.computeKinds(parent, in.ProfileID)
	if err != nil {
		return whole, err
	}
	for _, k := range compute {
		if k.SliceCount == kinds[n].SliceCount && (whole.SliceCount == 0 || k.MultiprocessorCount > whole.MultiprocessorCount) {
			whole = k
		}
	}
	if whole.SliceCount == 0 {
		return whole, fmt.Errorf("the driver has no compute instance that fills a GPU instance of profile %d (%d slices)", in.ProfileID, kinds[n].SliceCount)
	}
	return whole, nil
}

// destroy takes away a GPU instance and what is in it, if it is the one that is meant. It may be called again after whatever it answered.
func (c cutter) destroy(r request) error {
	card, err := c.open(r)
	if err != nil {
		return err
	}
	mode, err := c.modeOf(r, card)
	if err != nil {
		return err
	}
	if !mode.Enabled {
		return nil // without the mode there are no instances
	}
	handle, ret := card.GetGpuInstanceById(int(r.Instance.ID))
	if ret == nvml.ERROR_NOT_FOUND {
		return nil
	}
	if ret != nvml.SUCCESS {
		return fmt.Errorf("open the GPU instance: %w", toError(ret))
	}
	there, err := c.identify(handle)
	if errors.Is(err, errVanished) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the GPU instance: %w", err)
	}
	if there.ProfileID != r.Instance.ProfileID || there.Placement != r.Instance.Placement {
		return r.fail(CodeChanged, "the instance with this ID is of profile %d at %d:%d: somebody else made it", there.ProfileID, there.Placement.Start, there.Placement.Size)
	}
	compute, err := c.computeToDestroy(r, card, handle, there)
	if err != nil {
		return err
	}
	for _, each := range compute {
		if ret := each.Destroy(); ret != nvml.SUCCESS && ret != nvml.ERROR_NOT_FOUND {
			return c.destroyRefusal(r, card, "destroy its compute instance", ret)
		}
	}
	if ret := handle.Destroy(); ret != nvml.SUCCESS && ret != nvml.ERROR_NOT_FOUND {
		return c.destroyRefusal(r, card, "destroy it", ret)
	}
	return nil
}

func (c cutter) destroyRefusal(r request, card nvml.Device, what string, ret nvml.Return) *CutError {
	refusal := c.because(r, fmt.Errorf("%s: %w", what, toError(ret)))
	if refusal.Code == CodeInUse {
		refusal.Processes = c.processes(card, &r.Instance.ID)
	}
	return refusal
}

// computeToDestroy lists the compute instances in a GPU instance. Where the caller knows which ones there were, others are somebody else's.
func (c cutter) computeToDestroy(r request, card nvml.Device, handle nvml.GpuInstance, there device.Instance) ([]nvml.ComputeInstance, error) {
	var handles []nvml.ComputeInstance
	l := look{migReader: c.migReader, card: card}
	err := c.eachCompute(handle, there, func(_ nvml.ComputeInstanceProfileInfo, compute nvml.ComputeInstance) error {
		if len(r.Instance.Compute) > 0 {
			if err := l.isKnown(r, there.ID, compute); err != nil {
				return err
			}
		}
		handles = append(handles, compute)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read its compute instances: %w", err)
	}
	return handles, nil
}

// isKnown compares a compute instance with the ones that the caller knows.
func (l *look) isKnown(r request, instance uint32, handle nvml.ComputeInstance) error {
	info, ret := handle.GetInfo()
	if isAbsent(ret) {
		return errVanished
	}
	if ret != nvml.SUCCESS {
		return toError(ret)
	}
	for _, known := range r.Instance.Compute {
		if known.ID != info.Id {
			continue
		}
		if known.UUID == "" {
			return nil
		}
		uuid, err := l.uuid(migIDs{instance, info.Id})
		if err != nil {
			return err
		}
		if uuid == known.UUID {
			return nil
		}
		return r.fail(CodeChanged, "its compute instance %d is %s and not %s: somebody else made it", info.Id, uuid, known.UUID)
	}
	return r.fail(CodeChanged, "it has compute instance %d, which is not known: somebody else made it", info.Id)
}

// fabric says what the NVLink fabric of the card is still doing. Where there is none there is nothing to wait for.
func (c cutter) fabric(r request) (string, error) {
	card, err := c.open(r)
	if err != nil {
		return "", err
	}
	state, status, ret := c.fabricInfo(card)
	if isAbsent(ret) || ret == nvml.ERROR_FUNCTION_NOT_FOUND {
		return "", nil
	}
	if ret != nvml.SUCCESS {
		return "", fmt.Errorf("read its fabric state: %w", toError(ret))
	}
	switch state {
	case nvml.GPU_FABRIC_STATE_NOT_STARTED:
		return "the GPU has not begun to register with the fabric", nil
	case nvml.GPU_FABRIC_STATE_IN_PROGRESS:
		return "the GPU is registering with the fabric", nil
	case nvml.GPU_FABRIC_STATE_COMPLETED:
		if status != nvml.SUCCESS {
			return "", r.fail(CodeOther, "the GPU could not register with the fabric (%v): look at nvidia-fabricmanager's log", toError(status))
		}
	}
	return "", nil
}

func (c cutter) fabricInfo(card nvml.Device) (state uint8, status, ret nvml.Return) {
	if c.has("nvmlDeviceGetGpuFabricInfoV") {
		info, ret := card.GetGpuFabricInfoV().V2()
		return info.State, nvml.Return(info.Status), ret //nolint:gosec // NVML's own number
	}
	if !c.has("nvmlDeviceGetGpuFabricInfo") {
		return 0, nvml.SUCCESS, nvml.ERROR_FUNCTION_NOT_FOUND
	}
	info, ret := card.GetGpuFabricInfo()
	return info.State, nvml.Return(info.Status), ret //nolint:gosec // NVML's own number
}

// processes lists who uses the card, or one GPU instance of it, as far as NVML says. It is for the text of an error: what fails is left out.
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
			p := Process{PID: info.Pid, Name: readTrimmed(filepath.Join(c.paths.Proc, fmt.Sprint(info.Pid), "comm"))}
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
