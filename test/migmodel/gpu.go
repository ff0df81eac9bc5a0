package migmodel

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/models"
)

// GPU is one GPU. A test may read and set every field, for example to do what an admin does. The
// GPU has no lock of its own.
type GPU struct {
	device.Card
	Minor int
	MIG   *model.MIG

	Enabled    bool // MIG mode
	NeedsReset bool // to change the MIG mode
	Instances  map[uint32]device.Instance
	// Busy says how often destroying the GPU instance with this ID still fails, because a process
	// uses it.
	Busy map[uint32]int
	// Open are processes that have the GPU open, so that its MIG mode cannot change.
	Open []nvidia.Process

	ComputeMode  device.ComputeMode
	TimeSlice    device.TimeSlice
	NoTimeSlices bool

	// LowestIDs gives each new GPU instance the lowest free ID. Drivers derive the ID from the
	// placement, but promise nothing. With LowestIDs, tests see more IDs that are reused.
	LowestIDs bool
	// Describe, if set, changes what a new GPU instance or compute instance reports of itself, such as
	// its UUID and minor numbers, which by default follow from the IDs.
	Describe func(*device.Instance)
}

// H100 returns the model file of an H100.
func H100() *model.GPU {
	m, err := models.Read("h100-sxm5-80gb")
	if err != nil {
		panic(err)
	}
	return m
}

// New returns a GPU of a model, with MIG mode off.
func New(m *model.GPU, card device.Card, minor int) *GPU {
	return &GPU{
		Card: card, Minor: minor, MIG: &m.MIG, NeedsReset: m.MIG.NeedsReset.Value, Instances: map[uint32]device.Instance{},
		Busy: map[uint32]int{}, ComputeMode: device.ComputeDefault,
	}
}

// Profiles returns the profiles of a GPU model with these IDs, or all of them, as a scan reports
// them.
func Profiles(m *model.GPU, ids ...uint32) []device.Profile {
	var all []device.Profile
	for _, p := range m.MIG.Profiles {
		if len(ids) > 0 && !slices.Contains(ids, p.ID) {
			continue
		}
		all = append(all, device.Profile{
			ID: p.ID, Name: nameOf(p), Slices: p.Slices, MaxInstances: p.InstancesMax, MemoryBytes: p.MemoryMiB << 20,
			Engines: device.Engines{
				Multiprocessors: p.SM, CopyEngines: p.CopyEngines, Decoders: p.Decoders, Encoders: p.Encoders, JPEGEngines: p.JPEGEngines,
				OFAEngines: p.OFAEngines,
			},
			Size: p.Placements.Size, Starts: slices.Sorted(slices.Values(p.Placements.Starts)),
		})
	}
	slices.SortFunc(all, func(a, b device.Profile) int { return cmp.Compare(a.ID, b.ID) })
	return all
}

func nameOf(p model.Profile) string { return strings.TrimPrefix(p.Name, "MIG ") }

// RefusalError is the error of a call that the GPU refused. It changed nothing.
type RefusalError struct {
	Code      device.FailureCode
	Processes []nvidia.Process
}

func (r *RefusalError) Error() string {
	text := string(r.Code)
	for _, p := range r.Processes {
		text += ", " + p.String()
	}
	return text
}

// FailureCode returns r.Code.
func (r *RefusalError) FailureCode() device.FailureCode { return r.Code }

// State returns what package cut reads from the GPU.
func (g *GPU) State() device.CardState {
	return device.CardState{
		Minor: g.Minor, ComputeMode: g.ComputeMode,
		MIG: device.MIG{Enabled: g.Enabled, Pending: g.Enabled, Instances: g.instances()},
	}
}

func (g *GPU) instances() []device.Instance {
	var all []device.Instance
	for _, id := range slices.Sorted(maps.Keys(g.Instances)) {
		all = append(all, g.Instances[id])
	}
	return all
}

// Reset does what a GPU reset or a reload of the driver does. A GPU that needs a reset to change
// its MIG mode keeps the mode.
func (g *GPU) Reset() {
	g.RemoveInstances()
	g.Enabled = g.Enabled && g.NeedsReset
	g.ForgetSettings()
}

// RemoveInstances removes all MIG instances, whatever uses them.
func (g *GPU) RemoveInstances() {
	clear(g.Instances)
	clear(g.Busy)
}

// ForgetSettings sets the compute mode and the time slice to the driver's defaults.
func (g *GPU) ForgetSettings() {
	g.ComputeMode, g.TimeSlice = device.ComputeDefault, device.TimeSliceDefault
}

// SetMode changes the MIG mode.
func (g *GPU) SetMode(on bool) error {
	switch {
	case g.Enabled == on:
		return nil
	case len(g.Instances) > 0 || len(g.Open) > 0:
		return &RefusalError{device.FailureInUse, g.Open}
	case g.NeedsReset:
		return &RefusalError{Code: device.FailureReset}
	}
	g.Enabled, g.ComputeMode = on, device.ComputeDefault
	return nil
}

// CreateInstance creates a GPU instance at a placement.
func (g *GPU) CreateInstance(profileID uint32, at device.Placement) (device.Instance, error) {
	p, known := g.MIG.Profile(profileID)
	if !g.Enabled || !known || p.Placements.Size != at.Size || !slices.Contains(p.Placements.Starts, at.Start) {
		return device.Instance{}, &RefusalError{Code: device.FailureNotSupported}
	}
	places := []model.Place{{Profile: profileID, Start: at.Start}}
	for _, in := range g.Instances {
		places = append(places, model.Place{Profile: in.ProfileID, Start: in.Placement.Start})
	}
	if !g.MIG.Holds(places...) {
		return device.Instance{}, &RefusalError{Code: device.FailureInsufficient}
	}
	in := device.Instance{ID: g.newID(at), ProfileID: profileID, Placement: at}
	in.Minor = g.minorOf(in.ID)
	if g.Describe != nil {
		g.Describe(&in)
	}
	g.Instances[in.ID] = in
	return in, nil
}

// minorOf returns the minor number of a GPU instance's capability device node. The driver reserves
// nine numbers for each of 15 GPU instances of a GPU.
func (g *GPU) minorOf(id uint32) int { return 3 + (15*g.Minor+int(id))*9 }

// newID returns the ID of a new GPU instance. The driver's IDs follow the share of the memory: the
// whole has 0, halves 1 and 2, quarters 3 to 6, eighths 7 to 14, each in the order of placements.
// If that ID is taken, it is the next one that is free.
func (g *GPU) newID(at device.Placement) uint32 {
	id := uint32(1)
	for parts := uint32(8); parts >= 1 && !g.LowestIDs; parts /= 2 {
		if span := g.MIG.MemorySlices / parts; span >= at.Size {
			id = parts - 1
			if usual := id + at.Start/span; !g.has(usual) {
				return usual
			}
			break
		}
	}
	for g.has(id) {
		id++
	}
	return id
}

func (g *GPU) has(id uint32) bool {
	_, has := g.Instances[id]
	return has
}

// CreateCompute creates the compute instance that fills a GPU instance.
func (g *GPU) CreateCompute(id uint32) (device.Instance, error) {
	in, there := g.Instances[id]
	if !there {
		return device.Instance{}, &RefusalError{Code: device.FailureNotFound}
	}
	if len(in.Compute) > 0 {
		return device.Instance{}, &RefusalError{Code: device.FailureInsufficient}
	}
	p, _ := g.MIG.Profile(in.ProfileID)
	in.Compute = []device.ComputeInstance{{
		ProfileID: g.filling(p), Placement: device.Placement{Size: p.Slices}, Name: nameOf(p), Multiprocessors: p.SM,
		UUID: fmt.Sprintf("MIG-%s-%d-0", g.UUID, id), Minor: in.Minor + 1,
	}}
	if g.Describe != nil {
		g.Describe(&in)
	}
	g.Instances[id] = in
	return in, nil
}

// filling returns the ID of the compute instance profile that fills a GPU instance: the last one of
// those for its number of slices, unless the model file names another one.
func (g *GPU) filling(p model.Profile) uint32 {
	if p.WholeComputeProfile.Known {
		return p.WholeComputeProfile.Value
	}
	of := g.MIG.Compute.PerGPUInstance[fmt.Sprintf("%dg", p.Slices)].Profiles
	return of[len(of)-1].ID
}

// DestroyCompute removes the compute instances of the GPU instance want. It succeeds if there is
// none.
func (g *GPU) DestroyCompute(want device.Instance) error {
	in, gone, err := g.destroyable(want)
	if gone || err != nil {
		return err
	}
	in.Compute = nil
	g.Instances[want.ID] = in
	return nil
}

// DestroyInstance removes the GPU instance want, which must have no compute instance any more. It
// succeeds if there is none.
func (g *GPU) DestroyInstance(want device.Instance) error {
	in, gone, err := g.destroyable(want)
	if gone || err != nil {
		return err
	}
	if len(in.Compute) > 0 {
		return &RefusalError{Code: device.FailureInUse}
	}
	delete(g.Instances, want.ID)
	return nil
}

// destroyable returns the GPU instance with the ID of want. gone says that there is none. If there
// is another one than want, or a process uses it, it returns an error.
func (g *GPU) destroyable(want device.Instance) (in device.Instance, gone bool, err error) {
	in, there := g.Instances[want.ID]
	switch {
	case !g.Enabled || !there:
		return in, true, nil
	case in.ProfileID != want.ProfileID || in.Placement != want.Placement,
		len(want.Compute) > 0 && len(in.Compute) > 0 && in.Compute[0].UUID != want.Compute[0].UUID:
		return in, false, &RefusalError{Code: device.FailureChanged}
	case g.Busy[want.ID] > 0:
		g.Busy[want.ID]--
		return in, false, &RefusalError{device.FailureInUse, []nvidia.Process{{PID: 77, Name: "python"}}}
	}
	return in, false, nil
}

// SetComputeMode sets how many processes may use the GPU. MIG mode has no exclusive mode.
func (g *GPU) SetComputeMode(mode device.ComputeMode) error {
	if g.Enabled && mode == device.ComputeExclusiveProcess {
		return &RefusalError{Code: device.FailureNotSupported}
	}
	g.ComputeMode = mode
	return nil
}

// ReadTimeSlice reads the time slice.
func (g *GPU) ReadTimeSlice() (device.TimeSlice, error) {
	if g.NoTimeSlices {
		return 0, &RefusalError{Code: device.FailureNotSupported}
	}
	return g.TimeSlice, nil
}

// SetTimeSlice sets the time slice. The MIG mode does not change it.
func (g *GPU) SetTimeSlice(to device.TimeSlice) error {
	if g.NoTimeSlices {
		return &RefusalError{Code: device.FailureNotSupported}
	}
	g.TimeSlice = to
	return nil
}

// Serves reports whether an MPS daemon could use the device with this UUID: this GPU in exclusive
// mode, or one of its MIG devices.
func (g *GPU) Serves(uuid string) bool {
	if g.UUID == uuid {
		return !g.Enabled && g.ComputeMode == device.ComputeExclusiveProcess
	}
	for _, in := range g.Instances {
		if slices.ContainsFunc(in.Compute, func(c device.ComputeInstance) bool { return c.UUID == uuid }) {
			return true
		}
	}
	return false
}
