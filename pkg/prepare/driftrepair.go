package prepare

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// driftCheck is a function that returns an error if a partition with which the claim was prepared
// no longer exists. Some implementations also recreate missing partitions.
type driftCheck func(ctx context.Context, env *steps.Env, pl *plan) error

// ErrNotInInventory means that the inventory lacks a partition of the claim.
var ErrNotInInventory = errors.New("the inventory does not have all partitions of the claim")

// checkInventory looks for the claim's partitions in the inventory, which may be out of date. It
// reads no hardware. If a partition is missing, it returns ErrNotInInventory.
func (p *Preparer) checkInventory(_ context.Context, _ *steps.Env, pl *plan) error {
	if pl.snapshot.Failure != "" {
		return ErrNotInInventory
	}
	for i := range pl.requests {
		req := &pl.requests[i]
		if req.name.Partition == nil {
			continue
		}
		if req.gpu.MIG == nil || !req.findIntact(pl.record.Devices[i], req.gpu.MIG.Instances) {
			return ErrNotInInventory
		}
	}
	return nil
}

// restorePartitions reads the hardware and recreates the claim's lost partitions at their
// placements, for example after a GPU reset. Until that succeeds, the claim has no CDI spec. A
// partition is reported lost only if retrying cannot help. The caller holds the GPUs' locks.
func (p *Preparer) restorePartitions(ctx context.Context, env *steps.Env, pl *plan) error {
	for i := range pl.requests {
		req, d := &pl.requests[i], pl.record.Devices[i]
		if req.name.Partition == nil {
			continue
		}
		state, err := env.CardState(ctx, req.gpu.Card())
		if err != nil {
			return cause.OrStep(err)
		}
		if err := steps.CheckDeviceNode(req.name.GPU, req.gpu.Minor, state.Minor); err != nil {
			return err
		}
		if req.findIntact(d, state.MIG.Instances) {
			continue
		}
		if err := p.restorePartition(ctx, env, pl, req, d, state); err != nil {
			return err
		}
	}
	return nil
}

// restorePartition recreates a partition that no longer exists, or that another MIG instance
// replaced.
func (p *Preparer) restorePartition(
	ctx context.Context, env *steps.Env, pl *plan, req *deviceRequest, d checkpoint.Device, state device.CardState,
) error {
	if req.creator == nil {
		return p.markLost(pl, d, fmt.Errorf("it was created outside this driver and is gone, and its GPU now has: %s",
			steps.DescribeInstances(state.MIG.Instances...)))
	}
	klog.FromContext(ctx).Info("Recreating lost partition of a claim", "claim", klog.KRef(pl.record.Namespace, pl.record.Name), "device",
		d.Device)
	// Remove the old spec first: its device nodes may belong to another claim's partition by now.
	if err := p.node.Specs.RemoveClaim(pl.record.ClaimUID); err != nil {
		return cause.Wrap(cause.Step, err)
	}
	err := recreatePartition(ctx, env, req)
	switch {
	case err == nil:
		Repair{"lost-partition", "Recreated lost partition of a claim",
			pl.record.Namespace + "/" + pl.record.Name + " " + d.Device}.Report(ctx, p.opts.Observer)
		return nil
	case isPermanent(err):
		return p.markLost(pl, d, err)
	default:
		return cause.OrStep(fmt.Errorf("the device is gone: its containers cannot start until the driver has recreated the device, "+
			"and the driver retries: %w", err))
	}
}

// recreatePartition applies the step again that created the lost partition.
func recreatePartition(ctx context.Context, env *steps.Env, req *deviceRequest) error {
	env.Pass.Reset()
	return req.creator.Recreate(ctx, env, func(m *steps.MIGInstance) error {
		if mig := req.gpu.MIG; mig != nil && mig.ModeFixed && !mig.Enabled {
			return cause.Errorf(cause.Device, "MIG mode of %s is disabled, and only a GPU reset can enable it", req.name.GPU)
		}
		m.Card, m.Minor = req.gpu.Card(), req.gpu.Minor
		return nil
	})
}

// restoreAll reads the hardware, recreates the claim's lost partitions, and restores the settings
// and MPS daemons that it shares with other claims. The caller holds the GPUs' locks.
func (p *Preparer) restoreAll(ctx context.Context, env *steps.Env, pl *plan) error {
	if err := p.restorePartitions(ctx, env, pl); err != nil {
		return err
	}
	for _, s := range steps.Of[*steps.Shared](pl.steps) {
		if _, creates := steps.AsCreator(s); creates {
			continue // restorePartitions handled it
		}
		err := s.Apply(ctx, env)
		if unreadable := new(statefile.UnreadableError); errors.As(err, &unreadable) {
			err = s.MaintainWithoutHolder(ctx, env) // the holder file matters only when the claim is unprepared
		}
		if err != nil {
			return cause.OrStep(err)
		}
	}
	return nil
}

// isPermanent reports whether a partition cannot be recreated however often the driver tries: its
// placement is taken, or the GPU does not support it.
func isPermanent(err error) bool {
	switch steps.FailureCode(err) {
	case device.FailureInsufficient, device.FailureNotSupported, device.FailureReset:
		return true
	}
	return cause.Of(err) == cause.Device
}

// findIntact reports whether instances contains the partition of device d with the recorded
// profile, placement and UUID. If so, findIntact stores it in req.
func (req *deviceRequest) findIntact(d checkpoint.Device, instances []device.Instance) bool {
	if req.creator != nil {
		m := req.creator.MIG()
		in, ok := m.FindIntact(instances)
		if ok {
			m.Instance, m.Minor = &in, req.gpu.Minor
		}
		return ok
	}
	for _, in := range instances {
		// The UUID alone is no proof: an instance of another profile may have the ID and the place on the
		// chip from which it is computed.
		if c, ok := in.Part(*req.name.Partition); ok && c.UUID == d.MIGUUID {
			req.existing = &partition{in, c}
			return true
		}
	}
	return false
}

// markLost returns a LostError for the device d. It also removes the claim's spec, so that no
// container gets another device instead of the lost one.
func (p *Preparer) markLost(pl *plan, d checkpoint.Device, reason error) error {
	lost := &LostError{Claim: pl.record.Namespace + "/" + pl.record.Name, UID: pl.record.ClaimUID, Device: d.Device,
		Reason: reason}
	return cause.Wrap(cause.Device, errors.Join(lost, p.node.Specs.RemoveClaim(pl.record.ClaimUID)))
}
