package ledger

import (
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// Owners says which MIG instances of one GPU this driver created, according to the
// records.
type Owners struct {
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

// Owners reads the records of all claims with partitions on the GPU.
func (l *Ledger) Owners(gpu string) (*Owners, error) {
	entries, err := l.records.List()
	if err != nil {
		return nil, cause.Wrap(cause.Record, err)
	}
	owners := &Owners{used: map[string]bool{}}
	if err := l.addSharedOwners(gpu, owners); err != nil {
		return nil, err
	}
	for _, e := range entries {
		places := partitionsOf(gpu, e.Devices)
		if len(places) == 0 && !e.Inexact {
			continue
		}
		r, found, err := l.records.Load(e.ClaimUID)
		var list []steps.Step
		if err == nil && found && r.BootID == l.bootID {
			list, err = steps.Decode(r.Steps)
		}
		if err != nil {
			owners.unreadable = append(owners.unreadable, places...)
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

func (o *Owners) Owns(in device.Instance) bool {
	return o.anyPlace || slices.ContainsFunc(o.steps, func(s *steps.MIGInstance) bool { return s.Owns(in) }) ||
		slices.ContainsFunc(o.unreadable, func(place device.PartitionName) bool {
			return place.Compute == nil && place.ProfileID == in.ProfileID && place.Start == in.Placement.Start
		})
}

func (o *Owners) InUse(in device.Instance) bool {
	return slices.ContainsFunc(in.Compute, func(c device.ComputeInstance) bool { return o.used[c.UUID] })
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
