package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// ensure makes sure that the partitions of a finished preparation are there, each the one that the claim was given.
type ensure func(ctx context.Context, env *Env, w *plan) error

var errUnseen = errors.New("the inventory does not see all partitions of the claim")

// seen asks the inventory, which asks no hardware and may be out of date. Its error is errUnseen.
func (p *Preparer) seen(_ context.Context, _ *Env, w *plan) error {
	snapshot := p.Hardware.Snapshot()
	if snapshot.Failure != "" {
		return errUnseen
	}
	for i := range w.wants {
		t := &w.wants[i]
		if t.name.Partition == nil {
			continue
		}
		if t.gpu.MIG == nil || !t.intact(w.record.Devices[i], t.gpu.MIG.Instances) {
			return errUnseen
		}
	}
	return nil
}

// seenOrLooked asks the hardware only about what the inventory does not see.
func (p *Preparer) seenOrLooked(ctx context.Context, env *Env, w *plan) error {
	if err := p.seen(ctx, env, w); !errors.Is(err, errUnseen) {
		return err
	}
	return p.looked(ctx, env, w)
}

// looked asks the hardware. A partition that is gone is lost.
func (p *Preparer) looked(ctx context.Context, env *Env, w *plan) error {
	return p.each(ctx, env, w, func(_ *want, d checkpoint.Device, state device.CutState) error {
		return p.lost(w, d, fmt.Errorf("it is gone, at its GPU there are now: %s", describe(state.MIG.Instances...)))
	})
}

// recut asks the hardware. A partition that is gone, as after a reset of the GPU or a reload of its driver, is made again at the same place. Until that has
// worked the claim has no spec; the device is called lost only where trying again cannot help.
// The caller holds the GPUs' locks.
func (p *Preparer) recut(ctx context.Context, env *Env, w *plan) error {
	return p.each(ctx, env, w, func(t *want, d checkpoint.Device, state device.CutState) error {
		if t.cut == nil {
			return p.lost(w, d, fmt.Errorf("it was made by someone else and is gone, at its GPU there are now: %s", describe(state.MIG.Instances...)))
		}
		klog.FromContext(ctx).Info("Making a claim's partition again, which is gone", "claim", klog.KRef(w.record.Namespace, w.record.Name), "device", d.Device)
		// What the spec names may be another claim's by now.
		if err := p.Specs.RemoveClaim(w.record.ClaimUID); err != nil {
			return because(CauseStep, "%w", err)
		}
		err := t.cut.Revert(ctx, env)
		if policy := p.Policy(t.gpu); err == nil && !cuttable(policy) {
			err = because(CauseDevice, "the policy of %s is %s", t.name.GPU, policy)
		}
		if err == nil {
			t.cut.Card, t.cut.Minor = t.gpu.Card(), t.gpu.Minor
			err = t.cut.Apply(ctx, env)
		}
		switch {
		case err == nil:
			return nil
		case hopeless(err):
			return p.lost(w, d, err)
		default:
			return stepError(fmt.Errorf("it is gone, and containers that use it do not start until it is made again, which is tried again: %w", err))
		}
	})
}

// hopeless says whether what could not be made again cannot be had by trying again: its place is somebody else's, or such a cut is refused here.
func hopeless(err error) bool {
	switch cutCode(err) {
	case device.CutInsufficient, device.CutNotSupported, device.CutReset:
		return true
	}
	return CauseOf(err) == CauseDevice
}

// each looks at each partition, and calls gone for those that are not there as they were.
func (p *Preparer) each(ctx context.Context, env *Env, w *plan, gone func(*want, checkpoint.Device, device.CutState) error) error {
	for i := range w.wants {
		t, d := &w.wants[i], w.record.Devices[i]
		if t.name.Partition == nil {
			continue
		}
		state, err := env.Looks.at(ctx, t.gpu.Card())
		if err != nil {
			return stepError(err)
		}
		if err := sameNode(t.name.GPU, t.gpu.Minor, state.Minor); err != nil {
			return err
		}
		if t.intact(d, state.MIG.Instances) {
			continue
		}
		if err := gone(t, d, state); err != nil {
			return err
		}
	}
	return nil
}

// intact finds the partition that the claim was given among those that are there.
func (t *want) intact(d checkpoint.Device, instances []device.Instance) bool {
	for _, in := range instances {
		if t.cut != nil {
			if t.cut.Instance == nil || len(t.cut.Instance.Compute) == 0 || !matches(*t.cut.Instance, in) {
				continue
			}
			if slices.EqualFunc(t.cut.Instance.Compute, in.Compute, sameCompute) {
				t.cut.Instance, t.cut.Minor = &in, t.gpu.Minor
				return true
			}
			continue
		}
		// A UUID alone is no proof: it follows from the card and the two IDs, which another profile may have by now.
		if c, ok := in.Part(*t.name.Partition); ok && c.UUID == d.MIGUUID {
			t.found = &partition{in, c}
			return true
		}
	}
	return false
}

// lost makes sure that no container gets another device in the place of one that is gone.
func (p *Preparer) lost(w *plan, d checkpoint.Device, reason error) error {
	lost := &LostError{Claim: w.record.Namespace + "/" + w.record.Name, UID: w.record.ClaimUID, Device: d.Device, GPU: d.GPU, Reason: reason}
	return because(CauseDevice, "%w", errors.Join(lost, p.Specs.RemoveClaim(w.record.ClaimUID)))
}
