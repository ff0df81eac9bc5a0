package prepare

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable/durabletest"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// hardware is a node's GPUs, as far as they can be cut, with the rules of the real ones: instances don't overlap, the compute instance goes before the GPU
// instance, what is in use stays, IDs are used again.
type hardware struct {
	disk *durabletest.Disk // whose process is dead makes no calls

	mu     sync.Mutex
	cards  map[device.PCIAddress]*silicon
	serial int
	calls  []string
	// fault, if there is one, is asked before and after the effect of each call, which are counted from 1.
	fault func(call int, after bool) error
}

type silicon struct {
	uuid      string
	minor     int
	on        bool
	fixed     bool
	instances map[uint32]device.Instance
	busy      map[uint32]int // by GPU instance: for how many calls something still has it open
	open      []nvidia.Process

	mode      device.ComputeMode
	slice     device.TimeSlice
	forgetful bool // persistence mode is off
	unsliced  bool // it has no time slices that could be set
}

var (
	_ Partitions = &hardware{}
	_ Partitions = &nvidia.Partitions{}
)

// profiles are some of an H100's.
var profiles = []device.Profile{
	{ID: 0, Name: "7g.80gb", Slices: 7, MaxInstances: 1, Size: 8, Starts: []uint32{0}},
	{ID: 9, Name: "3g.40gb", Slices: 3, MaxInstances: 2, Size: 4, Starts: []uint32{0, 4}},
	{ID: 14, Name: "2g.20gb", Slices: 2, MaxInstances: 3, Size: 2, Starts: []uint32{0, 2, 4}},
	{ID: 19, Name: "1g.10gb", Slices: 1, MaxInstances: 7, Size: 1, Starts: []uint32{0, 1, 2, 3, 4, 5, 6}},
}

// withMIG gives the world's GPUs the ability to be cut.
func withMIG(w *world) *hardware {
	h := &hardware{disk: w.disk, cards: map[device.PCIAddress]*silicon{}}
	for _, g := range w.snapshot.Node.GPUs {
		h.cards[g.PCIAddress] = &silicon{uuid: g.UUID, minor: g.Minor, mode: device.ComputeDefault, instances: map[uint32]device.Instance{}, busy: map[uint32]int{}}
	}
	w.hardware = h
	w.scan()
	return h
}

// scan is a look of the inventory.
func (w *world) scan() {
	w.snapshot.Node.GPUs = slices.Clone(w.snapshot.Node.GPUs)
	for i := range w.snapshot.Node.GPUs {
		g := &w.snapshot.Node.GPUs[i]
		mig := w.hardware.cards[g.PCIAddress].state().MIG
		mig.Profiles = profiles
		g.MIG = &mig
	}
}

// boot is what a reboot does to the hardware: nothing of what was cut is left.
func (h *hardware) boot() {
	for _, s := range h.cards {
		s.reset()
		s.on = s.on && s.fixed
		s.forget()
	}
}

// forget is what a reset or a reload of the driver does to what was set.
func (s *silicon) forget() { s.mode, s.slice = device.ComputeDefault, device.TimeSliceDefault }

func (s *silicon) reset() {
	clear(s.instances)
	clear(s.busy)
}

func (s *silicon) state() nvidia.State {
	persistence := !s.forgetful
	st := nvidia.State{Minor: s.minor, ComputeMode: s.mode, Persistence: &persistence, MIG: device.MIG{Enabled: s.on, Pending: s.on, ModeFixed: s.fixed}}
	for _, id := range slices.Sorted(maps.Keys(s.instances)) {
		st.MIG.Instances = append(st.MIG.Instances, s.instances[id])
	}
	return st
}

func failure(code nvidia.CutCode, op string, c nvidia.Card, processes ...nvidia.Process) error {
	return &nvidia.CutError{Op: op + " on " + c.PCIAddress.WholeName(), Code: code, Message: string(code), Processes: processes}
}

// call is one call of the hardware's: with the faults that were ordered, or the effect.
func (h *hardware) call(op string, c nvidia.Card, effect func(*silicon) error) error {
	return h.any(op, func() error {
		s, ok := h.cards[c.PCIAddress]
		if !ok {
			return failure(nvidia.CodeNotFound, op, c)
		}
		if s.uuid != c.UUID {
			return failure(nvidia.CodeReplaced, op, c)
		}
		return effect(s)
	})
}

// any is a call of the hardware's, or of the daemons'.
func (h *hardware) any(op string, effect func() error) error {
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

func (h *hardware) Look(_ context.Context, c nvidia.Card) (st nvidia.State, err error) {
	err = h.call("look", c, func(s *silicon) error { st = s.state(); return nil })
	return st, err
}

func (h *hardware) SetMode(_ context.Context, c nvidia.Card, on bool) (st nvidia.State, err error) {
	op := fmt.Sprintf("set MIG mode %v", on)
	err = h.call(op, c, func(s *silicon) error {
		switch {
		case s.on == on:
		case s.fixed:
			return failure(nvidia.CodeReset, op, c)
		case len(s.instances) > 0 || len(s.open) > 0:
			return failure(nvidia.CodeInUse, op, c, s.open...)
		}
		s.on = on
		st = s.state()
		return nil
	})
	return st, err
}

func (h *hardware) CreateInstance(_ context.Context, c nvidia.Card, profileID uint32, at device.Placement) (in device.Instance, err error) {
	op := fmt.Sprintf("create GPU instance %d at %d", profileID, at.Start)
	err = h.call(op, c, func(s *silicon) error {
		if !s.on {
			return failure(nvidia.CodeNotSupported, op, c)
		}
		if len(overlapping(s.state().MIG.Instances, at)) > 0 {
			return failure(nvidia.CodeInsufficient, op, c)
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

func (h *hardware) CreateCompute(_ context.Context, c nvidia.Card, id uint32) (in device.Instance, err error) {
	op := "create compute instance"
	err = h.call(op, c, func(s *silicon) error {
		var ok bool
		if in, ok = s.instances[id]; !ok || len(in.Compute) > 0 {
			return failure(nvidia.CodeNotFound, op, c)
		}
		h.serial++
		in.Compute = []device.ComputeInstance{{ProfileID: 0, Name: name(in.ProfileID), UUID: fmt.Sprintf("MIG-%d", h.serial), Minor: in.Minor + 1}}
		s.instances[id] = in
		return nil
	})
	return in, err
}

func name(profileID uint32) string {
	for _, p := range profiles {
		if p.ID == profileID {
			return p.Name
		}
	}
	return ""
}

// Destroy is two calls of the hardware's.
func (h *hardware) Destroy(_ context.Context, c nvidia.Card, in device.Instance) error {
	check := func(s *silicon) (there device.Instance, gone bool, err error) {
		there, ok := s.instances[in.ID]
		switch {
		case !ok:
			return there, true, nil
		case there.ProfileID != in.ProfileID || there.Placement != in.Placement || len(in.Compute) > 0 && len(there.Compute) > 0 && there.Compute[0].UUID != in.Compute[0].UUID:
			return there, false, failure(nvidia.CodeChanged, "destroy", c)
		}
		if s.busy[in.ID] > 0 {
			s.busy[in.ID]--
			return there, false, failure(nvidia.CodeInUse, "destroy", c, nvidia.Process{PID: 77, Name: "python"})
		}
		return there, false, nil
	}
	err := h.call("destroy compute instance", c, func(s *silicon) error {
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
	return h.call("destroy GPU instance", c, func(s *silicon) error {
		if _, gone, err := check(s); gone || err != nil {
			return err
		}
		delete(s.instances, in.ID)
		return nil
	})
}

// someoneElse cuts the card past the plugin, as nvidia-smi mig does.
func (h *hardware) someoneElse(t *testing.T, gpu string, profileID, start uint32) device.Instance {
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

func sizeOf(profileID uint32) uint32 {
	for _, p := range profiles {
		if p.ID == profileID {
			return p.Size
		}
	}
	return 0
}

func (h *hardware) card(t *testing.T, gpu string) nvidia.Card {
	t.Helper()
	for address, s := range h.cards {
		if address.WholeName() == gpu {
			return nvidia.Card{PCIAddress: address, UUID: s.uuid}
		}
	}
	t.Fatalf("no GPU %s", gpu)
	return nvidia.Card{}
}

func (h *hardware) of(t *testing.T, gpu string) *silicon {
	t.Helper()
	return h.cards[h.card(t, gpu).PCIAddress]
}

// asked are the calls since the last time.
func (h *hardware) asked() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	calls := h.calls
	h.calls = nil
	return calls
}

// migEdits give a container the whole card's nodes and the two capability nodes.
func migEdits(parent specs.ContainerEdits, in device.Instance, c device.ComputeInstance) specs.ContainerEdits {
	parent.DeviceNodes = slices.Clone(parent.DeviceNodes)
	for _, minor := range []int{in.Minor, c.Minor} {
		parent.DeviceNodes = append(parent.DeviceNodes, &specs.DeviceNode{Path: fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor)})
	}
	return parent
}
