package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// partitionOwners says which MIG instances of one GPU this driver created, according to the
// records.
type partitionOwners struct {
	// steps are the stored MIG instance creations of this boot. Each says which instance the driver
	// created or was about to create.
	steps []*steps.MIGInstance
	// unreadable lists the partitions of claims whose records are unreadable. The driver treats an
	// instance with the profile and placement of one of them as its own, but does not remove the
	// instance.
	unreadable []device.PartitionName
	// anyPlace is true if a claim's record is unreadable and the record's file name does not list the
	// claim's partitions. Then every instance may belong to that claim.
	anyPlace bool
	// used has the UUIDs of MIG devices that claims use but this driver did not create.
	used map[string]bool
}

// readOwners reads the records of all claims with partitions on the GPU.
func (p *Preparer) readOwners(gpu string) (*partitionOwners, error) {
	entries, err := p.Records.ListForGPUs(gpu)
	if err != nil {
		return nil, cause.Wrap(cause.Record, err)
	}
	owners := &partitionOwners{used: map[string]bool{}}
	if err := p.addSharedOwners(gpu, owners); err != nil {
		return nil, err
	}
	for _, e := range entries {
		places := partitionsOf(gpu, e.Devices)
		if len(places) == 0 && !e.Inexact() {
			continue
		}
		r, found, err := p.Records.Load(e.ClaimUID)
		var list []steps.Step
		if err == nil && found && r.BootID == p.BootID {
			list, err = steps.Decode(r.Steps)
		}
		if err != nil {
			owners.unreadable = append(owners.unreadable, places...)
			owners.anyPlace = owners.anyPlace || e.Inexact()
			continue
		}
		owners.addRecord(gpu, r, list)
	}
	return owners, nil
}

// addSharedOwners adds to owners the partitions that this driver created for several claims
// together.
func (p *Preparer) addSharedOwners(gpu string, owners *partitionOwners) error {
	keys, err := p.Records.Holders()
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	for _, key := range keys {
		of, kind := steps.SplitKey(key)
		name, ok := device.ParseName(of)
		if kind != steps.MIGInstanceKind || !ok || name.GPU != gpu || name.Partition == nil {
			continue
		}
		holder, found, err := p.Records.Holder(key)
		if err == nil && (!found || holder.BootID != p.BootID) {
			continue
		}
		var m *steps.MIGInstance
		if err == nil {
			m, err = steps.InstanceOf(holder)
		}
		if err != nil {
			owners.unreadable = append(owners.unreadable, *name.Partition)
			continue
		}
		owners.steps = append(owners.steps, m)
	}
	return nil
}

func (o *partitionOwners) addRecord(gpu string, r checkpoint.Record, list []steps.Step) {
	ours := map[string]bool{}
	for _, step := range list {
		if c, ok := steps.AsCreator(step); ok {
			ours[c.Partition()] = true
		}
	}
	for _, m := range steps.Of[*steps.MIGInstance](list) {
		if m.GPU == gpu {
			o.steps = append(o.steps, m)
		}
	}
	for _, d := range r.Devices {
		if d.GPU == gpu && d.MIGUUID != "" && !ours[d.Device] && !d.AdminAccess {
			o.used[d.MIGUUID] = true
		}
	}
}

func partitionsOf(gpu string, devices []string) []device.PartitionName {
	var places []device.PartitionName
	for _, d := range devices {
		if name, ok := device.ParseName(d); ok && name.GPU == gpu && name.Partition != nil {
			places = append(places, *name.Partition)
		}
	}
	return places
}

func (o *partitionOwners) owns(in device.Instance) bool {
	return o.anyPlace || slices.ContainsFunc(o.steps, func(s *steps.MIGInstance) bool { return s.Owns(in) }) ||
		slices.ContainsFunc(o.unreadable, func(place device.PartitionName) bool {
			return place.Compute == nil && place.ProfileID == in.ProfileID && place.Start == in.Placement.Start
		})
}

func (o *partitionOwners) inUse(in device.Instance) bool {
	return slices.ContainsFunc(in.Compute, func(c device.ComputeInstance) bool { return o.used[c.UUID] })
}

// OwnedInstances returns those of a GPU's instances that this driver created, according to the
// records. It reads no hardware. A claim may be unprepared between the caller's read of instances
// and this call, so that its instance is missing in the result. Use [Preparer.ForeignInstances]
// where that matters.
func (p *Preparer) OwnedInstances(gpu string, instances []device.Instance) ([]device.Instance, error) {
	owners, err := p.readOwners(gpu)
	if err != nil {
		return nil, err
	}
	var ours []device.Instance
	for _, in := range instances {
		if owners.owns(in) {
			ours = append(ours, in)
		}
	}
	return ours, nil
}

// ForeignInstances reads a GPU's MIG instances from the hardware under the GPU's lock. foreign has
// those that this driver did not create, according to the records.
func (p *Preparer) ForeignInstances(ctx context.Context, card device.Card, gpu string) (instances, foreign []device.Instance, err error) {
	instances, foreign, _, release, err := p.findForeign(ctx, card, gpu)
	if err != nil {
		return nil, nil, err
	}
	release()
	return instances, foreign, nil
}

func (p *Preparer) findForeign(ctx context.Context, card device.Card, gpu string) (instances, foreign []device.Instance,
	owners *partitionOwners, release func(), err error) {
	locks, err := p.Locks.Acquire(ctx, gpuLocks(gpu)...)
	if err != nil {
		return nil, nil, nil, nil, lockError("another claim is being prepared or unprepared on the GPU", err)
	}
	state, err := p.Partitions.Look(ctx, card)
	if err == nil {
		owners, err = p.readOwners(gpu)
	}
	if err != nil {
		locks.Release()
		return nil, nil, nil, nil, cause.OrStep(err)
	}
	for _, in := range state.MIG.Instances {
		if !owners.owns(in) {
			foreign = append(foreign, in)
		}
	}
	return state.MIG.Instances, foreign, owners, locks.Release, nil
}

// Adopt removes the GPU's MIG instances that this driver did not create and that no claim uses. The
// caller does this if the admin's MIG policy for the GPU is "adopt". An instance that a process
// still uses stays, and Adopt returns an error.
func (p *Preparer) Adopt(ctx context.Context, card device.Card, gpu string) error {
	work, cancel := steps.WithTimeout(ctx, steps.PeriodicTime, 0)
	defer cancel()
	_, foreign, owners, release, err := p.findForeign(work, card, gpu)
	if err != nil {
		return err
	}
	defer release()
	var errs []error
	for _, in := range foreign {
		if owners.inUse(in) {
			continue
		}
		if err := p.Partitions.Destroy(work, card, in); err != nil {
			errs = append(errs, fmt.Errorf("remove %s, which this driver did not create, from %s (policy adopt): %w",
				steps.DescribeInstances(in), gpu, err))
			continue
		}
		klog.FromContext(ctx).Info("Removed MIG instance that this driver did not create (policy adopt)",
			"gpu", gpu, "instance", steps.DescribeInstances(in))
	}
	if err := errors.Join(errs...); err != nil {
		return cause.OrStep(err)
	}
	return nil
}
