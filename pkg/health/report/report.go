// Package report tells people about health changes.
//
// A [Reporter] writes each change to the log and to the metrics, and combines the changes of a GPU
// to few Events: on the Node at once, and on the Pods that have the affected devices a little
// later. While a newer plugin instance leads, that instance writes the Events.
//
// The queue for Pods is bounded: while the API server does not answer for long, further changes get
// no Events on Pods. The package judges nothing: changes and verdicts come from package health.
package report

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
)

// maxPending is how many reports can wait until Run writes their changes as Events on Pods.
// Normally they wait for seconds.
const maxPending = 64

// Events writes Events. It must not block.
type Events interface {
	Event(reason events.Reason, message string)
	AboutGPU(object *corev1.ObjectReference, gpu string, reason events.Reason, message string)
	Node() *corev1.ObjectReference
}

// Records has the checkpoint records of prepared claims.
type Records interface {
	List() ([]checkpoint.Entry, error)
	Load(claim types.UID) (checkpoint.Record, bool, error)
}

// Reporter reports health changes. Its methods do not block, except Run.
type Reporter struct {
	client  kubernetes.Interface // for the Pods of a claim
	events  Events
	metrics *metrics.Metrics
	records Records
	// newerLeads reports whether a newer plugin instance leads on this node.
	newerLeads func() bool

	pending chan []change // for Run
}

// New returns a Reporter.
func New(client kubernetes.Interface, e Events, m *metrics.Metrics, r Records, newerLeads func() bool) *Reporter {
	return &Reporter{client: client, events: e, metrics: m, records: r, newerLeads: newerLeads, pending: make(chan []change, maxPending)}
}

// change is a health change, and what its Events say.
type change struct {
	health.Change
	// gpu is the GPU of the change, as far as the inventory knows it.
	gpu     device.GPU
	reason  events.Reason
	message string
}

// Report reports the changes. view has the verdicts after them. gpus are the GPUs of the node,
// including unhealthy ones that the inventory no longer finds.
func (r *Reporter) Report(ctx context.Context, view *health.View, gpus []device.GPU, changes []health.Change) {
	logger := klog.FromContext(ctx)
	var notices notices
	var forPods []change
	for _, of := range changes {
		c := newChange(view, gpus, of)
		log := logger.WithValues("device", c.Device(), "state", c.Finding.State.String(), "code", c.Finding.Code, "reason", c.Finding.Reason)
		switch {
		case c.Finding.State == health.Healthy && c.Over:
			log.V(4).Info("Problem of GPU did not recur")
			continue
		case c.Finding.State == health.Healthy:
			log.Info("GPU reported a problem that does not affect its health", "action", c.Finding.Action)
		case c.Over:
			log.Info("Health problem of device ended", "why", c.Why, "since", c.Finding.First.UTC().Format(time.RFC3339))
			notices.add(c, c.message)
		default:
			log.Info("Device is not healthy", "action", c.Finding.Action)
			notices.add(c, c.message)
		}
		forPods = append(forPods, c)
	}
	if !r.newerLeads() {
		notices.write(r.events, r.events.Node())
	}
	r.updateMetrics(view, gpus)
	if len(forPods) == 0 {
		return
	}
	select {
	case r.pending <- forPods:
	default:
		logger.Info("Dropped Events about health changes for Pods: too many wait to be written", "changes", len(forPods))
	}
}

// reasons has the reason of the Event by the state that a device enters.
var reasons = map[health.State]events.Reason{
	health.Degraded: events.GPUDegraded, health.Unknown: events.GPUUnknown, health.Unhealthy: events.GPUUnhealthy, health.Lost: events.GPULost,
}

// newChange returns c with what its Events say.
func newChange(view *health.View, gpus []device.GPU, c health.Change) change {
	gpu := device.GPU{PCIAddress: c.Card.PCIAddress, UUID: c.Card.UUID}
	if i := slices.IndexFunc(gpus, func(g device.GPU) bool { return g.PCIAddress == c.Card.PCIAddress }); i >= 0 {
		gpu = gpus[i]
	}
	f := c.Finding
	switch {
	case f.State == health.Healthy:
		return change{c, gpu, events.GPUReport, fmt.Sprintf("%s: %s", f.Reason, f.Action)}
	case !c.Over:
		return change{c, gpu, reasons[f.State],
			fmt.Sprintf("%s is %s: %s: %s", c.Device(), f.State, f.Reason, f.Action)}
	}
	recovered := fmt.Sprintf("%s no longer has this problem: %s (%s)", c.Device(), f.Reason, c.Why)
	name, _ := device.ParseName(c.Device())
	if v := view.Of(gpu, name); v.State > health.Healthy {
		return change{c, gpu, events.GPUChanged, fmt.Sprintf("%s; it is %s: %s", recovered, v.State, v.Message())}
	}
	return change{c, gpu, events.GPURecovered, recovered}
}

// NotCleared reports that an admin's request to clear health problems names unknown GPUs.
func (r *Reporter) NotCleared(message string) { r.events.Event(events.HealthNotCleared, message) }

// Count sets the metrics that count hardware events such as XIDs. failure is the reason why the
// driver receives no events, or "" if it does.
func (r *Reporter) Count(events map[health.EventKey]uint64, failure string) {
	for e, n := range events {
		r.metrics.HealthEvents(e.Card.WholeName(), e.Code, n)
	}
	r.metrics.ReceivesEvents(failure == "")
}

// updateMetrics sets the health metrics of every GPU and of each partition that has a health
// problem of its own.
func (r *Reporter) updateMetrics(view *health.View, gpus []device.GPU) {
	var all, findings []metrics.DeviceHealth
	for _, g := range gpus {
		names := map[string]bool{g.WholeName(): true}
		for _, f := range view.Findings(g.PCIAddress) {
			on := health.Change{Card: g.Card(), Finding: *f}.Device()
			names[on] = true
			findings = append(findings, metrics.DeviceHealth{Device: on, State: f.State.String(), Code: f.Code})
		}
		for name := range names {
			n, ok := device.ParseName(name)
			if !ok {
				continue
			}
			v, code := view.Of(g, n), ""
			if len(v.Causes) > 0 {
				code = v.Causes[0].Code
			}
			all = append(all, metrics.DeviceHealth{Device: name, State: v.State.String(), Code: code})
		}
	}
	r.metrics.Health(all)
	r.metrics.HealthFindings(findings)
}
