package publish

import (
	"cmp"
	"context"
	"encoding/json"
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
	Allocations(ctx context.Context) (device.Allocations, error)
}

// SliceBuilder returns the slices that publish the given offerings. It must have no side effects,
// because the retainer also calls it for offerings that are never published.
type SliceBuilder func([]device.Offering) []resourceslice.Slice

const (
	// While a change waits for claims to end, the retainer lists the claims again after a pause: a
	// short one until the API server shows the change, and then a long one while nothing changes.
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

	// published has the devices with which the scheduler may have allocated claims. Only a list of the
	// slices and then of the claims removes a device or changes its form. It is nil before the first
	// list of the slices.
	published forms
	// offered has the devices that the last call of Retain offered.
	offered forms
	// gpus has the GPUs of the last call of Retain, by name.
	gpus map[string]device.GPU
	// prepared has the devices in the claims' checkpoint records. allocated has the devices that are
	// allocated according to the API server.
	prepared, allocated device.Allocations
	// checkedFor has the devices that were to be published when the retainer last listed the claims.
	// Until nextPoll it does not list them again for the same devices.
	checkedFor forms
	nextPoll   time.Time
	// logged has the device names of the last log line of logWaiting.
	logged []string
}

// forms maps the name of each device to its form: the counters that it consumes and the counter set
// that these belong to. A device that consumes no counters has the form "".
type forms map[string]string

func formsOf(all []resourceslice.Slice) forms {
	sets := map[string]string{}
	f := forms{}
	for _, s := range all {
		for _, set := range s.SharedCounters {
			raw, _ := json.Marshal(set) // fails for no value
			sets[set.Name] = string(raw)
		}
	}
	for _, s := range all { // the API server lists slices in any order
		for _, d := range s.Devices {
			f[d.Name] = ""
			for _, c := range d.ConsumesCounters {
				raw, _ := json.Marshal(c)
				f[d.Name] += string(raw) + sets[c.CounterSet]
			}
		}
	}
	return f
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
func (r *retainer) Reset() { r.published, r.offered, r.checkedFor, r.gpus = nil, nil, nil, nil }

// Retain sets Held and HeldShares of the offerings, so that allocated devices stay published, and
// removes devices that must not be offered yet. settled is false if the caller must call Retain
// again soon. After an error the caller must not remove any published device.
func (r *retainer) Retain(
	ctx context.Context, offerings []device.Offering, counters bool, build SliceBuilder,
) (settled bool, _ error) {
	settled = r.readRecords(ctx)
	if r.published == nil {
		var err error
		if r.published, err = r.readPublished(ctx); err != nil {
			return false, err
		}
	}
	gpus := map[string]device.GPU{}
	for _, o := range offerings {
		gpus[o.WholeName()] = o.GPU
	}
	newGPU, before := r.hasNewGPU(gpus), r.gpus
	r.gpus = gpus
	wanted, waiting := r.markRetained(offerings, counters, build, r.prepared)
	// The API server may show what was published before, or already what was offered since.
	changed := len(r.published.removedOrChanged(wanted, gpus)) > 0 || len(r.offered.removedOrChanged(wanted, gpus)) > 0
	if changed || newGPU {
		if err := r.readAllocations(ctx, wanted); err != nil {
			r.gpus = before // a new GPU stays new until the claims were listed
			return false, err
		}
		wanted, waiting = r.markRetained(offerings, counters, build, r.prepared, r.allocated)
		if affected := r.published.removedOrChanged(wanted, gpus); len(affected) > 0 {
			settled = false
			wanted = r.withdrawFreeDevices(offerings, wanted, affected, build)
		}
	} else {
		r.allocated, r.checkedFor = device.Allocations{}, nil
	}
	r.offered = wanted
	r.published.addMissing(wanted)
	r.logWaiting(ctx, waiting)
	for _, name := range waiting {
		if _, offered := wanted[name]; !offered {
			n, _ := device.ParseName(name)
			delete(r.gpus, n.GPU) // it stays new, so the claims are listed until the device's claim ends
		}
	}
	return settled && len(waiting) == 0, nil
}

// hasNewGPU reports whether a GPU has no published device and was not in the last call of Retain.
// Claims may have devices of such a GPU, because the kubelet deletes a node's slices when it
// starts.
func (r *retainer) hasNewGPU(gpus map[string]device.GPU) bool {
	unknown := maps.Clone(gpus)
	for name := range r.gpus {
		delete(unknown, name)
	}
	for name := range r.published {
		n, _ := device.ParseName(name)
		delete(unknown, n.GPU)
	}
	return len(unknown) > 0
}

// withdrawFreeDevices removes all unallocated devices of each GPU that is about to lose a device
// with counters. The scheduler may have just allocated the lost device, and once this is
// unpublished, nothing would keep overlapping devices from being allocated.
func (r *retainer) withdrawFreeDevices(
	offerings []device.Offering, wanted forms, affected []string, build SliceBuilder,
) forms {
	losing := map[string]bool{}
	for _, name := range affected {
		if _, stays := wanted[name]; !stays && r.published[name] != "" {
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
	prepared, err := r.records.AllocatedDevices()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Failed to read the devices of prepared claims; keeping the devices that were last read")
		return false
	}
	r.prepared = prepared
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
		specs[i] = sliceOf(s.Spec)
	}
	published := formsOf(specs)
	published.addMissing(r.offered)
	return published, nil
}

// readAllocations lists the slices and then the claims, because a device may be allocated while it
// is in a slice. It returns at once if it did so for the same devices in wanted a short time ago.
func (r *retainer) readAllocations(ctx context.Context, wanted forms) error {
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
	pause := allocationPollMax
	if !again || !maps.Equal(published, r.offered) || !maps.Equal(allocated.Exclusive, r.allocated.Exclusive) {
		pause = allocationPoll
	}
	for name := range allocated.Exclusive {
		// The device was allocated while the plugin was removing it, so it is published again, unless the
		// GPU no longer has it.
		if form, was := r.published[name]; was && r.has(name) {
			published.addMissing(forms{name: form})
		}
	}
	r.published, r.allocated, r.checkedFor, r.nextPoll = published, allocated, wanted, time.Now().Add(pause)
	return nil
}

// has reports whether a GPU has the device with this name, or can have it.
func (r *retainer) has(name string) bool {
	n, ok := device.ParseName(name)
	return ok && (r.gpus[n.GPU].Has(n) || r.unlisted(name))
}

// unlisted reports whether NVML does not list the GPU of the device with this name, as before
// NVIDIA's driver is loaded. Then it is unknown which devices the GPU can have.
func (r *retainer) unlisted(name string) bool {
	n, ok := device.ParseName(name)
	return ok && r.gpus[n.GPU].PassthroughOnly()
}

// markRetained sets Held and HeldShares of the offerings from all the given allocations. wanted has
// the devices that are then published. waiting has the devices that the policy would remove or
// publish with other counters if no claim had them, and those that cannot be published before
// NVIDIA's driver is loaded. The latter keep their GPUs from virtual machines.
func (r *retainer) markRetained(
	offerings []device.Offering, counters bool, build SliceBuilder, all ...device.Allocations,
) (wanted forms, waiting []string) {
	shared := map[string]bool{}
	for _, allocations := range slices.Backward(all) { // all[0] is from the claims' records and takes precedence
		maps.Copy(shared, allocations.Shared)
	}
	for i := range offerings {
		offerings[i].Held, offerings[i].HeldShares = nil, shared
	}
	unclaimed := formsOf(build(offerings))
	for name := range shared {
		if _, offered := unclaimed[name]; !offered && r.unlisted(name) {
			waiting = append(waiting, name)
		}
	}
	retained := map[string]bool{} // true for devices that consume counters
	for _, allocations := range all {
		for name := range allocations.Exclusive {
			form, published := r.published[name]
			_, offered := unclaimed[name]
			switch {
			case published:
				retained[name] = form != "" && counters
			case !offered && r.has(name): // it was published before the slices were deleted
				n, _ := device.ParseName(name)
				retained[name] = n.Partition != nil && counters
			}
		}
	}
	if len(retained) == 0 {
		return unclaimed, waiting
	}
	for i := range offerings {
		offerings[i].Held = retained
	}
	wanted = formsOf(build(offerings))
	for name := range retained {
		form, offered := wanted[name]
		if now, offeredUnclaimed := unclaimed[name]; offered && (!offeredUnclaimed || now != form) || !offered && r.unlisted(name) {
			waiting = append(waiting, name)
		}
	}
	slices.Sort(waiting)
	return wanted, waiting
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
		retained[i] = name + " by claim " + cmp.Or(r.prepared.Exclusive[name], r.allocated.Exclusive[name], "(shared)")
	}
	klog.FromContext(ctx).Info("Delaying changes to the offered devices until claims end", "devices", retained)
}
