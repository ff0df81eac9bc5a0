package prepare

import (
	"context"
	"errors"
	"fmt"

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

// looked asks the hardware. A partition that is gone is lost, unless it was made for the claim: then it is made again, by who may do that.
func (p *Preparer) looked(ctx context.Context, env *Env, w *plan) error {
	return p.each(ctx, env, w, func(t *want, d checkpoint.Device, state device.CutState) error {
		if t.shared != nil || t.made() != nil {
			// Whoever reconciles makes it again under the GPU's lock, or says that it is lost; so may another claim that shares it.
			gone := fmt.Errorf("device %s is gone, and containers that use it do not start until it is made again, which is tried", d.Device)
			return because(CauseStep, "%w", errors.Join(gone, p.Specs.RemoveClaim(w.record.ClaimUID)))
		}
		return p.lost(w, d, fmt.Errorf("it is gone, at its GPU there are now: %s", describe(state.MIG.Instances...)))
	})
}

// recut asks the hardware. A partition that is gone, as after a reset of the GPU or a reload of its driver, is made again at the same place. Until that has
// worked the claim has no spec; the device is called lost only where trying again cannot help.
// The caller holds the GPUs' locks.
func (p *Preparer) recut(ctx context.Context, env *Env, w *plan) error {
	return p.each(ctx, env, w, func(t *want, d checkpoint.Device, state device.CutState) error {
		if t.made() == nil {
			return p.lost(w, d, fmt.Errorf("it was made by someone else and is gone, at its GPU there are now: %s", describe(state.MIG.Instances...)))
		}
		klog.FromContext(ctx).Info("Making a claim's partition again, which is gone", "claim", klog.KRef(w.record.Namespace, w.record.Name), "device", d.Device)
		// What the spec names may be another claim's by now.
		if err := p.Specs.RemoveClaim(w.record.ClaimUID); err != nil {
			return because(CauseStep, "%w", err)
		}
		err := p.again(ctx, env, t)
		switch {
		case err == nil:
			p.repaired(ctx, Repair{"lost-partition", "Made a claim's partition again", w.record.Namespace + "/" + w.record.Name + " " + d.Device})
			return nil
		case hopeless(err):
			return p.lost(w, d, err)
		default:
			return stepError(fmt.Errorf("it is gone, and containers that use it do not start until it is made again, which is tried again: %w", err))
		}
	})
}

// again makes a partition again.
func (p *Preparer) again(ctx context.Context, env *Env, t *want) error {
	m := t.made()
	env.Round.forget()
	if t.shared != nil {
		env = t.shared.held.own(env)
		t.shared.held.holder.State = checkpoint.Applying
	}
	if err := m.Revert(ctx, env); err != nil {
		return err
	}
	if mig := t.gpu.MIG; mig != nil && mig.ModeFixed && !mig.Enabled {
		return because(CauseDevice, "MIG mode of %s is off, and only a reset of the GPU turns it on", t.name.GPU)
	}
	m.Card, m.Minor = t.gpu.Card(), t.gpu.Minor
	if err := m.Apply(ctx, env); err != nil || t.shared == nil {
		return err
	}
	t.shared.held.holder.State = checkpoint.Applied
	return t.shared.held.save(env)
}

// held asks the hardware about all that the claim was given: its partitions, and how its devices are shared. What is not as it should be is mended.
// The caller holds the GPUs' locks.
func (p *Preparer) held(ctx context.Context, env *Env, w *plan) error {
	if err := p.recut(ctx, env, w); err != nil {
		return err
	}
	for _, s := range sharedSteps(w.steps) {
		if _, made := s.part(); made {
			continue // it was made again, if that was needed
		}
		err := s.Apply(ctx, env)
		if unreadable := new(checkpoint.UnreadableError); errors.As(err, &unreadable) {
			err = s.keepBlind(ctx, env) // who else holds it matters when the claim leaves
		}
		if err != nil {
			return stepError(err)
		}
	}
	return nil
}

// heldIn is held within a round.
func (p *Preparer) heldIn(r *round) ensure {
	return func(ctx context.Context, env *Env, w *plan) error {
		env.Round = r
		return p.held(ctx, env, w)
	}
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
	if m := t.made(); m != nil {
		in, ok := m.intact(instances)
		if ok {
			m.Instance, m.Minor = &in, t.gpu.Minor
		}
		return ok
	}
	for _, in := range instances {
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
