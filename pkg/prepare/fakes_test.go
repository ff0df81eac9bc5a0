// These fakes stand for the node's GPUs and its MPS supervisor.

package prepare_test

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/cut"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

// hardware fakes a node's GPUs with MIG. It follows these rules of real GPUs: instances do not
// overlap, the compute instance must be removed before its GPU instance, an instance in use cannot
// be removed, and IDs are reused.
type hardware struct {
	disk *durabletest.Disk // if the disk is stopped, the process is dead and its calls fail

	mu     sync.Mutex
	cards  map[device.PCIAddress]*fakeGPU
	serial int
	calls  []string
	// fault, if set, returns the error with which a call to the fake fails, or nil. It is called
	// before and after the effect of each call. The parameter "call" counts the calls from 1.
	fault func(call int, after bool) error
}

func (h *hardware) SetComputeMode(_ context.Context, c device.Card, mode device.ComputeMode) error {
	op := fmt.Sprintf("set compute mode %s", mode)
	return h.call(op, c, func(s *fakeGPU) error {
		if s.on && mode == device.ComputeExclusiveProcess {
			return failure(device.FailureNotSupported, op, c)
		}
		s.mode = mode
		return nil
	})
}

func (h *hardware) TimeSlice(_ context.Context, c device.Card) (slice device.TimeSlice, err error) {
	err = h.call("time slice", c, func(s *fakeGPU) error {
		if s.unsliced {
			return failure(device.FailureNotSupported, "read the time slice", c)
		}
		slice = s.slice
		return nil
	})
	return slice, err
}

func (h *hardware) SetTimeSlice(_ context.Context, c device.Card, slice device.TimeSlice) error {
	return h.call(fmt.Sprintf("set time slice %d", slice), c, func(s *fakeGPU) error {
		s.slice = slice
		return nil
	})
}

// serves reports whether an MPS daemon could use the device: a GPU in exclusive mode, or an
// existing MIG device.
func (h *hardware) serves(uuid string) bool {
	for _, s := range h.cards {
		if s.uuid == uuid {
			return !s.on && s.mode == device.ComputeExclusiveProcess
		}
		for _, in := range s.instances {
			if slices.ContainsFunc(in.Compute, func(c device.ComputeInstance) bool { return c.UUID == uuid }) {
				return true
			}
		}
	}
	return false
}

// boot resets the fake GPUs as a reboot does: all MIG instances and settings are gone.
func (h *hardware) boot() {
	for _, s := range h.cards {
		s.reset()
		s.on = s.on && s.fixed
		s.forget()
	}
}

// call simulates a call to the card c. It runs effect on the fake GPU, unless a fault is injected.
func (h *hardware) call(op string, c device.Card, effect func(*fakeGPU) error) error {
	return h.inject(op, func() error {
		s, ok := h.cards[c.PCIAddress]
		if !ok {
			return failure(device.FailureNotFound, op, c)
		}
		if s.uuid != c.UUID {
			return failure(device.FailureReplaced, op, c)
		}
		return effect(s)
	})
}

// inject simulates a call to a GPU or an MPS daemon. It runs effect, unless a fault is injected.
func (h *hardware) inject(op string, effect func() error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.disk.Stopped() {
		return durabletest.ErrStopped
	}
	h.calls = append(h.calls, op)
	n := len(h.calls)
	if h.fault != nil {
		if err := h.fault(n, false); err != nil {
			return err
		}
	}
	if err := effect(); err != nil {
		return err
	}
	if h.fault != nil {
		return h.fault(n, true)
	}
	return nil
}

func (h *hardware) Look(_ context.Context, c device.Card) (st device.CardState, err error) {
	err = h.call("look", c, func(s *fakeGPU) error { st = s.state(); return nil })
	return st, err
}

func (h *hardware) SetMode(_ context.Context, c device.Card, on bool) (st device.CardState, err error) {
	op := fmt.Sprintf("set MIG mode %v", on)
	err = h.call(op, c, func(s *fakeGPU) error {
		switch {
		case s.on == on:
		case s.fixed:
			return failure(device.FailureReset, op, c)
		case len(s.instances) > 0 || len(s.open) > 0:
			return failure(device.FailureInUse, op, c, s.open...)
		}
		s.on = on
		st = s.state()
		return nil
	})
	return st, err
}

func (h *hardware) CreateInstance(_ context.Context, c device.Card, profileID uint32, at device.Placement) (in device.Instance, err error) {
	op := fmt.Sprintf("create GPU instance %d at %d", profileID, at.Start)
	err = h.call(op, c, func(s *fakeGPU) error {
		if !s.on {
			return failure(device.FailureNotSupported, op, c)
		}
		if len(steps.Overlapping(s.state().MIG.Instances, at)) > 0 {
			return failure(device.FailureInsufficient, op, c)
		}
		id := uint32(1)
		for _, taken := s.instances[id]; taken; _, taken = s.instances[id] {
			id++
		}
		in = device.Instance{ID: id, ProfileID: profileID, Placement: at, Minor: int(id) * 10}
		s.instances[id] = in
		return nil
	})
	return in, err
}

func (h *hardware) CreateCompute(_ context.Context, c device.Card, id uint32) (in device.Instance, err error) {
	op := "create compute instance"
	err = h.call(op, c, func(s *fakeGPU) error {
		var ok bool
		if in, ok = s.instances[id]; !ok || len(in.Compute) > 0 {
			return failure(device.FailureNotFound, op, c)
		}
		h.serial++
		in.Compute = []device.ComputeInstance{{ProfileID: 0, Name: name(in.ProfileID), UUID: fmt.Sprintf("MIG-%d", h.serial),
			Minor: in.Minor + 1}}
		s.instances[id] = in
		return nil
	})
	return in, err
}

// Destroy simulates two calls: one removes the compute instance, the other the GPU instance.
func (h *hardware) Destroy(_ context.Context, c device.Card, in device.Instance) error {
	check := func(s *fakeGPU) (there device.Instance, gone bool, err error) {
		there, ok := s.instances[in.ID]
		switch {
		case !ok:
			return there, true, nil
		case there.ProfileID != in.ProfileID || there.Placement != in.Placement || len(in.Compute) > 0 && len(there.Compute) > 0 &&
			there.Compute[0].UUID != in.Compute[0].UUID:
			return there, false, failure(device.FailureChanged, "destroy", c)
		}
		if s.busy[in.ID] > 0 {
			s.busy[in.ID]--
			return there, false, failure(device.FailureInUse, "destroy", c, nvidia.Process{PID: 77, Name: "python"})
		}
		return there, false, nil
	}
	err := h.call("destroy compute instance", c, func(s *fakeGPU) error {
		there, gone, err := check(s)
		if gone || err != nil {
			return err
		}
		there.Compute = nil
		s.instances[in.ID] = there
		return nil
	})
	if err != nil {
		return err
	}
	return h.call("destroy GPU instance", c, func(s *fakeGPU) error {
		if _, gone, err := check(s); gone || err != nil {
			return err
		}
		delete(s.instances, in.ID)
		return nil
	})
}

// createForeign creates a MIG instance on the fake GPU as an admin does with nvidia-smi mig.
func (h *hardware) createForeign(t *testing.T, gpu string, profileID, start uint32) device.Instance {
	t.Helper()
	h.mu.Lock()
	fault := h.fault
	h.fault = nil
	calls := h.calls
	h.mu.Unlock()
	c := h.card(t, gpu)
	_, err := h.SetMode(t.Context(), c, true)
	if err != nil {
		t.Fatal(err)
	}
	in, err := h.CreateInstance(t.Context(), c, profileID, device.Placement{Start: start, Size: sizeOf(profileID)})
	if err == nil {
		in, err = h.CreateCompute(t.Context(), c, in.ID)
	}
	if err != nil {
		t.Fatal(err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fault, h.calls = fault, calls
	return in
}

func (h *hardware) card(t *testing.T, gpu string) device.Card {
	t.Helper()
	for address, s := range h.cards {
		if address.WholeName() == gpu {
			return device.Card{PCIAddress: address, UUID: s.uuid}
		}
	}
	t.Fatalf("no GPU %s", gpu)
	return device.Card{}
}

func (h *hardware) of(t *testing.T, gpu string) *fakeGPU {
	t.Helper()
	return h.cards[h.card(t, gpu).PCIAddress]
}

// takeCalls returns the calls since takeCalls was last called.
func (h *hardware) takeCalls() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	calls := h.calls
	h.calls = nil
	return calls
}

type fakeGPU struct {
	uuid      string
	minor     int
	on        bool
	fixed     bool
	instances map[uint32]device.Instance
	busy      map[uint32]int // by instance ID: how many more Destroy calls fail because it is in use
	open      []nvidia.Process

	mode     device.ComputeMode
	slice    device.TimeSlice
	unsliced bool // time slices are not supported
}

// forget resets the fake GPU's settings to their defaults, as a GPU reset or driver reload does.
func (s *fakeGPU) forget() { s.mode, s.slice = device.ComputeDefault, device.TimeSliceDefault }

func (s *fakeGPU) reset() {
	clear(s.instances)
	clear(s.busy)
}

func (s *fakeGPU) state() device.CardState {
	st := device.CardState{Minor: s.minor, ComputeMode: s.mode,
		MIG: device.MIG{Enabled: s.on, Pending: s.on, ModeFixed: s.fixed}}
	for _, id := range slices.Sorted(maps.Keys(s.instances)) {
		st.MIG.Instances = append(st.MIG.Instances, s.instances[id])
	}
	return st
}

var (
	_ steps.Partitions = &hardware{}
	_ steps.Partitions = &cut.Partitions{}
)

// profiles are some of the MIG profiles of an H100.
var profiles = []device.Profile{
	{ID: 0, Name: "7g.80gb", Slices: 7, MaxInstances: 1, Size: 8, Starts: []uint32{0}},
	{ID: 9, Name: "3g.40gb", Slices: 3, MaxInstances: 2, Size: 4, Starts: []uint32{0, 4}},
	{ID: 14, Name: "2g.20gb", Slices: 2, MaxInstances: 3, Size: 2, Starts: []uint32{0, 2, 4}},
	{ID: 19, Name: "1g.10gb", Slices: 1, MaxInstances: 7, Size: 1, Starts: []uint32{0, 1, 2, 3, 4, 5, 6}},
}

// withMIG adds fake MIG GPUs to the node.
func withMIG(w *world) *hardware {
	h := &hardware{disk: w.disk, cards: map[device.PCIAddress]*fakeGPU{}}
	for _, g := range w.snapshot.Node.GPUs {
		h.cards[g.PCIAddress] = &fakeGPU{uuid: g.UUID, minor: g.Minor, mode: device.ComputeDefault, instances: map[uint32]device.Instance{},
			busy: map[uint32]int{}}
	}
	w.hardware = h
	w.scan()
	return h
}

func failure(code device.FailureCode, op string, c device.Card, processes ...nvidia.Process) error {
	return &cut.Error{Op: op + " on " + c.PCIAddress.WholeName(), Code: code, Message: string(code), Processes: processes}
}

func name(profileID uint32) string {
	for _, p := range profiles {
		if p.ID == profileID {
			return p.Name
		}
	}
	return ""
}

func sizeOf(profileID uint32) uint32 {
	for _, p := range profiles {
		if p.ID == profileID {
			return p.Size
		}
	}
	return 0
}

// migEdits is the test's Options.MIGEdits. It adds the two capability device nodes to the edits of
// the whole GPU.
func migEdits(parent specs.ContainerEdits, in device.Instance, c device.ComputeInstance) specs.ContainerEdits {
	parent.DeviceNodes = slices.Clone(parent.DeviceNodes)
	for _, minor := range []int{in.Minor, c.Minor} {
		parent.DeviceNodes = append(parent.DeviceNodes, &specs.DeviceNode{Path: fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor)})
	}
	return parent
}

// daemons fakes a node's MPS supervisor, which keeps running when the plugin restarts. A fake
// daemon starts only if its devices exist, and if no other process uses its whole GPUs.
type daemons struct {
	h       *hardware
	running map[string]mps.Daemon
	hang    map[string]bool // by device UUID: starting a daemon for it hangs
	apart   bool            // injected faults hit GPU calls but no daemon calls
	absent  bool            // the supervisor does not run
	stuck   bool            // stopping a daemon hangs
	ending  time.Duration   // how long a stop takes
}

func (d *daemons) Start(ctx context.Context, daemon mps.Daemon) error {
	if err := daemon.Validate(); err != nil {
		return err
	}
	if d.absent {
		return fmt.Errorf("start MPS daemon %s: %w", daemon.ID, errAbsent)
	}
	if slices.ContainsFunc(daemon.Devices, func(uuid string) bool { return d.hang[uuid] }) {
		<-ctx.Done()
		return fmt.Errorf("start MPS daemon %s: the MPS supervisor has not answered in time: %w", daemon.ID, context.Cause(ctx))
	}
	return d.h.inject("start "+daemon.ID, func() error {
		for _, uuid := range daemon.Devices {
			if !d.h.serves(uuid) {
				return fmt.Errorf("start MPS daemon %s: no device %s is there for it alone", daemon.ID, uuid)
			}
		}
		d.running[daemon.ID] = daemon
		return nil
	})
}

func (d *daemons) List(context.Context) ([]mps.Status, error) {
	if d.absent {
		return nil, errAbsent
	}
	if d.h.disk.Stopped() {
		return nil, durabletest.ErrStopped
	}
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	var all []mps.Status
	for _, daemon := range d.running {
		all = append(all, mps.Status{Daemon: daemon, State: mps.Ready})
	}
	return all, nil
}

// Stop also succeeds for a daemon that ended with the supervisor, as with the real supervisor.
func (d *daemons) Stop(ctx context.Context, id string) error {
	ended := time.After(d.ending)
	if d.stuck {
		ended = nil
	}
	select {
	case <-ended:
	case <-ctx.Done():
		return fmt.Errorf("stop MPS daemon %s: the MPS supervisor has not answered in time: %w", id, context.Cause(ctx))
	}
	if d.apart {
		delete(d.running, id)
		return nil
	}
	return d.h.inject("stop "+id, func() error {
		delete(d.running, id)
		return nil
	})
}

func (d *daemons) edits(id string) specs.ContainerEdits {
	return specs.ContainerEdits{
		Env:    []string{"CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"},
		Mounts: []*specs.Mount{{HostPath: "/mps/" + id, ContainerPath: "/tmp/nvidia-mps"}},
	}
}

// verify fails if the edits mount the directory of a daemon that does not run.
func (d *daemons) verify(edits specs.ContainerEdits) error {
	if d.h == nil {
		return nil
	}
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	for _, m := range edits.Mounts {
		if id, ok := strings.CutPrefix(m.HostPath, "/mps/"); ok {
			if _, there := d.running[id]; !there {
				return fmt.Errorf("mount source %s is missing", m.HostPath)
			}
		}
	}
	return nil
}

var (
	_         steps.Daemons = &daemons{}
	errAbsent               = &mps.NotRunningError{Socket: "/mps/socket", Err: fs.ErrNotExist}
)

// withMPS adds fake MIG GPUs and a fake MPS supervisor to the node, and returns the fake GPUs.
func withMPS(w *world) *hardware {
	h := withMIG(w)
	w.daemons.h, w.daemons.absent = h, false
	return h
}

// slowDestroy is a fake GPU whose Look or Destroy hangs until the caller's deadline.
type slowDestroy struct {
	*hardware
	look, destroy bool
}

func (s *slowDestroy) Look(ctx context.Context, c device.Card) (device.CardState, error) {
	if s.look {
		<-ctx.Done()
		return device.CardState{}, failure(device.FailureTimeout, "look", c)
	}
	return s.hardware.Look(ctx, c)
}

func (s *slowDestroy) Destroy(ctx context.Context, c device.Card, in device.Instance) error {
	if s.destroy {
		<-ctx.Done()
		return failure(device.FailureInUse, "destroy", c)
	}
	return s.hardware.Destroy(ctx, c, in)
}

// slowRead is a fake GPU that takes this long to answer Look.
type slowRead struct {
	*hardware
	time time.Duration
}

func (s *slowRead) Look(ctx context.Context, c device.Card) (device.CardState, error) {
	select {
	case <-ctx.Done():
		return device.CardState{}, failure(device.FailureTimeout, "look", c)
	case <-time.After(s.time):
		return s.hardware.Look(ctx, c)
	}
}
