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

// Cluster is what others know of this node's pool.
type Cluster interface {
	// Slices are those that are published.
	Slices(ctx context.Context) ([]resourceapi.ResourceSlice, error)
	// Allocated are the devices that claims were allocated, prepared or not.
	Allocated(ctx context.Context) (Holders, error)
}

// Holders says which devices claims hold.
type Holders struct {
	// Alone are devices that one claim holds, by name, with what is known of the claim.
	Alone map[string]string
	// Shares are devices of which claims hold shares, by name, and whether these are fractions.
	Shares map[string]bool
}

// Cut makes slices of offerings, as they are to be published. It must do nothing else.
type Cut func([]device.Offering) []resourceslice.Slice

const (
	// The cluster is asked again for claims at first so soon, and in the end so seldom, while
	// nothing changes.
	lookInterval = 2 * time.Second
	lookSeldom   = 30 * time.Second
	// lookTimeout is for one look at all claims of a large cluster.
	lookTimeout = 30 * time.Second
)

// keeper keeps what claims hold published in the form that it has, until they end. A scheduler
// would over-commit a GPU else (https://github.com/kubernetes/kubernetes/issues/140802).
//
// The records tell which claims are prepared. Where a change would take a device away or alter it,
// the cluster is asked for claims that are only allocated. A scheduler may allocate one while the
// slices are being written. So the cluster is asked again until it shows the change.
type keeper struct {
	records Ownership
	cluster Cluster

	// published are the devices that the cluster may show. It is nil before the first look.
	published forms
	// offered are those that were last decided, held what claims held of them and whether with
	// counters.
	offered forms
	held    map[string]bool
	// seen are the GPUs that there were then.
	seen map[string]device.GPU
	// prepared is what the records said last, allocated what the cluster said.
	prepared, allocated Holders
	// asked is what was to be offered when the cluster was asked last.
	asked forms
	pause time.Duration
	next  time.Time
	// told is what was last logged.
	told []string
}

// forms are devices by name. The form of one that consumes counters is a digest of these and of
// their sets. It is 0 for one that consumes none.
type forms map[string]uint64

func formsOf(all []resourceslice.Slice) forms {
	sets := map[string][]byte{}
	for _, s := range all {
		for i := range s.SharedCounters {
			raw, _ := s.SharedCounters[i].Marshal() // fails for no value
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

// lost are the devices of some GPUs that wanted takes away or alters.
func (f forms) lost(wanted forms, gpus map[string]device.GPU) []string {
	var names []string
	for name, form := range f {
		n, ok := device.ParseName(name)
		_, here := gpus[n.GPU]
		if now, there := wanted[name]; ok && here && (!there || now != form) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// add adds the devices that are missing.
func (f forms) add(more forms) {
	for name, form := range more {
		if _, there := f[name]; !there {
			f[name] = form
		}
	}
}

// Begin forgets what the cluster showed: another instance may have published since.
func (k *keeper) Begin() { k.published, k.offered, k.asked, k.seen = nil, nil, nil, nil }

// Keep notes in the offerings what claims hold, and takes from them what may not be offered yet. It
// is settled if nothing has to be looked at again soon. On an error it is not known what claims
// hold, and nothing may be published but what is.
func (k *keeper) Keep(ctx context.Context, offerings []device.Offering, counters bool, cut Cut) (settled bool, _ error) {
	settled = k.read(ctx)
	before := k.held
	if k.published == nil || k.unsure(before) {
		var err error
		if k.published, err = k.shown(ctx); err != nil {
			return false, err
		}
	}
	gpus := map[string]device.GPU{}
	for _, o := range offerings {
		gpus[o.WholeName()] = o.GPU
	}
	wanted, waiting := k.hold(offerings, gpus, counters, cut, k.prepared)
	changed := len(k.published.lost(wanted, gpus)) > 0
	takenBack := !changed && len(k.offered.lost(wanted, gpus)) > 0
	if takenBack {
		k.asked = nil // look now: a claim may have been allocated what was offered meanwhile
	}
	if changed || takenBack || k.unseen(gpus) {
		if err := k.look(ctx, wanted, before); err != nil {
			return false, err
		}
		wanted, waiting = k.hold(offerings, gpus, counters, cut, k.prepared, k.allocated)
		if lost := k.published.lost(wanted, gpus); len(lost) > 0 {
			settled = false
			wanted = k.withdraw(offerings, wanted, lost, cut)
		}
	} else {
		k.allocated, k.asked = Holders{}, nil
	}
	k.offered, k.seen = wanted, gpus
	k.published.add(wanted)
	k.tell(ctx, waiting)
	return settled && len(waiting) == 0, nil
}

// unseen says whether a GPU is new here, and nothing of it is published. The kubelet removes a
// node's slices when it starts, and claims may hold devices all the same.
func (k *keeper) unseen(gpus map[string]device.GPU) bool {
	known := map[string]bool{}
	for name := range k.published {
		if n, ok := device.ParseName(name); ok {
			known[n.GPU] = true
		}
	}
	for name := range gpus {
		if _, seen := k.seen[name]; !seen && !known[name] {
			return true
		}
	}
	return false
}

// unsure says that a claim holds a device whose form was changing when the cluster was last asked. The
// claim may have been allocated the device in either form.
func (k *keeper) unsure(before map[string]bool) bool {
	for name := range k.prepared.Alone {
		_, held := before[name]
		if form, offered := k.offered[name]; offered && !held && form != k.published[name] {
			return true
		}
	}
	return false
}

// withdraw offers nothing that is free of GPUs that lose devices which consume counters. A
// scheduler may have allocated one just now. Once that is unpublished, no counter keeps others
// apart from it.
func (k *keeper) withdraw(offerings []device.Offering, wanted forms, lost []string, cut Cut) forms {
	leaving := map[string]bool{}
	for _, name := range lost {
		if _, stays := wanted[name]; !stays && k.published[name] != 0 {
			n, _ := device.ParseName(name)
			leaving[n.GPU] = true
		}
	}
	if len(leaving) == 0 {
		return wanted
	}
	for i := range offerings {
		if leaving[offerings[i].WholeName()] {
			offerings[i].Layout, offerings[i].Counted = device.Layout{}, true
		}
	}
	return formsOf(cut(offerings))
}

// read goes by what was held before where the records cannot be read.
func (k *keeper) read(ctx context.Context) (ok bool) {
	alone, err := k.records.HeldAlone()
	shares, errShares := k.records.HeldShares()
	if err = errors.Join(err, errShares); err != nil {
		klog.FromContext(ctx).Error(err, "Failed to read which devices claims hold; going by what they held before")
		return false
	}
	k.prepared = Holders{Alone: alone, Shares: shares}
	return true
}

// shown are the devices in the cluster, and those that were offered and may be on their way there.
func (k *keeper) shown(ctx context.Context) (forms, error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	all, err := k.cluster.Slices(ctx)
	if err != nil {
		return nil, err
	}
	there := make([]resourceslice.Slice, len(all))
	for i, s := range all {
		there[i] = resourceslice.Slice{Devices: s.Spec.Devices, SharedCounters: s.Spec.SharedCounters}
	}
	shown := formsOf(there)
	shown.add(k.offered)
	return shown, nil
}

// look asks the cluster which claims hold devices, unless it was asked just now for the same offer.
// It shows its slices first: a claim can be allocated as long as a scheduler sees the device.
// before is what claims held.
func (k *keeper) look(ctx context.Context, wanted forms, before map[string]bool) error {
	again := k.asked != nil && maps.Equal(wanted, k.asked)
	if again && time.Now().Before(k.next) {
		return nil
	}
	shown, err := k.shown(ctx)
	if err != nil {
		return err
	}
	asking, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	allocated, err := k.cluster.Allocated(asking)
	if err != nil {
		return err
	}
	k.pause = min(2*k.pause, lookSeldom)
	written, same := maps.Equal(shown, k.offered), maps.Equal(allocated.Alone, k.allocated.Alone)
	if !again || !written || !same {
		k.pause = lookInterval
	}
	for name := range allocated.Alone {
		// It was allocated while it was being taken away. One that was held before and is gone
		// cannot be kept.
		form, was := k.published[name]
		if _, held := before[name]; was && !held {
			shown.add(forms{name: form})
		}
	}
	k.published, k.allocated, k.asked = shown, allocated, wanted
	k.next = time.Now().Add(k.pause)
	return nil
}

// hold notes in the offerings what claims hold. It says what is offered then, and which held
// devices would be offered otherwise, or not at all, if nobody held them.
func (k *keeper) hold(
	offerings []device.Offering, gpus map[string]device.GPU, counters bool, cut Cut, all ...Holders,
) (wanted forms, waiting []string) {
	k.held = map[string]bool{}
	shares := map[string]bool{}
	for _, h := range slices.Backward(all) { // records come first, and know better
		maps.Copy(shares, h.Shares)
	}
	for i := range offerings {
		offerings[i].Held, offerings[i].HeldShares = nil, shares
	}
	free := formsOf(cut(offerings))
	for _, h := range all {
		for name := range h.Alone {
			if counted, held := k.heldAs(name, free, gpus); held {
				k.held[name] = counted && counters
			}
		}
	}
	if len(k.held) == 0 {
		return free, nil
	}
	for i := range offerings {
		offerings[i].Held = k.held
	}
	wanted = formsOf(cut(offerings))
	for name := range k.held {
		form, offered := wanted[name]
		if now, there := free[name]; offered && (!there || now != form) {
			waiting = append(waiting, name)
		}
	}
	slices.Sort(waiting)
	return wanted, waiting
}

// heldAs says how a device is kept that a claim holds: as it is published. One that is not
// published, and not offered anyway, has counters if it is a partition, to leave the rest of the
// GPU to others.
func (k *keeper) heldAs(name string, free forms, gpus map[string]device.GPU) (counted, held bool) {
	n, ok := device.ParseName(name)
	if form, published := k.published[name]; published {
		return form != 0, ok
	}
	_, offered := free[name]
	return n.Partition != nil, ok && !offered && gpus[n.GPU].Has(n)
}

// tell logs which claims keep GPUs from what their policy wants, once.
func (k *keeper) tell(ctx context.Context, waiting []string) {
	if slices.Equal(waiting, k.told) {
		return
	}
	k.told = waiting
	if len(waiting) == 0 {
		klog.FromContext(ctx).Info("No claim keeps a GPU from the layout that its policy wants any more")
		return
	}
	held := make([]string, len(waiting))
	for i, name := range waiting {
		held[i] = name + " by claim " + cmp.Or(k.prepared.Alone[name], k.allocated.Alone[name])
	}
	klog.FromContext(ctx).Info("Claims keep GPUs from the layout that their policy wants; it changes when they end", "held", held)
}
