package schedules

import (
	"fmt"
	"io/fs"
	"maps"
	"slices"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable/durabletest"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// node is what outlives a process of the plugin: the disk, the GPUs and the MPS daemons.
type node struct {
	disk *durabletest.Disk
	gpus []*gpu
	// daemons are those of the supervisor; absent says that there is none.
	daemons map[string]mps.Daemon
	absent  bool
	// supervisors counts how often the daemons were lost with theirs.
	supervisors int
	boots       int
	snapshot    inventory.Snapshot
}

// gpu is a card, with the rules of a real one: instances don't overlap, the compute instance goes before the GPU instance, IDs are used again, and the UUIDs
// of MIG devices follow from them.
type gpu struct {
	address device.PCIAddress
	uuid    string
	minor   int
	on      bool
	// ours says that the plugin turned the mode on, and that no admin has used it since.
	ours      bool
	instances map[uint32]device.Instance
	// theirs are the instances that an admin has cut, by their IDs.
	theirs map[uint32]device.Instance
	// recut says that an admin's service has ever cut it when the node started. Claims may have used that, and wait for the service.
	recut bool
	mode  device.ComputeMode
	slice device.TimeSlice
	lost  bool
	// disturbed counts what made the card forget.
	disturbed int
}

// foundSlice is what an admin has set before the plugin came.
const foundSlice = device.TimeSliceMedium

// gpuMemory is what three fractions fit into. Of a partition two do.
const gpuMemory = 25 << 30

// profiles are some of an H100's.
var profiles = []device.Profile{
	{ID: 9, Name: "3g.40gb", Slices: 3, MaxInstances: 2, Size: 4, Starts: []uint32{0, 4}, MemoryBytes: 40 << 30},
	{ID: theirProfile, Name: "2g.20gb", Slices: 2, MaxInstances: 3, Size: 2, Starts: []uint32{0, 2, 4}, MemoryBytes: 20 << 30},
	{ID: 19, Name: "1g.10gb", Slices: 1, MaxInstances: 7, Size: 1, Starts: []uint32{0, 1, 2, 3, 4, 5, 6}, MemoryBytes: 17 << 30},
}

// theirProfile is the one that admins cut while the node runs. Claims never ask for it: an instance that someone makes anew with the profile, the place and the
// ID of ours cannot be told from ours within a boot, see package prepare.
const theirProfile = 14

func newNode(cards int) *node {
	n := &node{disk: durabletest.New(), daemons: map[string]mps.Daemon{}}
	for i := range cards {
		n.gpus = append(n.gpus, &gpu{
			address: device.PCIAddress(fmt.Sprintf("0000:%02x:00.0", 0x1b+i)), uuid: fmt.Sprintf("GPU-%d", i), minor: i,
			instances: map[uint32]device.Instance{}, theirs: map[uint32]device.Instance{}, mode: device.ComputeDefault, slice: foundSlice,
		})
	}
	n.scan()
	return n
}

// scan is a look of the inventory. It does not see a card that is lost.
func (n *node) scan() {
	s := inventory.Snapshot{Ready: true, Known: true, Node: nvidia.Node{
		Common: specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: "/usr/lib/libcuda.so.1", ContainerPath: "/usr/lib/libcuda.so.1"}}},
	}}
	for _, g := range n.gpus {
		if g.lost {
			s.Node.Problems = append(s.Node.Problems, nvidia.Problem{PCIAddress: g.address, Message: "it has fallen off the bus"})
			continue
		}
		mig := g.state().MIG
		mig.Profiles = profiles
		s.Node.GPUs = append(s.Node.GPUs, nvidia.GPU{
			GPU:   device.GPU{PCIAddress: g.address, UUID: g.uuid, Minor: g.minor, MemoryBytes: gpuMemory, MIG: &mig},
			Edits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: fmt.Sprintf("/dev/nvidia%d", g.minor)}}},
		})
	}
	n.snapshot = s
}

// reboot starts the node again after its power went. Cards that were lost are back. Those of which restored says so an admin's service has cut again as they
// were before anything else runs, with the same profiles, places and IDs: what was ours is theirs now.
func (n *node) reboot(restored func(*gpu) bool) {
	n.boots++
	for _, g := range n.gpus {
		g.lost = false
		was := maps.Clone(g.instances)
		maps.DeleteFunc(was, func(_ uint32, in device.Instance) bool { return len(in.Compute) == 0 })
		g.forget()
		if len(was) > 0 && restored(g) {
			g.on, g.instances, g.theirs, g.recut = true, was, maps.Clone(was), true
		}
	}
	clear(n.daemons)
	n.supervisors++
	n.absent = false
	n.scan()
}

func (n *node) bootID() string { return fmt.Sprintf("boot-%d", n.boots) }

// reset is what an admin's reset of the card does to it, and a reload of its driver.
func (g *gpu) forget() {
	clear(g.instances)
	clear(g.theirs)
	g.on, g.ours, g.mode, g.slice = false, false, device.ComputeDefault, device.TimeSliceDefault
	g.disturbed++
}

func (n *node) supervisorDies() {
	clear(n.daemons)
	n.absent = true
	n.supervisors++
}

func (g *gpu) state() nvidia.State {
	persistence := true
	st := nvidia.State{Minor: g.minor, ComputeMode: g.mode, Persistence: &persistence, MIG: device.MIG{Enabled: g.on, Pending: g.on}}
	for _, id := range slices.Sorted(maps.Keys(g.instances)) {
		st.MIG.Instances = append(st.MIG.Instances, g.instances[id])
	}
	return st
}

func failure(code nvidia.CutCode, op step, c nvidia.Card) error {
	return &nvidia.CutError{Op: string(op) + " on " + c.PCIAddress.WholeName(), Code: code, Message: string(code)}
}

// on does something to the card, if it is there.
func (n *node) on(op step, c nvidia.Card, do func(*gpu) error) error {
	for _, g := range n.gpus {
		if g.address != c.PCIAddress {
			continue
		}
		switch {
		case g.lost:
			return failure(nvidia.CodeLost, op, c)
		case g.uuid != c.UUID:
			return failure(nvidia.CodeReplaced, op, c)
		}
		return do(g)
	}
	return failure(nvidia.CodeNotFound, op, c)
}

func (g *gpu) setMode(c nvidia.Card, on bool) (nvidia.State, error) {
	if g.on != on && len(g.instances) > 0 {
		return g.state(), failure(nvidia.CodeInUse, modeOn, c)
	}
	if on && !g.on {
		g.mode, g.ours = device.ComputeDefault, true
	}
	g.on, g.ours = on, g.ours && on
	return g.state(), nil
}

func (g *gpu) create(c nvidia.Card, profileID uint32, at device.Placement) (device.Instance, error) {
	if !g.on {
		return device.Instance{}, failure(nvidia.CodeNotSupported, createGI, c)
	}
	for _, in := range g.instances {
		if in.Placement.Overlaps(at) {
			return device.Instance{}, failure(nvidia.CodeInsufficient, createGI, c)
		}
	}
	id := uint32(1)
	for _, taken := g.instances[id]; taken; _, taken = g.instances[id] {
		id++
	}
	in := device.Instance{ID: id, ProfileID: profileID, Placement: at, Minor: 100*g.minor + 10*int(id)}
	g.instances[id] = in
	return in, nil
}

func (g *gpu) fill(c nvidia.Card, id uint32) (device.Instance, error) {
	in, ok := g.instances[id]
	if !ok || len(in.Compute) > 0 {
		return device.Instance{}, failure(nvidia.CodeNotFound, createCI, c)
	}
	in.Compute = []device.ComputeInstance{{Name: profileName(in.ProfileID), UUID: fmt.Sprintf("MIG-%d-%d-0", g.minor, id), Minor: in.Minor + 1}}
	g.instances[id] = in
	return in, nil
}

func profileName(id uint32) string {
	for _, p := range profiles {
		if p.ID == id {
			return p.Name
		}
	}
	return ""
}

// destroyable finds the instance that is meant.
func (g *gpu) destroyable(op step, c nvidia.Card, in device.Instance) (there device.Instance, gone bool, err error) {
	there, ok := g.instances[in.ID]
	switch {
	case !ok:
		return there, true, nil
	case there.ProfileID != in.ProfileID || there.Placement != in.Placement || len(in.Compute) > 0 && len(there.Compute) > 0 && there.Compute[0].UUID != in.Compute[0].UUID:
		return there, false, failure(nvidia.CodeChanged, op, c)
	}
	return there, false, nil
}

// start is the supervisor's: a daemon needs devices that are there, and a whole GPU for itself.
func (n *node) start(d mps.Daemon) error {
	if err := d.Validate(); err != nil {
		return err
	}
	if n.absent {
		return fmt.Errorf("start MPS daemon %s: %w", d.ID, errNoSupervisor)
	}
	for _, uuid := range d.Devices {
		if !n.serves(uuid) {
			return fmt.Errorf("start MPS daemon %s: no device %s is there for it alone", d.ID, uuid)
		}
	}
	n.daemons[d.ID] = d
	return nil
}

var errNoSupervisor = &mps.NotRunningError{Socket: "/mps/socket", Err: fs.ErrNotExist}

func (n *node) serves(uuid string) bool {
	for _, g := range n.gpus {
		if g.uuid == uuid {
			return !g.lost && !g.on && g.mode == device.ComputeExclusiveProcess
		}
		for _, in := range g.instances {
			if slices.ContainsFunc(in.Compute, func(c device.ComputeInstance) bool { return c.UUID == uuid }) {
				return !g.lost
			}
		}
	}
	return false
}

// someoneElse cuts a card past the plugin, if there is room. It is false where there is none.
func (g *gpu) someoneElse(start uint32) bool {
	if g.lost || !g.on && g.mode != device.ComputeDefault {
		return false
	}
	on := g.on
	g.on = true
	in, err := g.create(nvidia.Card{}, theirProfile, device.Placement{Start: start, Size: 2})
	if err == nil {
		_, err = g.fill(nvidia.Card{}, in.ID)
	}
	if err != nil {
		g.on = on
		return false
	}
	g.theirs[in.ID], g.ours = g.instances[in.ID], false
	return true
}

func (g *gpu) name() string { return g.address.WholeName() }

func (g *gpu) isTheirs(id uint32) bool {
	_, theirs := g.theirs[id]
	return theirs
}
