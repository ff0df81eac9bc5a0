// These fakes stand for the node's GPUs and its MPS supervisor.

package prepare_test

import (
	"context"
	"errors"
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
	"github.com/gpu-dra-driver/gpu-dra-driver/test/migmodel"
)

// hardware is a node's GPUs in memory. A test can make its calls fail.
type hardware struct {
	migmodel.Partitions
	disk *durabletest.Disk // if the disk is stopped, the process is dead and its calls fail

	mu     sync.Mutex
	cards  map[device.PCIAddress]*migmodel.GPU
	serial int
	calls  []string
	// fault, if set, returns the error with which a call to the fake fails, or nil. It is called
	// before and after the effect of each call. The parameter "call" counts the calls from 1.
	fault func(call int, after bool) error
}

// serves reports whether an MPS daemon could use the device.
func (h *hardware) serves(uuid string) bool {
	for _, g := range h.cards {
		if g.Serves(uuid) {
			return true
		}
	}
	return false
}

// boot resets the GPUs as a reboot does: all MIG instances and settings are gone.
func (h *hardware) boot() {
	for _, g := range h.cards {
		g.Reset()
	}
}

// call makes one call on a GPU, unless a fault is injected.
func (h *hardware) call(_ context.Context, op migmodel.Op, detail string, c device.Card, effect func(*migmodel.GPU) error) error {
	name := strings.TrimSpace(string(op) + " " + detail)
	return h.inject(name, func() error {
		g, err := migmodel.Find(slices.Collect(maps.Values(h.cards)), c)
		if err == nil {
			err = effect(g)
		}
		var refusal *migmodel.RefusalError
		if errors.As(err, &refusal) {
			return failure(refusal.Code, name, c, refusal.Processes...)
		}
		return err
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

// createForeign creates a MIG instance on the fake GPU as an admin does with nvidia-smi mig.
func (h *hardware) createForeign(t *testing.T, gpu string, profileID, start uint32) device.Instance {
	t.Helper()
	h.mu.Lock()
	fault := h.fault
	h.fault = nil
	calls := h.calls
	h.mu.Unlock()
	c := h.card(t, gpu)
	p, _ := device.GPU{MIG: &device.MIG{Profiles: profiles}}.Profile(profileID)
	_, err := h.SetMode(t.Context(), c, true)
	if err != nil {
		t.Fatal(err)
	}
	in, err := h.CreateInstance(t.Context(), c, profileID, device.Placement{Start: start, Size: p.Size})
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
	for _, g := range h.cards {
		if g.PCIAddress.WholeName() == gpu {
			return g.Card
		}
	}
	t.Fatalf("no GPU %s", gpu)
	return device.Card{}
}

func (h *hardware) of(t *testing.T, gpu string) *migmodel.GPU {
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

var (
	_ steps.Partitions = &hardware{}
	_ steps.Partitions = &cut.Partitions{}
)

// profiles are some of the MIG profiles of an H100.
var profiles = migmodel.Profiles(migmodel.H100(), 0, 9, 14, 19)

// withMIG adds MIG GPUs to the node.
func withMIG(w *world) *hardware {
	h := &hardware{disk: w.disk, cards: map[device.PCIAddress]*migmodel.GPU{}}
	h.Call = h.call
	for _, g := range w.snapshot.Node.GPUs {
		gpu := migmodel.New(migmodel.H100(), g.Card(), g.Minor)
		gpu.LowestIDs = true
		gpu.Describe = h.describe
		h.cards[g.PCIAddress] = gpu
	}
	w.hardware = h
	w.scan()
	return h
}

// describe gives each new MIG device a new UUID, and all instances the numbers that the files of
// earlier versions in testdata have.
func (h *hardware) describe(in *device.Instance) {
	in.Minor = int(in.ID) * 10
	for i, c := range in.Compute {
		h.serial++
		in.Compute[i] = device.ComputeInstance{Name: c.Name, UUID: fmt.Sprintf("MIG-%d", h.serial), Minor: in.Minor + 1}
	}
}

func failure(code device.FailureCode, op string, c device.Card, processes ...nvidia.Process) error {
	return &nvidia.Error{Op: op + " on " + c.PCIAddress.WholeName(), Code: code, Message: string(code), Processes: processes}
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
