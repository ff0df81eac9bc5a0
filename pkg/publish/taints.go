package publish

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
)

// marker adds taints to slices, for the health of devices and for the readiness of the node.
type marker struct {
	view     *health.View
	effects  health.Effects
	features Features
	gpus     map[string]device.GPU
	// claimed has the names of the devices that claims have. Claims with admin access have none,
	// because they take nothing from other claims.
	claimed sets.Set[string]
	// withdrawn gets the names of the devices that mark removes.
	withdrawn sets.Set[string]
	// conditions has the node's readiness conditions at the time now.
	conditions []nodeview.Condition
	// requireValidation is whether a GPU that passed no check gets a taint.
	requireValidation bool
	// held is as in [nodeview.View].
	held map[device.PCIAddress]time.Time
	now  time.Time
}

// mark returns the slices with taints. On a cluster without device taints, it removes devices whose
// taint would block scheduling, unless a claim has them. count has the number of tainted devices by
// taint. settled is false while a claim keeps such a device, or while a condition is not due yet.
func (m marker) mark(
	slices []resourceslice.Slice,
) (_ []resourceslice.Slice, count map[metrics.Taint]int, settled bool) {
	count, settled = map[metrics.Taint]int{}, true
	var marked []resourceslice.Slice
	for _, slice := range slices {
		var devices []resourceapi.Device
		for _, d := range slice.Devices {
			v := m.verdict(d.Name)
			notReady, pending := m.notReady(d)
			settled = settled && !pending
			if !m.features.DeviceTaints && (m.effects.BlocksScheduling(v) || notReady != nil) {
				if !m.claimed.Has(d.Name) {
					m.withdrawn.Insert(d.Name)
					continue
				}
				settled = false
			}
			d.Taints = m.allTaints(d, v, notReady)
			for _, t := range d.Taints {
				count[metrics.Taint{Key: strings.TrimPrefix(t.Key, taintPrefix), Effect: string(t.Effect)}]++
			}
			devices = append(devices, d)
		}
		if len(devices) == 0 && len(slice.Devices) > 0 {
			continue
		}
		slice.Devices = devices
		marked = append(marked, slice)
	}
	return marked, count, settled
}

func (m marker) verdict(name string) health.Verdict {
	n, ok := device.ParseName(name)
	if !ok {
		return health.Verdict{}
	}
	return m.view.Of(m.gpus[n.GPU], n)
}

const (
	taintPrefix   = device.DriverName + "/"
	notReadyTaint = taintPrefix + "not-ready"
	// unvalidatedTaint keeps new claims away from a GPU until an admin's check has passed.
	unvalidatedTaint = taintPrefix + "unvalidated"
	// inUseTaint keeps virtual machines away from a GPU that a process has open.
	inUseTaint = taintPrefix + "in-use"
)

// inUse returns the taint of the device n of a GPU that a virtual machine cannot get now.
func (m marker) inUse(n device.Name) []resourceapi.DeviceTaint {
	since, held := m.held[m.gpus[n.GPU].PCIAddress]
	if !n.Passthrough || !held {
		return nil
	}
	return []resourceapi.DeviceTaint{{Key: inUseTaint, Effect: resourceapi.DeviceTaintEffectNoSchedule, TimeAdded: stamp(since)}}
}

// unvalidated returns the taint of a GPU that passed no check since it arrived or was reset.
func (m marker) unvalidated(g device.GPU) []resourceapi.DeviceTaint {
	since, unvalidated := m.view.Unvalidated(g)
	if !m.requireValidation || !unvalidated {
		return nil
	}
	t := resourceapi.DeviceTaint{Key: unvalidatedTaint, Effect: resourceapi.DeviceTaintEffectNoSchedule}
	if !since.IsZero() {
		t.TimeAdded = stamp(since)
	}
	return []resourceapi.DeviceTaint{t}
}

// notReady returns the taint for a device that the node would refuse to prepare, or nil. pending is
// true if the condition is not due yet. A taint of an earlier plugin instance is returned unchanged
// if the condition is pending or has the same code, because its time is older and correct.
func (m marker) notReady(d resourceapi.Device) (_ *resourceapi.DeviceTaint, pending bool) {
	c, shown, pending := nodeview.ShownCondition(m.conditions, typeAttribute(d), m.now)
	if !shown && !pending {
		return nil, false
	}
	for _, t := range d.Taints {
		if t.Key == notReadyTaint && (pending || t.Value == c.Code) {
			return &t, pending
		}
	}
	if pending {
		return nil, true
	}
	return &resourceapi.DeviceTaint{
		Key: notReadyTaint, Value: c.Code, Effect: resourceapi.DeviceTaintEffectNoSchedule, TimeAdded: stamp(c.Since),
	}, false
}

// stamp returns t with the precision that the API server stores.
func stamp(t time.Time) *metav1.Time { return new(metav1.NewTime(t.Truncate(time.Second))) }

func typeAttribute(d resourceapi.Device) string {
	return ptr.Deref(d.Attributes["type"].StringValue, "")
}

// allTaints returns all taints of the device d: those of its health verdict v, those of an
// unvalidated GPU and of one that is in use, and notReady unless it is nil. If no scan has found
// the GPU of d, d keeps those of an earlier plugin instance. For Kubernetes 1.34 only the most
// severe taints are returned.
func (m marker) allTaints(d resourceapi.Device, v health.Verdict, notReady *resourceapi.DeviceTaint) []resourceapi.DeviceTaint {
	if !m.features.DeviceTaints {
		return nil
	}
	taints := m.healthTaints(v)
	n, ok := device.ParseName(d.Name)
	if found := ok && m.gpus[n.GPU].PCIAddress != ""; found {
		taints = append(append(taints, m.unvalidated(m.gpus[n.GPU])...), m.inUse(n)...)
	} else {
		taints = slices.DeleteFunc(slices.Clone(d.Taints), func(t resourceapi.DeviceTaint) bool { return t.Key == notReadyTaint })
	}
	if notReady != nil {
		taints = append(taints, *notReady)
	}
	if !m.features.InformingTaints && len(taints) > maxTaintsIn134 {
		slices.SortStableFunc(taints, func(a, b resourceapi.DeviceTaint) int {
			return slices.Index(effects, b.Effect) - slices.Index(effects, a.Effect)
		})
		taints = taints[:maxTaintsIn134]
	}
	return taints
}

// maxTaintsIn134 is the number of taints per device that Kubernetes 1.34 accepts. It rejects the
// slice if a device has more. Later versions, which also have the effect None, accept 16.
const maxTaintsIn134 = 4

// healthTaints returns a taint for each cause of a device's health verdict v. If several causes
// have the same taint key, only the cause with the most severe effect gets a taint. The taint's
// time is when that cause began.
func (m marker) healthTaints(v health.Verdict) []resourceapi.DeviceTaint {
	var taints []resourceapi.DeviceTaint
	for _, c := range v.Causes {
		effect, shown := m.effect(c.State)
		if !shown {
			continue
		}
		key, value := taintKey(c)
		t := resourceapi.DeviceTaint{Key: taintPrefix + key, Value: value, Effect: effect, TimeAdded: stamp(c.Since)}
		i := slices.IndexFunc(taints, func(o resourceapi.DeviceTaint) bool { return o.Key == t.Key })
		switch {
		case i < 0:
			taints = append(taints, t)
		case slices.Index(effects, effect) > slices.Index(effects, taints[i].Effect):
			taints[i] = t
		}
	}
	return taints
}

// effects has the taint effects, the mildest first.
var effects = []resourceapi.DeviceTaintEffect{
	resourceapi.DeviceTaintEffectNone, resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute,
}

// effect returns the configured taint effect for the health state s. shown is false if devices in
// that state get no taint.
func (m marker) effect(s health.State) (_ resourceapi.DeviceTaintEffect, shown bool) {
	switch m.effects[s] {
	case health.NoExecute:
		return resourceapi.DeviceTaintEffectNoExecute, true
	case health.NoSchedule:
		return resourceapi.DeviceTaintEffectNoSchedule, true
	case health.Informational:
		return resourceapi.DeviceTaintEffectNone, m.features.InformingTaints
	default:
		return "", false
	}
}

// taintKey returns the taint's key, without its domain, and value for a cause. NVIDIA's DRA driver
// uses the same ones, so that tolerations work with either driver:
// https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu/blob/main/cmd/gpu-kubelet-plugin/device_health.go
func taintKey(c health.Finding) (key, value string) {
	switch {
	case c.State == health.Lost:
		return "gpu-lost", ""
	case c.State == health.Unknown:
		return "unmonitored", ""
	case c.XID != 0:
		return "xid", strconv.FormatUint(c.XID, 10)
	default:
		return strings.ToLower(c.State.String()), c.Code
	}
}

// mark returns the slices of the offer with the taints of now.
func (b *publication) mark(ctx context.Context) (wanted []resourceslice.Slice) {
	o, list, node := b.offer, b.list, b.opts.Node.View()
	b.list = nil // later it says nothing about the claims any more
	m := marker{
		view: b.opts.Health.View(), effects: *b.effects.Load(), features: o.features, gpus: map[string]device.GPU{},
		claimed: sets.Set[string]{}, withdrawn: sets.Set[string]{}, conditions: node.Conditions, held: node.Held,
		requireValidation: b.opts.RequireValidation, now: time.Now(),
	}
	for _, g := range o.snapshot.Node.GPUs {
		m.gpus[g.WholeName()] = g.GPU
	}
	unenforced := ""
	if m.requireValidation && !o.features.DeviceTaints {
		unenforced = "the cluster has no device taints, so GPUs are offered before their check (requireValidation): enable the " +
			"feature gate DRADeviceTaints"
	}
	b.opts.Events.EventOnChange(events.ValidationNotEnforced, unenforced, unenforced)
	if !o.features.DeviceTaints {
		prepared, err := b.opts.Claims.AllocatedDevices()
		if err != nil {
			// The claims are unknown, so nothing is withdrawn, and claims may be allocated all devices.
			b.marked, b.withdrawn, b.unlistedSince = false, nil, time.Time{}
			b.slices.Store(&o.slices)
			return o.slices
		}
		m.claimed = prepared.Names()
	}
	wanted, count, settled := m.mark(o.slices)
	leaving := m.withdrawn.Difference(b.withdrawn)
	if len(leaving) == 0 {
		b.unlistedSince = time.Time{}
	} else {
		// A claim may have been allocated one of these devices and not be prepared yet. A claim that is
		// allocated one between the list and the write of the slices does not keep it in the slices.
		unlisted := b.addAllocated(ctx, list, leaving, m.claimed)
		if !b.overdue() {
			maps.Copy(m.claimed, unlisted)
		}
		clear(m.withdrawn)
		wanted, count, settled = m.mark(o.slices)
		if len(unlisted) > 0 {
			settled = false
			m.withdrawn = m.withdrawn.Difference(unlisted) // so that the next call asks for a list again
		}
	}
	b.marked, b.withdrawn = settled, m.withdrawn
	b.slices.Store(&wanted)
	b.opts.Metrics.Tainted(count)
	return wanted
}

// claimList is a list of the claims' devices that began because the devices in leaving should
// leave the slices. It says nothing about others, which claims may have been allocated since.
type claimList struct {
	leaving   sets.Set[string]
	began     time.Time
	allocated device.Allocations
	err       error
}

// firstMark is mark for the first slices of a leader, which wait for a list of the claims.
// Otherwise they would have unhealthy devices that the previous leader has withdrawn.
func (b *publication) firstMark(ctx context.Context) []resourceslice.Slice {
	wanted := b.mark(ctx)
	if b.listing == nil {
		return wanted
	}
	b.takeList(ctx, <-b.listing)
	return b.mark(ctx)
}

// addAllocated adds all allocated devices to names if list, which may be nil, has them. It returns
// those of the leaving devices that need another list, which it starts in the background.
func (b *publication) addAllocated(ctx context.Context, list *claimList, leaving, names sets.Set[string]) (unlisted sets.Set[string]) {
	unlisted = leaving
	if list != nil {
		maps.Copy(names, list.allocated.Names())
		unlisted = leaving.Difference(list.leaving)
	}
	if len(unlisted) > 0 && b.listing == nil && !time.Now().Before(b.nextList) {
		listing := make(chan claimList, 1)
		b.listing = listing
		b.background.Go(func() {
			l := claimList{leaving: unlisted, began: time.Now()}
			ctx, cancel := context.WithTimeout(ctx, clusterTimeout)
			defer cancel()
			l.allocated, l.err = b.cluster.Allocations(ctx)
			listing <- l
		})
	}
	return unlisted
}

// takeList stores a list for the next mark. The next list waits, even after a slow one.
func (b *publication) takeList(ctx context.Context, l claimList) {
	b.listing, b.nextList = nil, time.Now().Add(settleIntervalMax)
	if l.err == nil {
		b.list, b.unlistedSince = &l, time.Time{}
		return
	}
	if b.unlistedSince.IsZero() {
		b.unlistedSince = l.began
	}
	if ctx.Err() == nil {
		b.reportError(ctx, l.err, "Failed to list allocated devices before unhealthy ones are withdrawn; retrying")
	}
}

// unlistedMax is how long failed lists of the claims keep a device published that should leave. A
// claim is usually prepared seconds after its allocation, and the records then keep its device. So
// after this time it is worse to go on offering a broken GPU to new claims. The lists go on, and
// one that names the device brings it back.
const unlistedMax = 5 * time.Minute

// overdue reports whether the lists of the claims have failed for so long that devices must leave
// without one.
func (b *publication) overdue() bool {
	return !b.unlistedSince.IsZero() && time.Since(b.unlistedSince) >= unlistedMax
}
