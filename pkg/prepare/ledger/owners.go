package ledger

import (
	"slices"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// Owners says which MIG instances of one GPU this driver created, and which ones claims have,
// according to the records.
type Owners struct {
	// steps are the stored MIG instance creations of this boot. Each says which instance the driver
	// created or was about to create.
	steps []*steps.MIGInstance
	// unreadable lists the partitions of claims whose records are unreadable. The driver treats an
	// instance with the profile and placement of one of them as its own, but does not remove the
	// instance. It creates no compute instance smaller than its GPU instance, so none is listed.
	unreadable []device.PartitionName
	// anyPlace is true if a claim's record is unreadable and the record's file name does not list the
	// claim's partitions, or if a later version named one. Then that claim may have any instance.
	anyPlace bool
	// used has the partitions that claims have, unless a record proves that this driver created them.
	used []device.PartitionName
}

// Owners reads the records of all claims with partitions on the GPU.
func (l *Ledger) Owners(gpu string) (*Owners, error) {
	entries, err := l.records.List()
	if err != nil {
		return nil, cause.Wrap(cause.Record, err)
	}
	owners := new(Owners)
	if err := l.addSharedOwners(gpu, owners); err != nil {
		return nil, err
	}
	for _, e := range entries {
		places, unknown := partitionsOf(gpu, e.Devices)
		owners.anyPlace = owners.anyPlace || unknown
		if len(places) == 0 && !e.Inexact {
			continue
		}
		r, found, err := l.records.Load(e.ClaimUID)
		var list []steps.Step
		if err == nil && found && r.BootID == l.bootID {
			list, err = steps.Decode(r.Steps)
		}
		if err != nil {
			owners.used = append(owners.used, places...)
			owners.unreadable = append(owners.unreadable, slices.DeleteFunc(places, isComputeInstance)...)
			owners.anyPlace = owners.anyPlace || e.Inexact
			continue
		}
		owners.addRecord(gpu, r, list)
	}
	return owners, nil
}

// addSharedOwners adds to owners the partitions that this driver created for several claims
// together.
func (l *Ledger) addSharedOwners(gpu string, owners *Owners) error {
	keys, err := l.records.Holders()
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	for _, key := range keys {
		of, kind := steps.SplitKey(key)
		name, ok := device.ParseName(of)
		if kind != steps.MIGInstanceKind || !ok || name.GPU != gpu || name.Partition == nil {
			continue
		}
		holder, found, err := l.records.Holder(key)
		if err == nil && (!found || holder.BootID != l.bootID) {
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

func (o *Owners) addRecord(gpu string, r checkpoint.Record, list []steps.Step) {
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
	places, _ := partitionsOf(gpu, slices.DeleteFunc(r.OccupiedDevices(), func(d string) bool { return ours[d] }))
	o.used = append(o.used, places...)
}

// AddAllocated adds devices that claims were allocated, prepared or not, to those that claims have.
func (o *Owners) AddAllocated(gpu string, devices device.Allocations) {
	places, unknown := partitionsOf(gpu, devices.Names().UnsortedList())
	o.used = append(o.used, places...)
	o.anyPlace = o.anyPlace || unknown
}

// partitionsOf returns which partitions of the GPU the devices are, or are in. unknown is true if a
// later version of the driver named a device of the GPU.
func partitionsOf(gpu string, devices []string) (places []device.PartitionName, unknown bool) {
	for _, d := range devices {
		switch name, ok := device.ParseName(d); {
		case !ok && strings.HasPrefix(d, gpu+"-"):
			unknown = true
		case ok && name.GPU == gpu && name.Partition != nil:
			places = append(places, *name.Partition)
		}
	}
	return places, unknown
}

func isComputeInstance(place device.PartitionName) bool { return place.Compute != nil }

// Owns reports whether this driver created the instance, or may have created it.
func (o *Owners) Owns(in device.Instance) bool {
	return o.anyPlace || slices.ContainsFunc(o.steps, func(s *steps.MIGInstance) bool { return s.Owns(in) }) ||
		slices.ContainsFunc(o.unreadable, in.Contains)
}

// IsIdle reports whether the instance is an admin's and no claim has it or a compute instance in
// it.
func (o *Owners) IsIdle(in device.Instance) bool {
	return !o.Owns(in) && !slices.ContainsFunc(o.used, in.Contains)
}

// OwnedInstances returns those of a GPU's instances that this driver created, according to the
// records. It reads no hardware. A claim may be unprepared between the caller's read of instances
// and this call, so that its instance is missing in the result. Use
// [reconcile.Reconciler.ForeignInstances] where that matters.
func (l *Ledger) OwnedInstances(gpu string, instances []device.Instance) ([]device.Instance, error) {
	owners, err := l.Owners(gpu)
	if err != nil {
		return nil, err
	}
	var ours []device.Instance
	for _, in := range instances {
		if owners.Owns(in) {
			ours = append(ours, in)
		}
	}
	return ours, nil
}
