package schedules

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/busmodel"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/migmodel"
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
	// passthrough means that GPUs can be passed to virtual machines.
	passthrough bool
	snapshot    inventory.Snapshot
}

// gpu is a GPU in memory, with what the simulation remembers of it.
type gpu struct {
	migmodel.GPU
	// modeIsOurs is set when the plugin enabled the GPU's MIG mode, and no admin has used MIG on this
	// GPU since.
	modeIsOurs bool
	// adminInstances are the MIG instances that an admin created, by ID.
	adminInstances map[uint32]device.Instance
	// restoredAtBoot is set when an admin's service has restored this GPU's MIG instances at boot.
	// Claims may use these instances. Prepare of such a claim fails until they exist again.
	restoredAtBoot bool
	lost           bool
	// loads counts the loads of NVIDIA's driver. unfound is set when the last one did not find the
	// GPU.
	loads   int
	unfound bool
	// pci are the GPU and its audio function on the PCI bus. override is the driver override that an
	// admin gave the GPU, which a reboot erases.
	pci      [2]busmodel.Function
	override string
	// disturbed counts the events after which the GPU had lost its state.
	disturbed int
}

// initialSlice is the time slice that an admin set before the plugin was installed.
const initialSlice = device.TimeSliceMedium

// gpuMemory is the memory of a GPU. It is enough for three shares that are limited to 8 GiB each. A
// partition has room for two of them.
const gpuMemory = 24<<30 + 1280<<20

// profiles are some of the GPU instance profiles of an H100. The smallest has room for two limited
// shares.
var profiles = func() []device.Profile {
	some := migmodel.Profiles(h100, 9, adminProfile, smallProfile)
	for i := range some {
		if some[i].ID == smallProfile {
			some[i].MemoryBytes = 17 << 30
		}
	}
	return some
}()

var h100 = migmodel.H100()

const smallProfile = 19

// adminProfile is the profile of the MIG instances that admins create while the node runs. Claims
// never request this profile: within a boot, the plugin cannot distinguish an admin's instance from
// its own if profile, placement and ID are the same.
const adminProfile = 14

func newNode(cards int) *node {
	n := &node{disk: durabletest.New(), daemons: map[string]mps.Daemon{}}
	for i := range cards {
		card := device.Card{PCIAddress: device.PCIAddress(fmt.Sprintf("0000:%02x:00.0", 0x1b+i)), UUID: fmt.Sprintf("GPU-%d", i)}
		g := &gpu{GPU: *migmodel.New(h100, card, i), adminInstances: map[uint32]device.Instance{}}
		g.LowestIDs, g.TimeSlice = true, initialSlice
		g.pci[1] = busmodel.Function{Address: card.PCIAddress[:len(card.PCIAddress)-1] + "1", Native: audioDriver}
		g.pci[0] = busmodel.Function{Address: card.PCIAddress, Native: nvidiaDriver, Display: true}
		g.bootPCI()
		if i == 0 {
			g.pci[0].Override, g.override = nvidiaDriver, nvidiaDriver
		}
		n.gpus = append(n.gpus, g)
	}
	n.scan()
	return n
}

const (
	nvidiaDriver = "nvidia"
	audioDriver  = "snd_hda_intel"
)

// bootPCI gives the GPU's functions the drivers that they have after a boot.
func (g *gpu) bootPCI() {
	g.override = ""
	for i := range g.pci {
		g.pci[i].Driver, g.pci[i].Override = g.pci[i].Native, ""
	}
}

// isAway reports whether NVIDIA's driver does not have the GPU.
func (g *gpu) isAway() bool { return g.pci[0].Driver != nvidiaDriver }

// binding identifies the present binding of the GPU to its driver.
func (g *gpu) binding() string {
	if g.unfound {
		return ""
	}
	return fmt.Sprintf("%s %d: %d", g.pci[0].Driver, g.loads, g.Minor)
}

func (n *node) binding(a device.PCIAddress) string {
	for _, g := range n.gpus {
		if g.PCIAddress == a {
			return g.binding()
		}
	}
	return ""
}

// loadDriver loads NVIDIA's driver again. It finds no lost GPU, and numbers the others anew, in an
// order that the caller chooses.
func (n *node) loadDriver(order []int) {
	n.bus().Load(nvidiaDriver)
	minor := 0
	for _, i := range order {
		g := n.gpus[i]
		g.unfound = g.lost
		g.loads++
		if !g.lost && !g.isAway() {
			g.Minor = minor
			minor++
		}
	}
}

// returned gives a GPU that comes back to NVIDIA's driver the lowest free number.
func (n *node) returned(g *gpu) {
	taken := func(minor int) bool {
		return slices.ContainsFunc(n.gpus, func(o *gpu) bool { return o != g && !o.isAway() && !o.unfound && o.Minor == minor })
	}
	for g.Minor = 0; taken(g.Minor); {
		g.Minor++
	}
}

// bus returns the node's PCI bus.
func (n *node) bus() *busmodel.Bus {
	b := &busmodel.Bus{Drivers: []string{nvidiaDriver, audioDriver, busmodel.VFIO}}
	for _, g := range n.gpus {
		b.Functions = append(b.Functions, &g.pci[0], &g.pci[1])
	}
	return b
}

// scan reads the GPUs and replaces the plugin's inventory with the result. A lost GPU becomes a
// problem in the inventory instead of a device.
func (n *node) scan() {
	s := inventory.Snapshot{Ready: true, Known: true, Node: nvidia.Node{
		Common: specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: "/usr/lib/libcuda.so.1", ContainerPath: "/usr/lib/libcuda.so.1"}}},
	}}
	for _, g := range n.gpus {
		if g.lost {
			s.Node.Problems = append(s.Node.Problems, nvidia.Problem{PCIAddress: g.PCIAddress, Message: "it has fallen off the bus"})
			continue
		}
		var facts *device.Passthrough
		if n.passthrough {
			facts = &device.Passthrough{BoundByAdmin: g.isAway()}
		}
		if g.isAway() {
			s.Node.Passthrough = append(s.Node.Passthrough, device.GPU{PCIAddress: g.PCIAddress, Passthrough: facts})
			continue
		}
		mig := g.State().MIG
		mig.Profiles = profiles
		s.Node.GPUs = append(s.Node.GPUs, nvidia.GPU{
			GPU:     device.GPU{PCIAddress: g.PCIAddress, UUID: g.UUID, Minor: g.Minor, MemoryBytes: gpuMemory, MIG: &mig, Passthrough: facts},
			Edits:   specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: fmt.Sprintf("/dev/nvidia%d", g.Minor)}}},
			Binding: g.binding(),
		})
	}
	n.snapshot = s
}

// reboot starts the node after a power cut. Lost GPUs are back. On GPUs for which adminRestores
// returns true, a service of the admin restores all MIG instances with the same profiles,
// placements and IDs. All of these count as the admin's then, also those that the plugin created.
func (n *node) reboot(adminRestores func(*gpu) bool) {
	n.boots++
	for i, g := range n.gpus {
		g.lost, g.unfound, g.Minor = false, false, i
		was := maps.Clone(g.Instances)
		maps.DeleteFunc(was, func(_ uint32, in device.Instance) bool { return len(in.Compute) == 0 })
		g.reset()
		g.bootPCI()
		if len(was) > 0 && adminRestores(g) {
			g.Enabled, g.Instances, g.adminInstances, g.restoredAtBoot = true, was, maps.Clone(was), true
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
	g.Reset()
	clear(g.adminInstances)
	g.modeIsOurs = false
	g.disturbed++
}

func (n *node) supervisorDies() {
	clear(n.daemons)
	n.absent = true
	n.supervisorDeaths++
}

func failure(code device.FailureCode, op faultPoint, c device.Card) error {
	return &nvidia.Error{Op: string(op) + " on " + c.PCIAddress.WholeName(), Code: code, Message: string(code)}
}

// onGPU calls the function do with the GPU that card c describes. It returns an error if that GPU
// is lost or now has another UUID.
func (n *node) onGPU(op faultPoint, c device.Card, do func(*gpu) error) error {
	for _, g := range n.gpus {
		if g.PCIAddress != c.PCIAddress {
			continue
		}
		switch {
		case g.isAway():
			return failure(device.FailureNotFound, op, c)
		case g.lost:
			return failure(device.FailureLost, op, c)
		case g.UUID != c.UUID:
			return failure(device.FailureReplaced, op, c)
		}
		err := do(g)
		var refusal *migmodel.RefusalError
		if errors.As(err, &refusal) {
			return failure(refusal.Code, op, c)
		}
		return err
	}
	return failure(device.FailureNotFound, op, c)
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
	return slices.ContainsFunc(n.gpus, func(g *gpu) bool { return !g.lost && g.Serves(uuid) })
}

// adminCreates creates a MIG instance as an admin would, at the placement that begins with slice
// start. It returns false if that is not possible.
func (g *gpu) adminCreates(start uint32) bool {
	if g.lost || !g.Enabled && g.ComputeMode != device.ComputeDefault {
		return false
	}
	on := g.Enabled
	g.Enabled = true
	in, err := g.CreateInstance(adminProfile, device.Placement{Start: start, Size: 2})
	if err == nil {
		_, err = g.CreateCompute(in.ID)
	}
	if err != nil {
		g.Enabled = on
		return false
	}
	g.adminInstances[in.ID], g.modeIsOurs = g.Instances[in.ID], false
	return true
}

func (g *gpu) name() string { return g.PCIAddress.WholeName() }

func (g *gpu) isAdmins(id uint32) bool {
	_, is := g.adminInstances[id]
	return is
}
