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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

// maxPendingHealthChanges is how many health changes can wait until reportToPods writes them as
// Events. Normally they wait for seconds. If too many wait because the API server does not answer,
// the oldest of the mildest changes is dropped.
const maxPendingHealthChanges = 256

// healthReport is the queue of health changes for reportToPods.
type healthReport struct {
	mu      sync.Mutex
	pending []health.Change
	wake    chan struct{}
}

// reportHealth reports health changes in the log, in Events on the Node and in metrics, and queues
// them for reportToPods. It does not block.
func (d *Driver) reportHealth(ctx context.Context, changes []health.Change) {
	logger := klog.FromContext(ctx)
	var notices notices
	known := d.knownGPUs()
	for _, c := range changes {
		log := logger.WithValues("device", c.Device(), "state", c.Finding.State.String(), "code", c.Finding.Code, "reason", c.Finding.Reason)
		switch {
		case c.Finding.State == health.Healthy && !c.Over:
			log.Info("GPU reported a problem that does not affect its health", "action", c.Finding.Action)
		case c.Finding.State == health.Healthy:
			log.V(4).Info("GPU problem that did not affect its health has not recurred")
			continue
		case c.Over:
			log.Info("Health problem of device ended", "why", c.Why, "since", c.Finding.First)
			reason, message := d.recoveryEvent(known, c)
			notices.add(c, corev1.EventTypeNormal, reason, message)
		default:
			log.Info("Device is not healthy", "action", c.Finding.Action)
			notices.add(c, corev1.EventTypeWarning, "GPU"+c.Finding.State.String(), unhealthyMessage(c))
		}
		d.healthReport.add(c)
	}
	if !d.newerLeads.Load() {
		for _, n := range notices {
			d.events.AboutGPU(d.events.Node(), n.gpu, n.kind, n.reason, n.String())
		}
	}
	d.updateHealthMetrics()
	wake(d.healthReport.wake)
}

func unhealthyMessage(c health.Change) string {
	return fmt.Sprintf("%s is %s: %s: %s", c.Device(), c.Finding.State, c.Finding.Reason, c.Finding.Action)
}

func recoveredMessage(c health.Change) string {
	return fmt.Sprintf("%s no longer has this problem: %s (%s)", c.Device(), c.Finding.Reason, c.Why)
}

// recoveryEvent returns reason and message of the Event for a health problem that ended. The reason
// is GPURecovered if the device has no other problem, else GPUChanged.
func (d *Driver) recoveryEvent(known knownGPUs, c health.Change) (reason, message string) {
	n, _ := device.ParseName(c.Device())
	if v := d.health.View().Of(known.gpu(c.Card), n); v.State > health.Healthy {
		return "GPUChanged", fmt.Sprintf("%s; it is %s: %s", recoveredMessage(c), v.State, v.Message())
	}
	return "GPURecovered", recoveredMessage(c)
}

// updateHealthMetrics sets the health metrics of every GPU and of each partition that has a health
// problem of its own.
func (d *Driver) updateHealthMetrics() {
	view := d.health.View()
	var all, findings []metrics.DeviceHealth
	for _, g := range d.node.View().GPUs {
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

// countHealthEvents sets the metrics that count hardware events such as XIDs. failure is the reason
// why the driver receives no events, or "" if it does.
func (d *Driver) countHealthEvents(events map[health.EventKey]uint64, failure string) {
	for e, n := range events {
		d.metrics.HealthEvents(e.Card.WholeName(), e.Code, n)
	}
	d.metrics.ReceivesEvents(failure == "")
}

func (r *healthReport) add(c health.Change) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.pending) >= maxPendingHealthChanges {
		mildest := 0
		for i, p := range r.pending {
			if p.Finding.State < r.pending[mildest].Finding.State {
				mildest = i
			}
		}
		r.pending = slices.Delete(r.pending, mildest, mildest+1)
	}
	r.pending = append(r.pending, c)
}

func (r *healthReport) take() []health.Change {
	r.mu.Lock()
	defer r.mu.Unlock()
	taken := r.pending
	r.pending = nil
	return taken
}

// knownGPUs has the offered GPUs by their PCI address.
type knownGPUs map[device.PCIAddress]device.GPU

func (d *Driver) knownGPUs() knownGPUs {
	known := knownGPUs{}
	for _, g := range d.node.View().GPUs {
		known[g.PCIAddress] = g.GPU
	}
	return known
}

// gpu returns the GPU at the card's PCI address. If the node does not offer it, the result has only
// the card's PCI address and UUID.
func (k knownGPUs) gpu(c device.Card) device.GPU {
	if g, is := k[c.PCIAddress]; is {
		return g
	}
	return device.GPU{PCIAddress: c.PCIAddress, UUID: c.UUID}
}

// setUpHealth creates d.health with the configured XID rules and taint effects. It returns an error
// if their configuration is invalid. watch is the function that watches the hardware, or nil.
func (d *Driver) setUpHealth(watch func(context.Context, func(device.Signal)) error, bootID string) error {
	effects, err := health.ParseEffects(d.cfg.HealthEffects)
	if err != nil {
		return err
	}
	rules, err := health.ParseRules(d.cfg.XIDRules)
	if err != nil {
		return err
	}
	d.watchHardware = watch
	d.healthReport.wake = make(chan struct{}, 1)
	d.health = newHealthWatch(effects, rules, d.cfg.StateDir(), bootID, d.inv)
	d.health.onCounts = d.countHealthEvents
	d.health.inUse = d.gpuInUse
	d.health.onInvalid = func(message string) { d.events.Warn("HealthNotCleared", message) }
	return nil
}

// gpuInUse reports whether a claim holds the GPU or a part of it. If a claim's checkpoint record
// cannot be read, the answer is true.
func (d *Driver) gpuInUse(gpu string) bool {
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

// refuseLost returns an error if the health watcher reports one of the claim's devices as lost and
// the claim is not prepared yet. To prepare a whole GPU the driver does not query the hardware, so
// without this error the container would start without a GPU.
func (d *Driver) refuseLost(v *nodeview.View, c *resourceapi.ResourceClaim) error {
	refusal := d.healthRefusal(v, c)
	if refusal == nil {
		return nil
	}
	if _, prepared, err := d.preparer.Records.Load(c.UID); err != nil || prepared {
		return nil //nolint:nilerr // the Preparer reports an unreadable record
	}
	return refusal
}

// healthRefusal returns an error that names the claim's first device that the health watcher
// reports as lost, or nil if none is lost.
func (d *Driver) healthRefusal(v *nodeview.View, c *resourceapi.ResourceClaim) error {
	view := d.health.View()
	if view == nil || c.Status.Allocation == nil {
		return nil
	}
	for _, r := range c.Status.Allocation.Devices.Results {
		n, ok := device.ParseName(r.Device)
		if r.Driver != DriverName || !ok {
			continue
		}
		for _, g := range v.GPUs {
			if verdict := view.Of(g.GPU, n); g.WholeName() == n.GPU && verdict.State == health.Lost {
				return cause.Refusal(c.Namespace+"/"+c.Name, cause.Device,
					"request %s was allocated device %s, which cannot be prepared: %s", r.Request, r.Device, verdict.Message())
			}
		}
	}
	return nil
}

// startHealth starts the goroutines that evaluate the hardware's health signals and report changes.
// They call publish after each change, to update the slices. Without a hardware watcher startHealth
// does nothing.
func (d *Driver) startHealth(ctx context.Context, wg *sync.WaitGroup, publish func()) {
	if d.watchHardware == nil {
		return
	}
	d.health.onChange = func(ctx context.Context, changes []health.Change) {
		publish()
		d.reportHealth(ctx, changes)
	}
	loop := d.health.newLoop(ctx)
	d.updateHealthMetrics()
	wg.Go(func() { loop.Run(ctx) })
	wg.Go(func() { d.reportToPods(ctx) })
}

// hardwareWatcher returns a function that watches the hardware until its context ends. The function
// may be called again. An error means that the plugin may still have the GPUs open.
func (d *Driver) hardwareWatcher(ctx context.Context) func(context.Context) error {
	if d.watchHardware == nil {
		return func(running context.Context) error {
			<-running.Done()
			return nil
		}
	}
	modes := &modeWatch{inv: d.inv, requestScan: d.inv.RequestScan, reported: map[device.PCIAddress]device.MIGMode{}}
	return func(running context.Context) error {
		return d.watchHardware(running, func(s device.Signal) {
			modes.observe(s.Condition)
			// When the plugin stops, its watcher closes the hardware. A signal about that says nothing about
			// the GPUs' health.
			if ctx.Err() == nil {
				d.health.Enqueue(ctx, s)
			}
		})
	}
}
