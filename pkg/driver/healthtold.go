package driver

import (
	"context"
	"fmt"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

// healthEventsMost bounds how many changes wait to be told to Pods: they are told within seconds, or, while the API server does not answer, the gravest and
// of those the latest are.
const healthEventsMost = 256

// healthTold tells people and monitoring what changed: a line in the log, Events on the Node and on Pods, metrics.
type healthTold struct {
	mu      sync.Mutex
	pending []health.Change
	wake    chan struct{}
}

// tellHealth tells what came and went. It waits for nobody.
func (d *Driver) tellHealth(ctx context.Context, changes []health.Change) {
	logger := klog.FromContext(ctx)
	var notices notices
	known := d.cards()
	for _, c := range changes {
		log := logger.WithValues("device", c.Device(), "state", c.Finding.State.String(), "code", c.Finding.Code, "reason", c.Finding.Reason)
		switch {
		case c.Finding.State == health.Healthy && !c.Over:
			log.Info("A GPU reports something that does not make it unhealthy", "action", c.Finding.Action)
		case c.Finding.State == health.Healthy:
			log.V(4).Info("A GPU has not reported this again")
			continue
		case c.Over:
			log.Info("A device has recovered from this", "why", c.Why, "since", c.Finding.First)
			reason, message := d.recovered(known, c)
			notices.add(c, corev1.EventTypeNormal, reason, message)
		default:
			log.Info("A device is not healthy", "action", c.Finding.Action)
			notices.add(c, corev1.EventTypeWarning, "GPU"+c.Finding.State.String(), illMessage(c))
		}
		d.healthTold.add(c)
	}
	if !d.superseded.Load() {
		for _, n := range notices {
			d.events.health(d.events.node, n)
		}
	}
	d.showHealth()
	wake(d.healthTold.wake)
}

func illMessage(c health.Change) string {
	return fmt.Sprintf("%s is %s: %s: %s", c.Device(), c.Finding.State, c.Finding.Reason, c.Finding.Action)
}

func recoveredMessage(c health.Change) string {
	return fmt.Sprintf("%s is over this: %s (%s)", c.Device(), c.Finding.Reason, c.Why)
}

// recovered says what the end of something means for the device: only one of which nothing else is known is well.
func (d *Driver) recovered(known cards, c health.Change) (reason, message string) {
	n, _ := device.ParseName(c.Device())
	if v := d.health.View().Of(known.of(c.Card), n); v.State > health.Healthy {
		return "GPUChanged", fmt.Sprintf("%s; it is %s: %s", recoveredMessage(c), v.State, v.Message())
	}
	return "GPURecovered", recoveredMessage(c)
}

// showHealth brings the metrics up to date: every GPU, and the partitions of which something of their own is known.
func (d *Driver) showHealth() {
	view := d.health.View()
	var all, findings []metrics.DeviceHealth
	for _, g := range d.offered().Snapshot().Node.GPUs {
		names := map[string]bool{g.WholeName(): true}
		for _, f := range view.Findings(g.PCIAddress) {
			on := health.Change{Card: g.Card(), Finding: f}.Device()
			names[on] = true
			findings = append(findings, metrics.DeviceHealth{Device: on, State: f.State.String(), Code: f.Code})
		}
		for name := range names {
			n, ok := device.ParseName(name)
			if !ok {
				continue
			}
			v, code := view.Of(g.GPU, n), ""
			if len(v.Causes) > 0 {
				code = v.Causes[0].Code
			}
			all = append(all, metrics.DeviceHealth{Device: name, State: v.State.String(), Code: code})
		}
	}
	d.metrics.Health(all)
	d.metrics.HealthFindings(findings)
}

// countHealth counts events of the hardware.
func (d *Driver) countHealth(events map[health.Counted]uint64, deaf string) {
	for e, n := range events {
		d.metrics.HealthEvents(e.Card.WholeName(), e.Code, n)
	}
	d.metrics.Hears(deaf == "")
}

func (t *healthTold) add(c health.Change) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.pending) >= healthEventsMost {
		mildest := 0
		for i, p := range t.pending {
			if p.Finding.State < t.pending[mildest].Finding.State {
				mildest = i
			}
		}
		t.pending = slices.Delete(t.pending, mildest, mildest+1)
	}
	t.pending = append(t.pending, c)
}

func (t *healthTold) take() []health.Change {
	t.mu.Lock()
	defer t.mu.Unlock()
	taken := t.pending
	t.pending = nil
	return taken
}

// cards are what is known of all cards.
type cards map[device.PCIAddress]device.GPU

func (d *Driver) cards() cards {
	known := cards{}
	for _, g := range d.offered().Snapshot().Node.GPUs {
		known[g.PCIAddress] = g.GPU
	}
	return known
}

// of is what is known of a card.
func (k cards) of(c device.Card) device.GPU {
	if g, is := k[c.PCIAddress]; is {
		return g
	}
	return device.GPU{PCIAddress: c.PCIAddress, UUID: c.UUID}
}

// offered is the inventory with all that stays in the slices.
func (d *Driver) offered() offeredInventory {
	return offeredInventory{readiness: d.readiness, health: d.health}
}

// watchHealth wires what judges the devices' health.
func (d *Driver) watchHealth(watch func(context.Context, func(device.Signal)) error) error {
	effects, err := health.ParseEffects(d.cfg.HealthEffects)
	if err != nil {
		return err
	}
	rules, err := health.ParseRules(d.cfg.XIDRules)
	if err != nil {
		return err
	}
	d.watch = watch
	d.healthTold.wake = make(chan struct{}, 1)
	d.health = newHealthWatch(effects, rules, d.cfg.StateDir(), d.preparer.BootID, d.readiness)
	d.health.count = d.countHealth
	d.health.inUse = d.heldAny
	d.lost.changed = d.health.announce
	d.health.wrong = func(message string) { d.events.warn("HealthNotCleared", message) }
	return nil
}

// heldAny says whether a claim holds any part of the GPU. What cannot be read is in use.
func (d *Driver) heldAny(gpu string) bool {
	entries, err := d.preparer.Records.List()
	if err != nil {
		return true
	}
	for _, e := range entries {
		for _, name := range e.Devices {
			if n, ok := device.ParseName(name); !ok || n.GPU == gpu {
				return true
			}
		}
		if e.Inexact() {
			return true
		}
	}
	return false
}

// refuseLost refuses a device that is lost to a claim that does not have it yet: a whole GPU is prepared without asking the hardware, and its containers would
// start with nothing. Whoever has it keeps it.
func (d *Driver) refuseLost(c *resourceapi.ResourceClaim) error {
	refusal := d.lostTo(c)
	if refusal == nil {
		return nil
	}
	if _, prepared, err := d.preparer.Records.Load(c.UID); err != nil || prepared {
		return nil //nolint:nilerr // a record that cannot be read is the preparer's to report
	}
	return refusal
}

// lostTo is the refusal of the first device of the claim's that is lost.
func (d *Driver) lostTo(c *resourceapi.ResourceClaim) error {
	view := d.health.View()
	if view == nil || c.Status.Allocation == nil {
		return nil
	}
	gpus := d.offered().Snapshot().Node.GPUs
	for _, r := range c.Status.Allocation.Devices.Results {
		n, ok := device.ParseName(r.Device)
		if r.Driver != DriverName || !ok {
			continue
		}
		for _, g := range gpus {
			if v := view.Of(g.GPU, n); g.WholeName() == n.GPU && v.State == health.Lost {
				return prepare.Refused(c.Namespace+"/"+c.Name, prepare.CauseDevice, "request %s was allocated device %s, which cannot be prepared: %s", r.Request, r.Device, v.Message())
			}
		}
	}
	return nil
}

// startHealth starts judging what the hardware says, if there is anybody who listens. publish has the slices looked at again.
func (d *Driver) startHealth(ctx context.Context, wg *sync.WaitGroup, publish func()) {
	if d.watch == nil {
		return
	}
	d.health.tell = func(ctx context.Context, changes []health.Change) {
		publish()
		d.tellHealth(ctx, changes)
	}
	j := d.health.begin(ctx)
	d.showHealth()
	wg.Go(func() { j.Run(ctx) })
	wg.Go(func() { d.tellPods(ctx) })
}

// listener listens to the hardware until what it is called with ends, for as long as the plugin runs. An error says that the hardware is still held.
func (d *Driver) listener(ctx context.Context) func(context.Context) error {
	if d.watch == nil {
		return func(running context.Context) error {
			<-running.Done()
			return nil
		}
	}
	modes := &modeWatch{inv: d.inv, doubt: d.inv.Doubt, doubted: map[device.PCIAddress]device.MIGMode{}}
	return func(running context.Context) error {
		return d.watch(running, func(s device.Signal) {
			modes.see(s.Condition)
			if ctx.Err() == nil { // the hardware is let go of when the plugin stops, which says nothing about it
				d.health.Told(ctx, s)
			}
		})
	}
}
