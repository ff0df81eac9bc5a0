package publish

import (
	"cmp"
	"context"
	"errors"
	"hash/fnv"
	"maps"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Cluster reads this node's ResourceSlices and the allocated claims from the API server.
type Cluster interface {
	// Slices lists the ResourceSlices of this node's pool.
	Slices(ctx context.Context) ([]resourceapi.ResourceSlice, error)
	// Allocations returns the devices of this node's pool that are allocated to claims, prepared or
	// not.
	Allocations(ctx context.Context) (Allocations, error)
}

// Allocations says which devices are allocated to claims.
type Allocations struct {
	// Exclusive maps each device that one claim has alone to that claim's name or UID.
	Exclusive map[string]string
	// Shared has the names of the devices of which claims have shares. The value is true if MPS limits
	// the memory and compute units of these shares.
	Shared map[string]bool
}

// SliceBuilder returns the slices that publish the given offerings. It must have no side effects,
// because the retainer also calls it for offerings that are never published.
type SliceBuilder func([]device.Offering) []resourceslice.Slice

const (
	// While a change waits for claims to end, the retainer lists the claims again after a pause of
	// allocationPoll. The pause doubles, up to allocationPollMax, as long as nothing changes.
	allocationPoll    = 2 * time.Second
	allocationPollMax = 30 * time.Second
	// clusterTimeout bounds the time for one list of slices or claims, even in a cluster with many
	// claims.
	clusterTimeout = 30 * time.Second
)

// retainer keeps allocated devices published with the counters that they consumed when they were
// allocated, until their claims end. Otherwise the scheduler over-commits the GPU
// (https://github.com/kubernetes/kubernetes/issues/140802).
//
// The claims' records name the devices of prepared claims. Before a change removes or alters a
// device, the retainer also lists the claims that are allocated but not yet prepared. The scheduler
// may allocate a device while the plugin writes the slices. So the retainer lists the claims again
// until the API server shows the change.
type retainer struct {
	records Ownership
	cluster Cluster

	// published has the devices that the scheduler may see in the API server. It is nil before the
	// first read.
	published forms
	// offered has the devices that the last call of Retain offered. retained has the allocated devices
	// that were kept published. Its value is true for devices that consume counters.
	offered  forms
	retained map[string]bool
	// knownGPUs maps the names of the GPUs in the last call of Retain to these GPUs.
	knownGPUs map[string]device.GPU
	// prepared has the devices in the claims' checkpoint records. allocated has the devices that are
	// allocated according to the API server.
	prepared, allocated Allocations
	// checkedFor has the devices that were to be published when the retainer last listed the claims.
	checkedFor forms
	poll       time.Duration
	nextPoll   time.Time
	// logged has the device names of the last log line of logWaiting.
	logged []string
}

// forms maps the name of each device to its form: a digest of the counters that it consumes and of
// the counter sets that these belong to. A device that consumes no counters has the form 0.
type forms map[string]uint64

func formsOf(all []resourceslice.Slice) forms {
	sets := map[string][]byte{}
	for _, s := range all {
		for i := range s.SharedCounters {
			raw, _ := s.SharedCounters[i].Marshal() // Marshal fails for no value
			sets[s.SharedCounters[i].Name] = raw
		}
	}
	f := forms{}
	for _, s := range all {
		for i := range s.Devices {
			f[s.Devices[i].Name] = formOf(s.Devices[i].ConsumesCounters, sets)
		}
	}
	return f
}

func formOf(consumed []resourceapi.DeviceCounterConsumption, sets map[string][]byte) uint64 {
	if len(consumed) == 0 {
		return 0
	}
	digest := fnv.New64a()
	for i := range consumed {
		raw, _ := consumed[i].Marshal()
		_, _ = digest.Write(raw)
		_, _ = digest.Write(sets[consumed[i].CounterSet])
	}
	return max(digest.Sum64(), 1)
}

// removedOrChanged returns the devices in f that are missing in wanted or have other counters
// there. It ignores devices of GPUs that are not in gpus.
func (f forms) removedOrChanged(wanted forms, gpus map[string]device.GPU) []string {
	var names []string
	for name, form := range f {
		n, ok := device.ParseName(name)
		_, present := gpus[n.GPU]
		if now, offered := wanted[name]; ok && present && (!offered || now != form) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// addMissing adds to f the devices of more that f lacks.
func (f forms) addMissing(more forms) {
	for name, form := range more {
		if _, known := f[name]; !known {
			f[name] = form
		}
	}
}

// Reset forgets the published devices, because another plugin instance may have published others
// since.
func (r *retainer) Reset() { r.published, r.offered, r.checkedFor, r.knownGPUs = nil, nil, nil, nil }

// Retain sets Held and HeldShares of the offerings, so that allocated devices stay published, and
// removes devices that must not be offered yet. settled is false if the caller must call Retain
// again soon. After an error the caller must not remove any published device.
func (r *retainer) Retain(
	ctx context.Context, offerings []device.Offering, counters bool, build SliceBuilder,
) (settled bool, _ error) {
	settled = r.readRecords(ctx)
	before := r.retained
	if r.published == nil || r.allocatedDuringChange(before) {
		var err error
		if r.published, err = r.readPublished(ctx); err != nil {
			return false, err
		}
	}
	gpus := map[string]device.GPU{}
	for _, o := range offerings {
		gpus[o.WholeName()] = o.GPU
	}
	wanted, waiting := r.markRetained(offerings, gpus, counters, build, r.prepared)
	changed := len(r.published.removedOrChanged(wanted, gpus)) > 0
	reverted := !changed && len(r.offered.removedOrChanged(wanted, gpus)) > 0
	if reverted {
		// While the earlier change was published, a claim may have been allocated a device with the
		// counters of that change. So the claims must be listed again.
		r.checkedFor = nil
	}
	if changed || reverted || r.hasNewGPU(gpus) {
		if err := r.readAllocations(ctx, wanted, before); err != nil {
			return false, err
		}
		wanted, waiting = r.markRetained(offerings, gpus, counters, build, r.prepared, r.allocated)
		if affected := r.published.removedOrChanged(wanted, gpus); len(affected) > 0 {
			settled = false
			wanted = r.withdrawFreeDevices(offerings, wanted, affected, build)
		}
	} else {
		r.allocated, r.checkedFor = Allocations{}, nil
	}
	r.offered, r.knownGPUs = wanted, gpus
	r.published.addMissing(wanted)
	r.logWaiting(ctx, waiting)
	return settled && len(waiting) == 0, nil
}

// hasNewGPU reports whether a GPU has no published device and was not in the last call of Retain.
// Claims may have devices of such a GPU, because the kubelet deletes a node's slices when it
// starts.
func (r *retainer) hasNewGPU(gpus map[string]device.GPU) bool {
	known := map[string]bool{}
	for name := range r.published {
		if n, ok := device.ParseName(name); ok {
			known[n.GPU] = true
		}
	}
	for name := range gpus {
		if _, seen := r.knownGPUs[name]; !seen && !known[name] {
			return true
		}
	}
	return false
}

// allocatedDuringChange reports whether a device was prepared after the plugin changed its
// counters, and before the API server showed that change. The device may have been allocated with
// the old or the new counters. before has the devices that the last call of Retain kept published.
func (r *retainer) allocatedDuringChange(before map[string]bool) bool {
	for name := range r.prepared.Exclusive {
		_, wasRetained := before[name]
		if form, offered := r.offered[name]; offered && !wasRetained && form != r.published[name] {
			return true
		}
	}
	return false
}

// withdrawFreeDevices removes all unallocated devices of each GPU that is about to lose a device
// with counters. The scheduler may have just allocated the lost device, and once this is
// unpublished, nothing would keep overlapping devices from being allocated.
func (r *retainer) withdrawFreeDevices(
	offerings []device.Offering, wanted forms, affected []string, build SliceBuilder,
) forms {
	losing := map[string]bool{}
	for _, name := range affected {
		if _, stays := wanted[name]; !stays && r.published[name] != 0 {
			n, _ := device.ParseName(name)
			losing[n.GPU] = true
		}
	}
	if len(losing) == 0 {
		return wanted
	}
	for i := range offerings {
		if losing[offerings[i].WholeName()] {
			offerings[i].Layout, offerings[i].Counted = device.Layout{}, true
		}
	}
	return formsOf(build(offerings))
}

// readRecords reads the devices of prepared claims from the claims' checkpoint records. If that
// fails, ok is false, and the retainer keeps using the devices that it last read.
func (r *retainer) readRecords(ctx context.Context) (ok bool) {
	exclusive, err := r.records.ExclusiveDevices()
	shared, errShared := r.records.SharedDevices()
	if err = errors.Join(err, errShared); err != nil {
		klog.FromContext(ctx).Error(err, "Failed to read the devices of prepared claims; keeping the devices that were last read")
		return false
	}
	r.prepared = Allocations{Exclusive: exclusive, Shared: shared}
	return true
}

// readPublished returns the devices in the API server's slices, plus the devices of the last call
// of Retain, which may not be in the slices yet.
func (r *retainer) readPublished(ctx context.Context) (forms, error) {
	ctx, cancel := context.WithTimeout(ctx, clusterTimeout)
	defer cancel()
	all, err := r.cluster.Slices(ctx)
	if err != nil {
		return nil, err
	}
	specs := make([]resourceslice.Slice, len(all))
	for i, s := range all {
		specs[i] = resourceslice.Slice{Devices: s.Spec.Devices, SharedCounters: s.Spec.SharedCounters}
	}
	published := formsOf(specs)
	published.addMissing(r.offered)
	return published, nil
}

// readAllocations lists the slices and then the claims, because a device may be allocated while it
// is in a slice. It returns at once if it did so for the same devices in wanted a short time ago.
// before has the devices that the last call of Retain kept published.
func (r *retainer) readAllocations(ctx context.Context, wanted forms, before map[string]bool) error {
	again := r.checkedFor != nil && maps.Equal(wanted, r.checkedFor)
	if again && time.Now().Before(r.nextPoll) {
		return nil
	}
	published, err := r.readPublished(ctx)
	if err != nil {
		return err
	}
	callCtx, cancel := context.WithTimeout(ctx, clusterTimeout)
	defer cancel()
	allocated, err := r.cluster.Allocations(callCtx)
	if err != nil {
		return err
	}
	r.poll = min(2*r.poll, allocationPollMax)
	written, same := maps.Equal(published, r.offered), maps.Equal(allocated.Exclusive, r.allocated.Exclusive)
	if !again || !written || !same {
		r.poll = allocationPoll
	}
	for name := range allocated.Exclusive {
		// The device was allocated while the plugin was removing it, so it is published again. A device
		// that the plugin kept published before and that is now gone cannot be published again.
		form, wasPublished := r.published[name]
		if _, wasRetained := before[name]; wasPublished && !wasRetained {
			published.addMissing(forms{name: form})
		}
	}
	r.published, r.allocated, r.checkedFor = published, allocated, wanted
	r.nextPoll = time.Now().Add(r.poll)
	return nil
}

// markRetained sets Held and HeldShares of the offerings from all the given allocations. wanted has
// the devices that are then published. waiting has the devices that the policy would remove or
// publish with other counters if no claim had them.
func (r *retainer) markRetained(
	offerings []device.Offering, gpus map[string]device.GPU, counters bool, build SliceBuilder, all ...Allocations,
) (wanted forms, waiting []string) {
	r.retained = map[string]bool{}
	shared := map[string]bool{}
	for _, allocations := range slices.Backward(all) { // all[0] is from the claims' records and takes precedence
		maps.Copy(shared, allocations.Shared)
	}
	for i := range offerings {
		offerings[i].Held, offerings[i].HeldShares = nil, shared
	}
	unclaimed := formsOf(build(offerings))
	for _, allocations := range all {
		for name := range allocations.Exclusive {
			if counted, retain := r.retainedForm(name, unclaimed, gpus); retain {
				r.retained[name] = counted && counters
			}
		}
	}
	if len(r.retained) == 0 {
		return unclaimed, nil
	}
	for i := range offerings {
		offerings[i].Held = r.retained
	}
	wanted = formsOf(build(offerings))
	for name := range r.retained {
		form, offered := wanted[name]
		if now, offeredUnclaimed := unclaimed[name]; offered && (!offeredUnclaimed || now != form) {
			waiting = append(waiting, name)
		}
	}
	slices.Sort(waiting)
	return wanted, waiting
}

// retainedForm reports whether an allocated device must be retained (retain), and if so, whether it
// has counters (counted). A published device keeps its form. An unpublished device is retained if
// it exists and the policy does not offer it. It has counters if it is a partition.
func (r *retainer) retainedForm(name string, unclaimed forms, gpus map[string]device.GPU) (counted, retain bool) {
	n, ok := device.ParseName(name)
	if form, published := r.published[name]; published {
		return form != 0, ok
	}
	_, offered := unclaimed[name]
	return n.Partition != nil, ok && !offered && gpus[n.GPU].Has(n)
}

// logWaiting logs which devices cannot change until their claims end, or that none are left. It
// logs nothing if the devices are the same as in the last call.
func (r *retainer) logWaiting(ctx context.Context, waiting []string) {
	if slices.Equal(waiting, r.logged) {
		return
	}
	r.logged = waiting
	if len(waiting) == 0 {
		klog.FromContext(ctx).Info("All GPUs are offered as their policies say")
		return
	}
	retained := make([]string, len(waiting))
	for i, name := range waiting {
		retained[i] = name + " by claim " + cmp.Or(r.prepared.Exclusive[name], r.allocated.Exclusive[name])
	}
	klog.FromContext(ctx).Info("Delaying changes to the offered devices until claims end", "devices", retained)
}
