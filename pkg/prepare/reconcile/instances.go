package reconcile

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// ForeignInstances reads a GPU's MIG instances from the hardware under the GPU's lock. foreign has
// those that this driver did not create, according to the records.
func (rec *Reconciler) ForeignInstances(ctx context.Context, card device.Card, gpu string) (
	instances, foreign []device.Instance, err error,
) {
	err = rec.withOwners(ctx, card, gpu, func(all []device.Instance, owners *ledger.Owners) error {
		instances = all
		foreign = slices.DeleteFunc(slices.Clone(all), owners.Owns)
		return nil
	})
	return instances, foreign, err
}

// withOwners calls work with the GPU's MIG instances under the GPU's lock, and with their owners.
func (rec *Reconciler) withOwners(ctx context.Context, card device.Card, gpu string,
	work func(all []device.Instance, owners *ledger.Owners) error) error {
	locks, err := rec.locks.Acquire(ctx, gpu)
	if err != nil {
		return prepare.LockError("another claim is being prepared or unprepared on the GPU", err)
	}
	defer locks.Release()
	state, err := rec.node.Partitions.Look(ctx, card)
	if err != nil {
		return cause.OrStep(err)
	}
	owners, err := rec.ledger.Owners(gpu)
	if err != nil {
		return err
	}
	return work(state.MIG.Instances, owners)
}

// Adopt removes the GPU's MIG instances that this driver did not create and that no claim has. The
// caller does this if the admin's MIG policy for the GPU is "adopt". An instance that a process
// still uses stays, and Adopt returns an error.
//
// allocated returns the devices that claims were allocated, prepared or not. Adopt calls it only
// if the records explain not all instances that g has, and before it takes the GPU's lock, because
// it may take long. If it fails, no instance is removed.
func (rec *Reconciler) Adopt(ctx context.Context, g device.GPU, allocated func() (device.Allocations, error)) error {
	card, gpu := g.Card(), g.WholeName()
	owners, err := rec.ledger.Owners(gpu)
	if err != nil || g.MIG == nil || !slices.ContainsFunc(g.MIG.Instances, owners.IsIdle) {
		return err
	}
	claimed, err := allocated()
	if err != nil {
		return cause.Errorf(cause.NotReady, "MIG instances stay until it is known that no claim was allocated them (policy adopt): %w", err)
	}
	work, cancel := steps.WithTimeout(ctx, steps.PeriodicTime, 0)
	defer cancel()
	return rec.withOwners(work, card, gpu, func(all []device.Instance, owners *ledger.Owners) error {
		owners.AddAllocated(gpu, claimed)
		var errs []error
		for _, in := range all {
			if !owners.IsIdle(in) {
				continue
			}
			if err := rec.node.Partitions.Destroy(work, card, in); err != nil {
				errs = append(errs, fmt.Errorf("remove %s, which this driver did not create, from %s (policy adopt): %w",
					steps.DescribeInstances(in), gpu, err))
				continue
			}
			klog.FromContext(ctx).Info("Removed MIG instance that this driver did not create (policy adopt)",
				"gpu", gpu, "instance", steps.DescribeInstances(in))
		}
		return cause.OrStep(errors.Join(errs...))
	})
}
