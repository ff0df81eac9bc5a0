package prepare

import (
	"context"
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// resolvePartitions reads the hardware and plans the steps that create the claim's partitions. It
// changes no hardware. The caller holds the GPUs' locks and has called checkConflicts.
func (p *Preparer) resolvePartitions(ctx context.Context, env *steps.Env, pl *plan) error {
	creators := map[string]steps.Creator{}
	for i := range pl.requests {
		req, d := &pl.requests[i], pl.record.Devices[i]
		if req.name.Partition == nil {
			continue
		}
		req.existing = nil
		if req.creator = creators[d.Device]; req.creator != nil {
			continue // another request has a share of the same partition
		}
		if err := p.resolvePartition(ctx, env, req, d.AdminAccess); err != nil {
			return cause.Errorf(cause.Of(err), "request %s: %w", d.Request, err)
		}
		if req.creator != nil {
			creators[d.Device] = req.creator
			pl.steps = append(pl.steps, req.creator)
		}
	}
	return nil
}

// leaveMIGMode disables the GPU's MIG mode, if it is enabled and the GPU has no instances.
func (p *Preparer) leaveMIGMode(ctx context.Context, env *steps.Env, g device.GPU) error {
	name := g.WholeName()
	state, err := env.CardState(ctx, g.Card())
	switch {
	case err != nil:
	case !state.MIG.Enabled:
		err = cause.Wrap(cause.Record, p.node.Records.Unmark(name))
	case len(state.MIG.Instances) > 0:
		return cause.Errorf(cause.Device,
			"%s cannot be used whole: it has %s, which no claim of this driver created: remove them (nvidia-smi mig), or delete the claim's Pods "+
				"to have it allocated elsewhere",
			name, steps.DescribeInstances(state.MIG.Instances...))
	case g.MIG != nil && g.MIG.ModeFixed:
		return cause.Errorf(cause.Device, "%s cannot be used whole: MIG mode is enabled, and only a GPU reset can disable it", name)
	default:
		state, err = steps.DisableMIGMode(ctx, env, g.Card(), name)
	}
	if err != nil {
		return cause.OrStep(err)
	}
	return steps.CheckDeviceNode(name, g.Minor, state.Minor)
}

// resolvePartition finds the partition for the request: one that other claims already share, or one
// that an admin created. Otherwise it plans a step that creates the partition. For admin access it
// only finds an existing partition, whichever claim uses it.
func (p *Preparer) resolvePartition(ctx context.Context, env *steps.Env, req *deviceRequest, admin bool) error {
	if req.name.Share && !admin {
		joined, err := steps.JoinInstance(p.node.Records, p.node.BootID, req.name, req.gpu.Card(), req.gpu.Minor)
		if err != nil {
			return err
		}
		if joined != nil {
			req.creator = joined
			return nil
		}
	}
	state, in, found, err := p.instanceAtPlace(ctx, env, req)
	if err != nil {
		return err
	}
	switch {
	case admin && !found:
		return cause.Errorf(cause.Device, "device %s does not exist now, and admin access does not create it: it exists while a claim uses it",
			req.name)
	case admin:
		req.existing, err = findPartition(req.name, in)
		return err
	case !found:
		m, err := p.planInstance(req, state)
		if err != nil {
			return err
		}
		req.creator = m
		if req.name.Share {
			req.creator, err = steps.NewShared(req.name.Unshared().String(), []string{req.name.GPU}, m)
		}
		return err
	}
	owned, err := p.opts.Ledger.OwnedInstances(req.name.GPU, []device.Instance{in})
	if err != nil {
		return err
	}
	if len(owned) > 0 {
		return cause.Errorf(cause.Held, "device %s: %s was created for another claim and still exists: wait until that claim's Pods have ended",
			req.name, steps.DescribeInstances(in))
	}
	if !inInventory(req, in) {
		return cause.Errorf(cause.NotReady,
			"device %s: %s appeared at its placement, which no claim of this driver created: the claim can use it as it is once the inventory has "+
				"seen it, within seconds", req.name, steps.DescribeInstances(in))
	}
	req.existing, err = findPartition(req.name, in)
	return err
}

// instanceAtPlace reads the GPU's state and looks for the GPU instance with the requested profile
// and placement. found reports whether there is one.
func (p *Preparer) instanceAtPlace(ctx context.Context, env *steps.Env, req *deviceRequest) (
	state device.CardState, in device.Instance, found bool, err error,
) {
	state, err = env.CardState(ctx, req.gpu.Card())
	if err != nil {
		return state, in, false, cause.OrStep(err)
	}
	if err := steps.CheckDeviceNode(req.name.GPU, req.gpu.Minor, state.Minor); err != nil {
		return state, in, false, err
	}
	for _, in := range state.MIG.Instances {
		if in.Contains(*req.name.Partition) {
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
	return nil, cause.Errorf(cause.Device, "device %s does not exist: its placement has %s", name, steps.DescribeInstances(in))
}

// planInstance returns the step that creates the partition. It returns an error if the GPU does not
// support the partition or the placement is taken.
func (p *Preparer) planInstance(req *deviceRequest, state device.CardState) (*steps.MIGInstance, error) {
	refuse := func(format string, args ...any) (*steps.MIGInstance, error) {
		return nil, cause.Errorf(cause.Device, "device %s does not exist and cannot be created: "+format, append([]any{req.name}, args...)...)
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
	s := &steps.MIGInstance{
		Device: req.name.Unshared().String(), GPU: req.name.GPU, Card: g.Card(), Minor: g.Minor, ProfileID: profile.ID, Profile: profile.Name,
		Placement: device.Placement{Start: place.Start, Size: profile.Size},
	}
	if taken := steps.Overlapping(state.MIG.Instances, s.Placement); len(taken) > 0 {
		return nil, s.PlaceTaken(taken)
	}
	return s, nil
}

// inInventory reports whether the inventory, which may be out of date, has the instance on the GPU.
func inInventory(req *deviceRequest, in device.Instance) bool {
	return req.gpu.MIG != nil && slices.ContainsFunc(req.gpu.MIG.Instances, func(there device.Instance) bool {
		return steps.SameInstance(in, there) && slices.EqualFunc(in.Compute, there.Compute, steps.SameCompute)
	})
}
