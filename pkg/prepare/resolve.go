package prepare

import (
	"context"
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// cardStates caches the state of each card that was read from the hardware. A cardStates is used
// only within one call that holds the GPUs' locks.
type cardStates struct {
	partitions Partitions
	states     map[device.Card]device.CardState
}

func newCardStates(p Partitions) *cardStates {
	return &cardStates{p, map[device.Card]device.CardState{}}
}

func (c *cardStates) get(ctx context.Context, card device.Card) (device.CardState, error) {
	if state, ok := c.states[card]; ok {
		return state, nil
	}
	state, err := c.partitions.Look(ctx, card)
	if err == nil {
		c.states[card] = state
	}
	return state, err
}

// invalidate removes a card's state from the cache. A caller that changed the card, or may have
// changed it, must call invalidate.
func (c *cardStates) invalidate(card device.Card) { delete(c.states, card) }

// resolve reads the hardware and plans the steps that provide each device, but changes no hardware.
// It reads a GPU that the claim wants as a whole only if the GPU's MIG mode may be enabled. The
// caller holds the GPUs' locks and has called checkConflicts.
func (p *Preparer) resolve(ctx context.Context, cards *cardStates, pl *plan) error {
	modes, err := p.disableModeSteps(ctx, cards, pl)
	if err != nil {
		return err
	}
	pl.steps, pl.spec = modes, &claimSpec{Clients: pl.sharing.clients}
	instances := map[string]*migInstance{}
	sharedInstances := map[string]*sharedStep{}
	for i := range pl.requests {
		req, d := &pl.requests[i], pl.record.Devices[i]
		req.instanceStep, req.existing, req.sharedInstance = nil, nil, nil
		if req.name.Partition == nil || d.AdminAccess {
			continue
		}
		if req.name.Share {
			if req.sharedInstance = sharedInstances[d.Device]; req.sharedInstance != nil {
				continue
			}
		}
		if err := p.resolvePartition(ctx, cards, req); err != nil {
			return withCause(CauseOf(err), "request %s: %w", d.Request, err)
		}
		if req.sharedInstance != nil {
			sharedInstances[d.Device] = req.sharedInstance
			pl.steps = append(pl.steps, req.sharedInstance)
		}
		if req.instanceStep != nil {
			instances[d.Device] = req.instanceStep
			pl.steps = append(pl.steps, req.instanceStep)
		}
	}
	for i := range pl.requests {
		req, d := &pl.requests[i], pl.record.Devices[i]
		if req.name.Partition == nil || !d.AdminAccess {
			continue
		}
		if req.instanceStep, req.sharedInstance = instances[d.Device], sharedInstances[d.Device]; req.creator() != nil {
			continue
		}
		if err := p.resolveAdmin(ctx, cards, req); err != nil {
			return withCause(CauseOf(err), "request %s: %w", d.Request, err)
		}
	}
	for _, s := range pl.sharing.steps() {
		pl.steps = append(pl.steps, s)
	}
	if len(pl.steps) == 0 {
		return nil
	}
	// The claim's record is saved right before the first step runs. So it can already say that this
	// step, which creates a MIG instance, is about to do so, and the step need not save the record
	// again.
	if first, ok := pl.steps[0].(*migInstance); ok {
		if state, err := cards.get(ctx, first.Card); err == nil && state.MIG.Enabled {
			first.recordBefore(state)
		}
	}
	return nil
}

// disableModeSteps returns steps that disable MIG mode on the GPUs of which the claim has the whole
// GPU or a share.
func (p *Preparer) disableModeSteps(ctx context.Context, cards *cardStates, pl *plan) ([]Step, error) {
	var steps []Step
	for i, req := range pl.requests {
		d := pl.record.Devices[i]
		if req.name.Partition != nil || d.AdminAccess {
			continue
		}
		step, err := p.resolveWhole(ctx, cards, req.gpu)
		if err != nil {
			return nil, withCause(CauseOf(err), "request %s: %w", d.Request, err)
		}
		if step != nil && !slices.ContainsFunc(steps, func(there Step) bool { return sameModeStep(there, step) }) {
			steps = append(steps, step)
		}
	}
	return steps, nil
}

// sameModeStep reports whether both steps disable MIG mode on the same GPU. If the claim has
// several shares of a GPU, each share adds such a step.
func sameModeStep(a, b Step) bool {
	x, ok := a.(*migModeOff)
	y, too := b.(*migModeOff)
	return ok && too && x.GPU == y.GPU
}

func (p *Preparer) resolveWhole(ctx context.Context, cards *cardStates, g device.GPU) (Step, error) {
	name := g.WholeName()
	marked, err := p.Records.Marked(name)
	if err != nil {
		return nil, withCause(CauseRecord, "%w", err)
	}
	if !marked && (g.MIG == nil || !g.MIG.Enabled) {
		return nil, nil
	}
	state, err := cards.get(ctx, g.Card())
	if err != nil {
		return nil, stepError(err)
	}
	switch {
	case !state.MIG.Enabled:
		if err := p.Records.Unmark(name); err != nil {
			return nil, withCause(CauseRecord, "%w", err)
		}
		return nil, checkDeviceNode(name, g.Minor, state.Minor)
	case len(state.MIG.Instances) > 0:
		return nil, withCause(CauseDevice,
			"%s cannot be used whole: it has %s, which no claim of this driver created: remove them (nvidia-smi mig), or delete the claim's Pods "+
				"to have it allocated elsewhere",
			name, describeInstances(state.MIG.Instances...))
	case g.MIG != nil && g.MIG.ModeFixed:
		return nil, withCause(CauseDevice, "%s cannot be used whole: MIG mode is enabled, and only a GPU reset can disable it", name)
	}
	return &migModeOff{GPU: name, Card: g.Card(), Minor: g.Minor}, nil
}

// resolvePartition finds the partition for the request: one that other claims already share, or one
// that an admin created. Otherwise it plans a step that creates the partition.
func (p *Preparer) resolvePartition(ctx context.Context, cards *cardStates, req *deviceRequest) error {
	if req.name.Share {
		if joined, err := p.resolveShared(req); joined || err != nil {
			return err
		}
	}
	state, in, found, err := p.instanceAtPlace(ctx, cards, req)
	if err != nil {
		return err
	}
	if !found {
		if req.instanceStep, err = p.planInstance(req, state); err != nil || !req.name.Share {
			return err
		}
		req.sharedInstance, err = newSharedStep(req.name.Unshared().String(), []string{req.name.GPU}, req.instanceStep)
		req.instanceStep = nil
		return err
	}
	owned, err := p.OwnedInstances(req.name.GPU, []device.Instance{in})
	if err != nil {
		return err
	}
	if len(owned) > 0 {
		return withCause(CauseHeld, "device %s: %s was created for another claim and still exists: wait until that claim's Pods have ended",
			req.name, describeInstances(in))
	}
	if _, known := inInventory(p.Hardware.Snapshot(), req.name.GPU, in); !known {
		return withCause(CauseNotReady,
			"device %s: %s appeared at its placement, which no claim of this driver created: the claim can use it as it is once the inventory has "+
				"seen it, within seconds", req.name, describeInstances(in))
	}
	req.existing, err = findPartition(req.name, in)
	return err
}

// partitionKey returns the key of the file that lists the claims which share the partition.
func partitionKey(name device.Name) string {
	return sharedKey(name.Unshared().String(), migInstanceKind)
}

// resolveShared lets the claim join the claims that share the partition. It returns joined false if
// no claim has shared this partition in this boot, so that no file lists such claims.
func (p *Preparer) resolveShared(req *deviceRequest) (joined bool, err error) {
	s := &sharedStep{Key: partitionKey(req.name), GPUs: []string{req.name.GPU}}
	h, found, err := p.Records.Holder(s.Key)
	if err != nil {
		return false, s.unreadableError(err)
	}
	if !found || h.BootID != p.BootID {
		return false, nil
	}
	inner, err := decodeSharable(h.Step)
	if err != nil {
		return false, withCause(CauseRecord, "file of shared setting %s: %w", s.Key, err)
	}
	m, ok := inner.(*migInstance)
	if !ok {
		return false, withCause(CauseRecord, "the file of shared MIG instance %s has a step of kind %s instead", s.Key, inner.Kind())
	}
	m.assumeDefaults()
	m.Card, m.Minor = req.gpu.Card(), req.gpu.Minor
	req.sharedInstance, err = newSharedStep(req.name.Unshared().String(), s.GPUs, m)
	return true, err
}

// resolveAdmin finds the existing MIG instance for a request with admin access, whichever claim
// uses it.
func (p *Preparer) resolveAdmin(ctx context.Context, cards *cardStates, req *deviceRequest) error {
	_, in, found, err := p.instanceAtPlace(ctx, cards, req)
	if err != nil {
		return err
	}
	if !found {
		return withCause(CauseDevice, "device %s does not exist now, and admin access does not create it: it exists while a claim uses it",
			req.name)
	}
	req.existing, err = findPartition(req.name, in)
	return err
}

// instanceAtPlace reads the GPU's state and looks for the GPU instance with the requested profile
// and placement. found reports whether there is one.
func (p *Preparer) instanceAtPlace(ctx context.Context, cards *cardStates, req *deviceRequest) (state device.CardState, in device.Instance,
	found bool, err error) {
	state, err = cards.get(ctx, req.gpu.Card())
	if err != nil {
		return state, in, false, stepError(err)
	}
	if err := checkDeviceNode(req.name.GPU, req.gpu.Minor, state.Minor); err != nil {
		return state, in, false, err
	}
	for _, in := range state.MIG.Instances {
		if in.ProfileID == req.name.Partition.ProfileID && in.Placement.Start == req.name.Partition.Start {
			return state, in, true, nil
		}
	}
	return state, in, false, nil
}

// findPartition returns the compute instance of the device called name in GPU instance in, which
// this driver did not create.
func findPartition(name device.Name, in device.Instance) (*partition, error) {
	if c, ok := in.Part(*name.Partition); ok {
		return &partition{in, c}, nil
	}
	return nil, withCause(CauseDevice, "device %s does not exist: its placement has %s", name, describeInstances(in))
}

// planInstance returns the step that creates the partition. It returns an error if the GPU does not
// support the partition or the placement is taken.
func (p *Preparer) planInstance(req *deviceRequest, state device.CardState) (*migInstance, error) {
	refuse := func(format string, args ...any) (*migInstance, error) {
		return nil, withCause(CauseDevice, "device %s does not exist and cannot be created: "+format, append([]any{req.name}, args...)...)
	}
	g, place := req.gpu, req.name.Partition
	if place.Compute != nil {
		return refuse("its compute instance is gone")
	}
	if g.MIG == nil {
		return refuse("%s has no MIG", req.name.GPU)
	}
	profile, known := g.Profile(place.ProfileID)
	switch {
	case g.MIG.ReadOnly:
		return refuse("the MIG instances of %s cannot be changed on this machine", req.name.GPU)
	case !known || !slices.Contains(profile.Starts, place.Start):
		return refuse("%s has no profile %d that starts at %d", req.name.GPU, place.ProfileID, place.Start)
	case !state.MIG.Enabled && g.MIG.ModeFixed:
		return refuse("MIG mode of %s is disabled, and only a GPU reset can enable it", req.name.GPU)
	}
	s := &migInstance{
		Device: req.name.Unshared().String(), GPU: req.name.GPU, Card: g.Card(), Minor: g.Minor, ProfileID: profile.ID, Profile: profile.Name,
		Placement: device.Placement{Start: place.Start, Size: profile.Size},
	}
	if taken := overlapping(state.MIG.Instances, s.Placement); len(taken) > 0 {
		return nil, s.placeTaken(taken)
	}
	return s, nil
}

// mayBePresent reports whether the card may still be in the node. It does not use Snapshot.Ready: a
// node without cards is never ready, and a failed scan keeps the last result.
func mayBePresent(s inventory.Snapshot, card device.Card) bool {
	for _, g := range s.Node.GPUs {
		if g.Card() == card {
			return true
		}
	}
	return !s.Known
}
