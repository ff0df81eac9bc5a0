package schedules

import (
	"fmt"
	"io/fs"
	"maps"
	"slices"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/cut"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

// node is the simulated node without the plugin: disk, GPUs and MPS daemons. It outlives the
// plugin's processes.
type node struct {
	disk *durabletest.Disk
	gpus []*gpu
	// daemons are the MPS daemons that the supervisor runs, by ID. absent is set when no supervisor
	// runs.
	daemons map[string]mps.Daemon
	absent  bool
	// supervisorDeaths counts how often the MPS supervisor died, and its daemons with it.
	supervisorDeaths int
	boots            int
	snapshot         inventory.Snapshot
}

// gpu is a simulated GPU. As on a real one, MIG instances do not overlap, a compute instance is
// destroyed before its GPU instance, IDs are reused, and the UUIDs of MIG devices follow from the
// IDs.
type gpu struct {
	address    device.PCIAddress
	uuid       string
	minor      int
	migEnabled bool
	// modeIsOurs is set when the plugin enabled the GPU's MIG mode, and no admin has used MIG on this
	// GPU since.
	modeIsOurs bool
	instances  map[uint32]device.Instance
	// adminInstances are the MIG instances that an admin created, by ID.
	adminInstances map[uint32]device.Instance
	// restoredAtBoot is set when an admin's service has restored this GPU's MIG instances at boot.
	// Claims may use these instances. Prepare of such a claim fails until they exist again.
	restoredAtBoot bool
	mode           device.ComputeMode
	slice          device.TimeSlice
	lost           bool
	// disturbed counts the events after which the GPU had lost its state.
	disturbed int
}

// initialSlice is the time slice that an admin set before the plugin was installed.
const initialSlice = device.TimeSliceMedium

// gpuMemory is the memory of a GPU. It is enough for three shares that are limited to 8 GiB each. A
// partition has room for two of them.
const gpuMemory = 25 << 30

// profiles are some of the GPU instance profiles of an H100.
var profiles = []device.Profile{
	{ID: 9, Name: "3g.40gb", Slices: 3, MaxInstances: 2, Size: 4, Starts: []uint32{0, 4}, MemoryBytes: 40 << 30},
	{ID: adminProfile, Name: "2g.20gb", Slices: 2, MaxInstances: 3, Size: 2, Starts: []uint32{0, 2, 4}, MemoryBytes: 20 << 30},
	{ID: 19, Name: "1g.10gb", Slices: 1, MaxInstances: 7, Size: 1, Starts: []uint32{0, 1, 2, 3, 4, 5, 6}, MemoryBytes: 17 << 30},
}

// adminProfile is the profile of the MIG instances that admins create while the node runs. Claims
// never request this profile: within a boot, the plugin cannot distinguish an admin's instance from
// its own if profile, placement and ID are the same.
const adminProfile = 14

func newNode(cards int) *node {
	n := &node{disk: durabletest.New(), daemons: map[string]mps.Daemon{}}
	for i := range cards {
		n.gpus = append(n.gpus, &gpu{
			address: device.PCIAddress(fmt.Sprintf("0000:%02x:00.0", 0x1b+i)), uuid: fmt.Sprintf("GPU-%d", i), minor: i,
			instances: map[uint32]device.Instance{}, adminInstances: map[uint32]device.Instance{}, mode: device.ComputeDefault, slice: initialSlice,
		})
	}
	n.scan()
	return n
}

// scan reads the GPUs and replaces the plugin's inventory with the result. A lost GPU becomes a
// problem in the inventory instead of a device.
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

// reboot starts the node after a power cut. Lost GPUs are back. On GPUs for which adminRestores
// returns true, a service of the admin restores all MIG instances with the same profiles,
// placements and IDs. All of these count as the admin's then, also those that the plugin created.
func (n *node) reboot(adminRestores func(*gpu) bool) {
	n.boots++
	for _, g := range n.gpus {
		g.lost = false
		was := maps.Clone(g.instances)
		maps.DeleteFunc(was, func(_ uint32, in device.Instance) bool { return len(in.Compute) == 0 })
		g.reset()
		if len(was) > 0 && adminRestores(g) {
			g.migEnabled, g.instances, g.adminInstances, g.restoredAtBoot = true, was, maps.Clone(was), true
		}
	}
	clear(n.daemons)
	n.supervisorDeaths++
	n.absent = false
	n.scan()
}

func (n *node) bootID() string { return fmt.Sprintf("boot-%d", n.boots) }

// reset changes the GPU as a GPU reset or a reload of the kernel driver does.
func (g *gpu) reset() {
	clear(g.instances)
	clear(g.adminInstances)
	g.migEnabled, g.modeIsOurs, g.mode, g.slice = false, false, device.ComputeDefault, device.TimeSliceDefault
	g.disturbed++
}

func (n *node) supervisorDies() {
	clear(n.daemons)
	n.absent = true
	n.supervisorDeaths++
}

func (g *gpu) state() device.CardState {
	st := device.CardState{
		Minor: g.minor, ComputeMode: g.mode,
		MIG: device.MIG{Enabled: g.migEnabled, Pending: g.migEnabled},
	}
	for _, id := range slices.Sorted(maps.Keys(g.instances)) {
		st.MIG.Instances = append(st.MIG.Instances, g.instances[id])
	}
	return st
}

func failure(code device.FailureCode, op faultPoint, c device.Card) error {
	return &cut.Error{Op: string(op) + " on " + c.PCIAddress.WholeName(), Code: code, Message: string(code)}
}

// onGPU calls the function do with the GPU that card c describes. It returns an error if that GPU
// is lost or now has another UUID.
func (n *node) onGPU(op faultPoint, c device.Card, do func(*gpu) error) error {
	for _, g := range n.gpus {
		if g.address != c.PCIAddress {
			continue
		}
		switch {
		case g.lost:
			return failure(device.FailureLost, op, c)
		case g.uuid != c.UUID:
			return failure(device.FailureReplaced, op, c)
		}
		return do(g)
	}
	return failure(device.FailureNotFound, op, c)
}

func (g *gpu) setMode(c device.Card, on bool) (device.CardState, error) {
	if g.migEnabled != on && len(g.instances) > 0 {
		return g.state(), failure(device.FailureInUse, modeOn, c)
	}
	if on && !g.migEnabled {
		g.mode, g.modeIsOurs = device.ComputeDefault, true
	}
	g.migEnabled, g.modeIsOurs = on, g.modeIsOurs && on
	return g.state(), nil
}

func (g *gpu) create(c device.Card, profileID uint32, at device.Placement) (device.Instance, error) {
	if !g.migEnabled {
		return device.Instance{}, failure(device.FailureNotSupported, createGI, c)
	}
	for _, in := range g.instances {
		if in.Placement.Overlaps(at) {
			return device.Instance{}, failure(device.FailureInsufficient, createGI, c)
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

func (g *gpu) createCompute(c device.Card, id uint32) (device.Instance, error) {
	in, ok := g.instances[id]
	if !ok || len(in.Compute) > 0 {
		return device.Instance{}, failure(device.FailureNotFound, createCI, c)
	}
	in.Compute = []device.ComputeInstance{
		{Name: profileName(in.ProfileID), UUID: fmt.Sprintf("MIG-%d-%d-0", g.minor, id), Minor: in.Minor + 1},
	}
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

// destroyable looks up the MIG instance with the ID of the given instance. The result there is the
// instance found, and gone is true if there is none. It returns an error if the instance found has
// another profile, placement or UUID.
func (g *gpu) destroyable(op faultPoint, c device.Card, in device.Instance) (there device.Instance, gone bool, err error) {
	there, ok := g.instances[in.ID]
	switch {
	case !ok:
		return there, true, nil
	case there.ProfileID != in.ProfileID || there.Placement != in.Placement,
		len(in.Compute) > 0 && len(there.Compute) > 0 && there.Compute[0].UUID != in.Compute[0].UUID:
		return there, false, failure(device.FailureChanged, op, c)
	}
	return there, false, nil
}

// start starts an MPS daemon as the supervisor does. It returns an error if no supervisor runs, or
// if the daemon is for a whole GPU whose compute mode is not exclusive process.
func (n *node) start(d mps.Daemon) error {
	if err := d.Validate(); err != nil {
		return err
	}
	if n.absent {
		return fmt.Errorf("start MPS daemon %s: %w", d.ID, errNoSupervisor)
	}
	for _, uuid := range d.Devices {
		if !n.canServe(uuid) {
			return fmt.Errorf("start MPS daemon %s: device %s is not available exclusively", d.ID, uuid)
		}
	}
	n.daemons[d.ID] = d
	return nil
}

var errNoSupervisor = &mps.NotRunningError{Socket: "/mps/socket", Err: fs.ErrNotExist}

func (n *node) canServe(uuid string) bool {
	for _, g := range n.gpus {
		if g.uuid == uuid {
			return !g.lost && !g.migEnabled && g.mode == device.ComputeExclusiveProcess
		}
		for _, in := range g.instances {
			if slices.ContainsFunc(in.Compute, func(c device.ComputeInstance) bool { return c.UUID == uuid }) {
				return !g.lost
			}
		}
	}
	return false
}

// adminCreates creates a MIG instance as an admin would, at the placement that begins with slice
// start. It returns false if that is not possible.
func (g *gpu) adminCreates(start uint32) bool {
	if g.lost || !g.migEnabled && g.mode != device.ComputeDefault {
		return false
	}
	on := g.migEnabled
	g.migEnabled = true
	in, err := g.create(device.Card{}, adminProfile, device.Placement{Start: start, Size: 2})
	if err == nil {
		_, err = g.createCompute(device.Card{}, in.ID)
	}
	if err != nil {
		g.migEnabled = on
		return false
	}
	g.adminInstances[in.ID], g.modeIsOurs = g.instances[in.ID], false
	return true
}

func (g *gpu) name() string { return g.address.WholeName() }

func (g *gpu) isAdmins(id uint32) bool {
	_, is := g.adminInstances[id]
	return is
}
