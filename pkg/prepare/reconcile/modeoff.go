package reconcile

import (
	"context"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// DisableUnusedMIGMode disables the MIG mode of a GPU if this driver enabled it, so that the whole
// GPU can be offered again. It leaves the mode on while a claim uses any part of the GPU, or while
// a MIG instance exists. It returns off true if it disabled the mode, so that the inventory is now
// out of date.
//
// It never disables MIG mode that an admin enabled. If an admin creates a MIG instance on the GPU,
// the driver treats the mode as the admin's from then on.
func (rec *Reconciler) DisableUnusedMIGMode(ctx context.Context, g device.GPU) (off bool, _ error) {
	name := g.WholeName()
	err := rec.whileIdle(ctx, g, func(work context.Context, state device.CardState) error {
		if len(state.MIG.Instances) > 0 {
			return rec.yieldModeToAdmin(name, state.MIG.Instances)
		}
		_, err := steps.DisableMIGMode(work, steps.NewEnv(rec.node, &checkpoint.Record{BootID: rec.node.BootID}, nil), g.Card(), name)
		off = err == nil
		return err
	})
	if off {
		klog.FromContext(ctx).Info("Disabled unused MIG mode", "gpu", name)
	}
	if err != nil {
		return off, fmt.Errorf("disable unused MIG mode of %s, which this driver enabled: %w", name, err)
	}
	return off, nil
}

// yieldModeToAdmin leaves the MIG mode to the admin who created instances on the GPU. It does
// nothing if this driver created all of the instances: Reconcile removes those.
func (rec *Reconciler) yieldModeToAdmin(gpu string, instances []device.Instance) error {
	ours, err := rec.ledger.OwnedInstances(gpu, instances)
	if err != nil || len(ours) == len(instances) {
		return err
	}
	return cause.Wrap(cause.Record, rec.node.Records.Unmark(gpu))
}

// clearStaleMarks removes the marks "this driver enabled MIG mode" of GPUs whose MIG mode is off.
// If an admin enabled the mode next, the mark would let the driver disable it.
func (rec *Reconciler) clearStaleMarks(ctx context.Context) error {
	var all []func() error
	for _, g := range rec.node.Hardware.Snapshot().Node.GPUs {
		if g.MIG != nil && !g.MIG.Enabled { // the inventory may be out of date, so whileIdle reads the hardware
			all = append(all, func() error {
				return rec.whileIdle(ctx, g.GPU, func(context.Context, device.CardState) error { return nil })
			})
		}
	}
	return inParallel(all)
}

// whileIdle calls work with the state of the GPU, if its MIG mode is on and this driver enabled it.
// It does nothing while a claim uses the GPU or another call has the GPU's lock. If the mode is off
// or another's, it removes the mark that says that this driver enabled the mode.
func (rec *Reconciler) whileIdle(ctx context.Context, g device.GPU, work func(context.Context, device.CardState) error) error {
	name := g.WholeName()
	if _, marked, err := rec.node.Records.Marked(name); !marked || err != nil {
		return cause.Wrap(cause.Record, err) // read without a lock, as usually the GPU has no mark
	}
	ctx, cancel := steps.WithTimeout(ctx, reconcileTime, 0)
	defer cancel()
	waiting, stop := context.WithTimeout(ctx, busyWait)
	defer stop()
	locks, err := rec.locks.Acquire(waiting, name)
	if prepare.IsBusy(err) {
		return nil // a call works on the GPU, so the GPU is not idle
	}
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	defer locks.Release()
	if used, err := rec.ledger.InUse(name); used || err != nil {
		return err
	}
	boot, marked, err := rec.node.Records.Marked(name)
	if !marked || err != nil {
		return cause.Wrap(cause.Record, err)
	}
	state, err := rec.node.Partitions.Look(ctx, g.Card())
	switch {
	case err != nil:
	case state.MIG.Enabled && boot == rec.node.BootID:
		err = work(ctx, state)
	default:
		err = cause.Wrap(cause.Record, rec.node.Records.Unmark(name))
	}
	return cause.OrStep(err)
}
