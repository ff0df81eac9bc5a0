package driver

import (
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// offeredInventory is the gate, with cards that the inventory has lost sight of and that are known to be ill: they stay in the slices, tainted, so that the
// Pods that have them can be found, and the other cards' slices stay as they are.
type offeredInventory struct {
	gate   *gate
	health *healthWatch
}

func (o offeredInventory) Snapshot() inventory.Snapshot {
	s := o.gate.Snapshot()
	missing, _ := o.health.View().Missing(listed(s), time.Now())
	missing = slices.DeleteFunc(missing, func(g device.GPU) bool { return o.health.gone(s, g) })
	if !s.Known || len(missing) == 0 {
		return s
	}
	s.Empty = false
	if len(s.Node.GPUs) == 0 && !o.gate.Closed() {
		s.Ready, s.Reason = true, "" // it was not ready because none is left
	}
	gpus := append([]nvidia.GPU{}, s.Node.GPUs...)
	for _, g := range missing {
		gpus = append(gpus, nvidia.GPU{GPU: g})
	}
	s.Node.GPUs = gpus
	return s
}

// marker puts into slices what is known of their devices' health.
type marker struct {
	view     *health.View
	effects  health.Effects
	features Features
	gpus     map[string]device.GPU
	// held are the devices of claims.
	held map[string]bool
}

// mark gives each device the taints that its verdict asks for. On a cluster without taints a device that is to be taken out is left out instead, as long as
// no claim holds it: settled is false if one is.
func (m marker) mark(slices []resourceslice.Slice) (_ []resourceslice.Slice, count map[metrics.Taint]int, settled bool) {
	count, settled = map[metrics.Taint]int{}, true
	var marked []resourceslice.Slice
	for _, slice := range slices {
		var devices []resourceapi.Device
		for _, d := range slice.Devices {
			v := m.verdict(d.Name)
			if !m.features.DeviceTaints && m.effects.TakesOut(v) {
				if !m.held[d.Name] {
					continue
				}
				settled = false
			}
			d.Taints = m.taints(v)
			for _, t := range d.Taints {
				count[metrics.Taint{State: strings.TrimPrefix(t.Key, taintPrefix), Effect: string(t.Effect)}]++
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

const taintPrefix = DriverName + "/"

// taints has one for each state that the device is in: a milder one stays beside a graver one, and each has been there since its own time.
func (m marker) taints(v health.Verdict) []resourceapi.DeviceTaint {
	if !m.features.DeviceTaints {
		return nil
	}
	var taints []resourceapi.DeviceTaint
	for _, c := range v.Causes {
		var effect resourceapi.DeviceTaintEffect
		switch m.effects[c.State] {
		case health.NoExecute:
			effect = resourceapi.DeviceTaintEffectNoExecute
		case health.NoSchedule:
			effect = resourceapi.DeviceTaintEffectNoSchedule
		case health.Informing:
			if !m.features.InformingTaints {
				continue
			}
			effect = resourceapi.DeviceTaintEffectNone
		default:
			continue
		}
		since := metav1.NewTime(c.Since.Truncate(time.Second)) // as the API server stores it
		taints = append(taints, resourceapi.DeviceTaint{Key: taintPrefix + strings.ToLower(c.State.String()), Value: c.Code, Effect: effect, TimeAdded: &since})
	}
	return taints
}

// marked is what the driver publishes of slices.
func (d *Driver) marked(slices []resourceslice.Slice, s inventory.Snapshot, f Features) (_ []resourceslice.Slice, settled bool) {
	view := d.health.View()
	if view == nil {
		return slices, true
	}
	m := marker{view: view, effects: d.health.effects, features: f, gpus: map[string]device.GPU{}, held: map[string]bool{}}
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
	if _, listed := view.Missing(listed(d.gate.Snapshot()), time.Now()); !listed {
		settled = false
	}
	return slices, settled
}
