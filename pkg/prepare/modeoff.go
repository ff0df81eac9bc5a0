package prepare

import (
	"context"
	"fmt"
	"slices"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// ModeOff turns off a GPU's MIG mode that a cut of ours turned on, so that the GPU can be offered
// whole where nothing is cut any more. It leaves the mode on while a claim holds any of the GPU, or
// while an instance is there. off says that the hardware changed, so that the inventory is out of
// date.
//
// An admin's mode is never changed. An admin's instance makes the mode the admin's, because
// somebody relies on it.
func (p *Preparer) ModeOff(ctx context.Context, g device.GPU) (off bool, _ error) {
	name := g.WholeName()
	if ours, err := p.modeIsOurs(name); !ours || err != nil {
		return false, err // mostly there is nothing to do, and no lock is needed to see that
	}
	err := p.whileIdle(ctx, g, func(work context.Context, state device.CutState) error {
		if ours, err := p.modeIsOurs(name); !ours || err != nil {
			return err
		}
		if len(state.MIG.Instances) > 0 {
			return p.disown(name, state.MIG.Instances)
		}
		_, err := turnOff(work, p.env(&checkpoint.Record{BootID: p.BootID}, nil), g.Card(), name)
		off = err == nil
		return err
	})
	if off {
		klog.FromContext(ctx).Info("Turned off MIG mode, which no claim needs any more", "gpu", name)
	}
	if err != nil {
		return off, fmt.Errorf("MIG mode of %s, which this driver turned on, stays on: %w", name, err)
	}
	return off, nil
}

// disown leaves a mode to the admin who has cut the GPU. What a call of ours left is removed by the
// comparison of records and hardware, and disowns nothing.
func (p *Preparer) disown(gpu string, instances []device.Instance) error {
	ours, err := p.Explained(gpu, instances)
	if err != nil || len(ours) == len(instances) {
		return err
	}
	if err := p.Records.Unmark(gpu); err != nil {
		return because(CauseRecord, "%w", err)
	}
	return nil
}

// forgetModes removes the marks of modes that are off: whoever turns such a mode on next need not
// be us.
func (p *Preparer) forgetModes(ctx context.Context) error {
	var all together
	for _, g := range p.Hardware.Snapshot().Node.GPUs {
		if g.MIG == nil || g.MIG.Enabled {
			continue
		}
		name := g.WholeName()
		if marked, err := p.Records.Marked(name); err != nil {
			all.do(func() error { return because(CauseRecord, "%w", err) })
		} else if marked {
			// The inventory may be out of date: whileIdle looks, and forgets.
			all.do(func() error {
				return p.whileIdle(ctx, g.GPU, func(context.Context, device.CutState) error { return nil })
			})
		}
	}
	return all.wait()
}

// whileIdle does work while a GPU is in MIG mode, no claim holds any of it, and no call works on
// it. Of a mode that is off it forgets that we turned it on.
func (p *Preparer) whileIdle(ctx context.Context, g device.GPU, work func(context.Context, device.CutState) error) error {
	name := g.WholeName()
	ctx, cancel := within(ctx, reconcileTime, 0)
	defer cancel()
	waiting, stop := context.WithTimeout(ctx, recoverWait)
	defer stop()
	held, err := p.Locks.Acquire(waiting, gpuLocks(name)...)
	if isBusy(err) {
		return nil // a call works on it, so that it is not idle
	}
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	defer held.Release()
	if used, err := p.used(name); used || err != nil {
		return err
	}
	state, err := p.Partitions.Look(ctx, g.Card())
	if err == nil && state.MIG.Enabled {
		err = work(ctx, state)
	} else if err == nil {
		err = p.Records.Unmark(name)
	}
	if err != nil {
		return stepError(err)
	}
	return nil
}

func (p *Preparer) modeIsOurs(gpu string) (bool, error) {
	ours, err := p.Records.MarkedIn(gpu, p.BootID)
	if err != nil {
		return false, because(CauseRecord, "%w", err)
	}
	return ours, nil
}

// used says whether a claim holds the GPU or a part of it, or may.
func (p *Preparer) used(gpu string) (bool, error) {
	entries, err := p.Records.ListAbout(gpu)
	if err != nil {
		return false, because(CauseRecord, "%w", err)
	}
	return slices.ContainsFunc(entries, func(e checkpoint.Entry) bool {
		if !e.Inexact() {
			return true
		}
		r, found, err := p.Records.Load(e.ClaimUID)
		return err != nil || found && slices.Contains(r.GPUs(), gpu)
	}), nil
}
