package prepare

import (
	"context"
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// looks asks each card once, until it is changed. It lives no longer than a call that holds the GPUs' locks.
type looks struct {
	partitions Partitions
	states     map[device.Card]device.CutState
}

func newLooks(p Partitions) *looks {
	return &looks{p, map[device.Card]device.CutState{}}
}

func (l *looks) at(ctx context.Context, c device.Card) (device.CutState, error) {
	if state, ok := l.states[c]; ok {
		return state, nil
	}
	state, err := l.partitions.Look(ctx, c)
	if err == nil {
		l.states[c] = state
	}
	return state, err
}

// forget is called when the card may not be any more what it was.
func (l *looks) forget(c device.Card) { delete(l.states, c) }

// resolve decides, by a look at the hardware, how each device is had. The caller holds the GPUs' locks, and nobody else holds the devices. It changes
// nothing but a mark that is out of date. A GPU that is wanted whole is asked only if its MIG mode may be on.
func (p *Preparer) resolve(ctx context.Context, looks *looks, w *plan) error {
	modes, err := p.wholes(ctx, looks, w)
	if err != nil {
		return err
	}
	w.steps, w.spec = modes, &claimSpec{Clients: w.sharing.clients}
	cuts := map[string]*migInstance{}
	parts := map[string]*shared{}
	for i := range w.wants {
		t, d := &w.wants[i], w.record.Devices[i]
		t.cut, t.found, t.shared = nil, nil, nil
		if t.name.Partition == nil || d.AdminAccess {
			continue
		}
		if t.name.Share {
			if t.shared = parts[d.Device]; t.shared != nil {
				continue
			}
		}
		if err := p.resolvePartition(ctx, looks, t); err != nil {
			return because(CauseOf(err), "request %s: %w", d.Request, err)
		}
		if t.shared != nil {
			parts[d.Device] = t.shared
			w.steps = append(w.steps, t.shared)
		}
		if t.cut != nil {
			cuts[d.Device] = t.cut
			w.steps = append(w.steps, t.cut)
		}
	}
	for i := range w.wants {
		t, d := &w.wants[i], w.record.Devices[i]
		if t.name.Partition == nil || !d.AdminAccess {
			continue
		}
		if t.cut, t.shared = cuts[d.Device], parts[d.Device]; t.made() != nil {
			continue
		}
		if err := p.resolveAdmin(ctx, looks, t); err != nil {
			return because(CauseOf(err), "request %s: %w", d.Request, err)
		}
	}
	for _, s := range w.sharing.steps() {
		w.steps = append(w.steps, s)
	}
	if len(w.steps) == 0 {
		return nil
	}
	// What comes first comes right after the record: it can stand in it already.
	if first, ok := w.steps[0].(*migInstance); ok {
		if state, err := looks.at(ctx, first.Card); err == nil && state.MIG.Enabled {
			first.expect(state)
		}
	}
	return nil
}

// wholes are the steps that make GPUs whole which are wanted so.
func (p *Preparer) wholes(ctx context.Context, looks *looks, w *plan) ([]Step, error) {
	var steps []Step
	for i, t := range w.wants {
		d := w.record.Devices[i]
		if t.name.Partition != nil || d.AdminAccess {
			continue
		}
		step, err := p.resolveWhole(ctx, looks, t.gpu)
		if err != nil {
			return nil, because(CauseOf(err), "request %s: %w", d.Request, err)
		}
		if step != nil && !slices.ContainsFunc(steps, func(there Step) bool { return sameMode(there, step) }) {
			steps = append(steps, step)
		}
	}
	return steps, nil
}

// sameMode is true for two steps about one GPU, of which a claim may hold several shares.
func sameMode(a, b Step) bool {
	x, ok := a.(*migModeOff)
	y, too := b.(*migModeOff)
	return ok && too && x.GPU == y.GPU
}

func (p *Preparer) resolveWhole(ctx context.Context, looks *looks, g device.GPU) (Step, error) {
	name := g.WholeName()
	marked, err := p.Records.Marked(name)
	if err != nil {
		return nil, because(CauseRecord, "%w", err)
	}
	if !marked && (g.MIG == nil || !g.MIG.Enabled) {
		return nil, nil
	}
	state, err := looks.at(ctx, g.Card())
	if err != nil {
		return nil, stepError(err)
	}
	switch {
	case !state.MIG.Enabled:
		if err := p.Records.Unmark(name); err != nil {
			return nil, because(CauseRecord, "%w", err)
		}
		return nil, sameNode(name, g.Minor, state.Minor)
	case len(state.MIG.Instances) > 0:
		return nil, because(CauseDevice, "%s cannot be had whole: it is cut into %s, which no claim of this driver has made: remove them (nvidia-smi mig), or delete the claim's Pods to have it allocated elsewhere",
			name, describe(state.MIG.Instances...))
	case g.MIG != nil && g.MIG.ModeFixed:
		return nil, because(CauseDevice, "%s cannot be had whole: MIG mode is on, and only a reset of the GPU turns it off", name)
	}
	return &migModeOff{GPU: name, Card: g.Card(), Minor: g.Minor}, nil
}

// resolvePartition finds the device as someone else has cut it, or plans to cut it.
func (p *Preparer) resolvePartition(ctx context.Context, looks *looks, t *want) error {
	if t.name.Share {
		if joined, err := p.resolveShared(t); joined || err != nil {
			return err
		}
	}
	state, in, there, err := p.at(ctx, looks, t)
	if err != nil {
		return err
	}
	if !there {
		if t.cut, err = p.cut(t, state); err != nil || !t.name.Share {
			return err
		}
		t.shared, err = share(t.name.Unshared().String(), []string{t.name.GPU}, t.cut)
		t.cut = nil
		return err
	}
	owned, err := p.Explained(t.name.GPU, []device.Instance{in})
	if err != nil {
		return err
	}
	if len(owned) > 0 {
		return because(CauseHeld, "device %s: %s is there for another claim", t.name, describe(in))
	}
	if _, known := listed(p.Hardware.Snapshot(), t.name.GPU, in); !known {
		return because(CauseNotReady, "device %s: %s has appeared at its place, which no claim of this driver has made: it can be used as it is when the inventory has seen it, within seconds", t.name, describe(in))
	}
	t.found, err = part(t.name, in)
	return err
}

// partKey is that of the instance that claims share.
func partKey(name device.Name) string { return sharedKey(name.Unshared().String(), migInstanceKind) }

// resolveShared joins those who share a partition that was made for them.
func (p *Preparer) resolveShared(t *want) (joined bool, err error) {
	s := &shared{Key: partKey(t.name), GPUs: []string{t.name.GPU}}
	h, found, err := p.Records.Holder(s.Key)
	if err != nil {
		return false, s.unreadable(err)
	}
	if !found || h.BootID != p.BootID {
		return false, nil
	}
	inner, err := sharableOf(h.Step)
	if err != nil {
		return false, because(CauseRecord, "what is held as %s: %w", s.Key, err)
	}
	m, ok := inner.(*migInstance)
	if !ok {
		return false, because(CauseRecord, "what is held as %s is no instance: its file has a step of kind %s", s.Key, inner.Kind())
	}
	m.unknown()
	m.Card, m.Minor = t.gpu.Card(), t.gpu.Minor
	t.shared, err = share(t.name.Unshared().String(), s.GPUs, m)
	return true, err
}

// resolveAdmin finds the device, whoever holds it.
func (p *Preparer) resolveAdmin(ctx context.Context, looks *looks, t *want) error {
	_, in, there, err := p.at(ctx, looks, t)
	if err != nil {
		return err
	}
	if !there {
		return because(CauseDevice, "device %s does not exist now, and admin access makes nothing: it is there while a claim holds it", t.name)
	}
	t.found, err = part(t.name, in)
	return err
}

// at looks at the device's place.
func (p *Preparer) at(ctx context.Context, looks *looks, t *want) (state device.CutState, in device.Instance, there bool, err error) {
	state, err = looks.at(ctx, t.gpu.Card())
	if err != nil {
		return state, in, false, stepError(err)
	}
	if err := sameNode(t.name.GPU, t.gpu.Minor, state.Minor); err != nil {
		return state, in, false, err
	}
	for _, in := range state.MIG.Instances {
		if in.ProfileID == t.name.Partition.ProfileID && in.Placement.Start == t.name.Partition.Start {
			return state, in, true, nil
		}
	}
	return state, in, false, nil
}

// part finds the device's compute instance in a GPU instance that someone else has cut.
func part(name device.Name, in device.Instance) (*partition, error) {
	if c, ok := in.Part(*name.Partition); ok {
		return &partition{in, c}, nil
	}
	return nil, because(CauseDevice, "device %s is not there (any more): at its place is %s", name, describe(in))
}

// cut plans the making of a partition, if the GPU can be cut and the place is free.
func (p *Preparer) cut(t *want, state device.CutState) (*migInstance, error) {
	refuse := func(format string, args ...any) (*migInstance, error) {
		return nil, because(CauseDevice, "device %s does not exist and cannot be made: "+format, append([]any{t.name}, args...)...)
	}
	g, place := t.gpu, t.name.Partition
	if place.Compute != nil {
		return refuse("the compute instance that it was is gone")
	}
	if g.MIG == nil {
		return refuse("%s has no MIG", t.name.GPU)
	}
	profile, known := g.Profile(place.ProfileID)
	switch {
	case g.MIG.Uncuttable:
		return refuse("in this machine the instances of %s can be used and not changed", t.name.GPU)
	case !known || !slices.Contains(profile.Starts, place.Start):
		return refuse("%s has no profile %d that begins at %d", t.name.GPU, place.ProfileID, place.Start)
	case !state.MIG.Enabled && g.MIG.ModeFixed:
		return refuse("MIG mode of %s is off, and only a reset of the GPU turns it on", t.name.GPU)
	}
	s := &migInstance{
		Device: t.name.Unshared().String(), GPU: t.name.GPU, Card: g.Card(), Minor: g.Minor, ProfileID: profile.ID, Profile: profile.Name,
		Placement: device.Placement{Start: place.Start, Size: profile.Size},
	}
	if taken := overlapping(state.MIG.Instances, s.Placement); len(taken) > 0 {
		return nil, s.taken(taken)
	}
	return s, nil
}

// present says whether the card may still be there, as far as the inventory knows. Whether it may be offered says nothing about that: a node all of whose
// cards are gone offers none, and an inventory that cannot look goes by what it last saw.
func present(s inventory.Snapshot, card device.Card) bool {
	for _, g := range s.Node.GPUs {
		if g.Card() == card {
			return true
		}
	}
	return !s.Known
}
