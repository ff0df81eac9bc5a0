package driver

import (
	"slices"
	"strconv"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// offeredInventory is the inventory with all readiness conditions, and with cards that the
// inventory has lost sight of and that are known to be ill: they stay in the slices, tainted, so
// that the Pods that have them can be found, and the other cards' slices stay as they are.
type offeredInventory struct {
	readiness *readiness
	health    *healthWatch
}

func (o offeredInventory) Snapshot() inventory.Snapshot {
	s := o.readiness.Snapshot()
	missing, _ := o.health.View().Missing(listed(s), time.Now())
	missing = slices.DeleteFunc(missing, func(g device.GPU) bool { return o.health.gone(s, g) })
	if !s.Known || len(missing) == 0 {
		return s
	}
	s.Empty = false
	if len(s.Node.GPUs) == 0 && !o.readiness.Blocked() {
		s.Ready, s.Reason = true, "" // it was not ready because none is left
	}
	gpus := append([]nvidia.GPU{}, s.Node.GPUs...)
	for _, g := range missing {
		gpus = append(gpus, nvidia.GPU{GPU: g})
	}
	s.Node.GPUs = gpus
	return s
}

// marker puts into slices what is known of their devices' health, and why they cannot be prepared.
type marker struct {
	view     *health.View
	effects  health.Effects
	features Features
	gpus     map[string]device.GPU
	// held are the devices of claims.
	held map[string]bool
	// conditions are those that keep the node from being ready, at the time now.
	conditions []condition
	now        time.Time
}

// mark gives each device the taints that its verdict and the node's readiness ask for. On a cluster
// without taints a device that is to be taken out is left out instead, as long as no claim holds it.
// settled is false while one is held, or while a condition is not yet to be shown.
func (m marker) mark(slices []resourceslice.Slice) (_ []resourceslice.Slice, count map[metrics.Taint]int, settled bool) {
	count, settled = map[metrics.Taint]int{}, true
	var marked []resourceslice.Slice
	for _, slice := range slices {
		var devices []resourceapi.Device
		for _, d := range slice.Devices {
			v := m.verdict(d.Name)
			notReady, pending := m.notReady(d)
			settled = settled && !pending
			if !m.features.DeviceTaints && (m.effects.TakesOut(v) || notReady != nil) {
				if !m.held[d.Name] {
					continue
				}
				settled = false
			}
			d.Taints = m.all(d, v, notReady)
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
	taintPrefix   = DriverName + "/"
	notReadyTaint = taintPrefix + "not-ready"
)

// notReady is the taint of a device that the node would refuse to prepare. A device of an earlier
// instance's slices keeps the taint that it has while nothing else is known: that instance has waited,
// and the time is since when it is so.
func (m marker) notReady(d resourceapi.Device) (_ *resourceapi.DeviceTaint, pending bool) {
	c, shown, pending := blocking(m.conditions, typeAttribute(d), m.now)
	if !shown && !pending {
		return nil, false
	}
	for _, t := range d.Taints {
		if t.Key == notReadyTaint && (pending || t.Value == c.code) {
			return &t, pending
		}
	}
	if pending {
		return nil, true
	}
	return &resourceapi.DeviceTaint{
		Key: notReadyTaint, Value: c.code, Effect: resourceapi.DeviceTaintEffectNoSchedule, TimeAdded: stamp(c.since),
	}, false
}

// stamp is a time as the API server stores it.
func stamp(t time.Time) *metav1.Time { return new(metav1.NewTime(t.Truncate(time.Second))) }

func typeAttribute(d resourceapi.Device) string {
	return ptr.Deref(d.Attributes["type"].StringValue, "")
}

// all are a device's taints. A GPU of which nothing is known since the start keeps those that an
// earlier instance has given it.
func (m marker) all(d resourceapi.Device, v health.Verdict, notReady *resourceapi.DeviceTaint) []resourceapi.DeviceTaint {
	if !m.features.DeviceTaints {
		return nil
	}
	taints := m.taints(v)
	if n, ok := device.ParseName(d.Name); !ok || m.gpus[n.GPU].PCIAddress == "" {
		taints = slices.DeleteFunc(d.Taints, func(t resourceapi.DeviceTaint) bool { return t.Key == notReadyTaint })
	}
	if notReady != nil {
		taints = append(taints, *notReady)
	}
	if !m.features.InformingTaints && len(taints) > mostTaintsIn134 {
		slices.SortStableFunc(taints, func(a, b resourceapi.DeviceTaint) int {
			return slices.Index(effects, b.Effect) - slices.Index(effects, a.Effect)
		})
		taints = taints[:mostTaintsIn134]
	}
	return taints
}

// mostTaintsIn134 is how many taints Kubernetes 1.34 takes for a device. It rejects a slice with
// more. Later versions, which also know the effect None, take 16.
const mostTaintsIn134 = 4

// taints has one for each key, with the gravest effect that a cause of this key asks for. The time
// is since when the device has been in the cause's state.
func (m marker) taints(v health.Verdict) []resourceapi.DeviceTaint {
	var taints []resourceapi.DeviceTaint
	for _, c := range v.Causes {
		effect, shown := m.effect(c.State)
		if !shown {
			continue
		}
		key, value := keyOf(c)
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

// effects are a taint's, the mildest first.
var effects = []resourceapi.DeviceTaintEffect{
	resourceapi.DeviceTaintEffectNone, resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute,
}

// effect is false for a state that has no taint.
func (m marker) effect(s health.State) (_ resourceapi.DeviceTaintEffect, shown bool) {
	switch m.effects[s] {
	case health.NoExecute:
		return resourceapi.DeviceTaintEffectNoExecute, true
	case health.NoSchedule:
		return resourceapi.DeviceTaintEffectNoSchedule, true
	case health.Informing:
		return resourceapi.DeviceTaintEffectNone, m.features.InformingTaints
	default:
		return "", false
	}
}

// keyOf is a taint's key without its domain, and its value. Where NVIDIA's DRA driver publishes the
// same fact, both are as there, so that a toleration holds with either driver:
// https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu/blob/main/cmd/gpu-kubelet-plugin/device_health.go
func keyOf(c health.Cause) (key, value string) {
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

// marked is what the driver publishes of slices.
func (d *Driver) marked(slices []resourceslice.Slice, s inventory.Snapshot, f Features) (_ []resourceslice.Slice, settled bool) {
	view := d.health.View() // nil where nobody watches the hardware
	m := marker{
		view: view, effects: d.health.effects, features: f, gpus: map[string]device.GPU{}, held: map[string]bool{},
		conditions: d.readiness.Conditions(), now: time.Now(),
	}
	for _, g := range s.Node.GPUs {
		m.gpus[g.WholeName()] = g.GPU
	}
	if !f.DeviceTaints {
		entries, err := d.preparer.Records.List()
		if err != nil {
			return slices, false // who holds what is not known: nothing is withdrawn
		}
		for _, e := range entries {
			for _, name := range e.Devices {
				m.held[name] = true
			}
		}
	}
	slices, count, settled := m.mark(slices)
	d.metrics.Tainted(count)
	// One that has recovered is to be listed soon, or to be withdrawn.
	if _, listed := view.Missing(listed(d.readiness.Snapshot()), time.Now()); !listed {
		settled = false
	}
	return slices, settled
}
