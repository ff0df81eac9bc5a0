// Package metrics defines all metrics of the plugin. Durations are in seconds. Their buckets begin
// at one millisecond, because a Prepare with its two durable writes takes a few milliseconds. The
// package only stores the values that other packages set, and imports no other package of the
// driver.
package metrics

import (
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Operation names the kubelet call that a duration or an error belongs to.
type Operation string

const (
	Prepare   Operation = "prepare"
	Unprepare Operation = "unprepare"
)

// Metrics holds the plugin's Prometheus registry and the metrics in it.
type Metrics struct {
	Registry *prometheus.Registry
	// prefixed registers metrics with Registry, and adds the prefix gpu_dra_ to their names.
	prefixed prometheus.Registerer

	duration             *prometheus.HistogramVec
	inFlight             *prometheus.GaugeVec
	requestErrors        *prometheus.CounterVec
	statusErrors         *prometheus.CounterVec
	publishErrors        prometheus.Counter
	repairs              *prometheus.CounterVec
	devices              *prometheus.GaugeVec
	ready                *prometheus.GaugeVec
	problems             *prometheus.GaugeVec
	publisher            prometheus.Gauge
	devicePlugin         prometheus.Gauge
	slowScheduler        prometheus.Gauge
	referenceClaims      prometheus.Gauge
	unreadableCheckpoint prometheus.Gauge
	mig                  migMetrics
	health               *healthMetrics
	mps                  *mpsMetrics
}

// New returns metrics with a registry of their own, so that tests can have several in one process.
// A new metric needs a field, a line here, a method that sets it, and a row in docs/operations.md.
func New(version string) *Metrics {
	registry := prometheus.NewRegistry()
	prefixed := prometheus.WrapRegistererWithPrefix("gpu_dra_", registry)
	auto := factory{promauto.With(prefixed)}
	m := &Metrics{
		Registry: registry, prefixed: prefixed,
		duration: auto.histograms("request_duration_seconds", "Time to prepare or unprepare one claim, successful or not.",
			prometheus.ExponentialBuckets(0.001, 2, 16), "operation"), // 1 ms … 33 s; the kubelet gives a call 45 s
		inFlight: auto.gauges("requests_in_flight", "Claims that the plugin prepares or unprepares now.", "operation"),
		requestErrors: auto.counters("request_errors_total", "Claims that could not be prepared or unprepared, by cause.",
			"operation", "cause"),
		statusErrors:  auto.counters("claim_status_errors_total", "Failed attempts to write a claim's devices into its status.devices.", "cause"),
		publishErrors: auto.counter("publish_errors_total", "Failed attempts to publish ResourceSlices. Each is retried."),
		repairs:       auto.counters("repairs_total", "Repairs of things that were missing or altered on the node, by kind.", "kind"),
		devices:       auto.gauges("inventory_devices", "Devices that this node offers, by type.", "type"),
		ready:         auto.gauges("inventory_ready", "1 while the node prepares claims, else 0. Absent on a node without a GPU."),
		problems: auto.gauges("inventory_problems",
			"Problems that the last scan found, by kind: gpu, missing-file, refused-edit, unknown-profile. Absent on a node without a GPU.", "kind"),
		publisher:    auto.gauge("publisher", "1 in the one instance per node that publishes ResourceSlices, else 0."),
		devicePlugin: auto.gauge("device_plugin", "1 while NVIDIA's device plugin offers GPUs of the same node, else 0."),
		slowScheduler: auto.gauge("slow_scheduler",
			"1 on a node that publishes counters to a cluster before Kubernetes 1.37, whose scheduler is slow with them, else 0."),
		referenceClaims: auto.gauge("predecessor_claims",
			"Claims that NVIDIA's DRA driver prepared on this node and that have not ended. Their GPUs are not offered."),
		unreadableCheckpoint: auto.gauge("predecessor_unreadable",
			"1 while the checkpoint of NVIDIA's DRA driver cannot be read and no GPU is offered, else 0."),
		mig:    newMIGMetrics(auto),
		health: newHealthMetrics(auto),
		mps:    newMPSMetrics(auto),
	}
	auto.NewGauge(prometheus.GaugeOpts{
		Name: "build_info", Help: "Always 1. The labels name the running version.",
		ConstLabels: prometheus.Labels{"version": version, "go_version": runtime.Version()},
	}).Set(1)
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// factory creates metrics that are registered.
type factory struct{ promauto.Factory }

func (f factory) counter(name, help string) prometheus.Counter {
	return f.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
}

func (f factory) counters(name, help string, labels ...string) *prometheus.CounterVec {
	return f.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
}

func (f factory) gauge(name, help string) prometheus.Gauge {
	return f.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
}

func (f factory) gauges(name, help string, labels ...string) *prometheus.GaugeVec {
	return f.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
}

func (f factory) histograms(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	return f.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
}

// Request counts a claim that the plugin begins to prepare or unprepare. The caller calls done when
// that has ended, with the cause of its error or "". Done returns the time in between.
func (m *Metrics) Request(op Operation) (done func(cause string) time.Duration) {
	start, now := time.Now(), m.inFlight.WithLabelValues(string(op))
	now.Inc()
	return func(cause string) time.Duration {
		now.Dec()
		took := time.Since(start)
		m.duration.WithLabelValues(string(op)).Observe(took.Seconds())
		if cause != "" {
			m.requestErrors.WithLabelValues(string(op), cause).Inc()
		}
		return took
	}
}

// CountPrepared registers the metrics of prepared claims. At each scrape, these metrics call the
// function count, so that kubelet calls need not count hundreds of claims. If count fails, the
// scrape lacks these metrics.
func (m *Metrics) CountPrepared(count func() (claims, gpus int, err error)) {
	m.prefixed.MustRegister(collector{[]*prometheus.Desc{preparedClaims, heldGPUs}, func(send sendFunc) {
		if claims, gpus, err := count(); err == nil {
			send(preparedClaims, float64(claims))
			send(heldGPUs, float64(gpus))
		}
	}})
}

var (
	preparedClaims = prometheus.NewDesc("prepared_claims", "Claims that are prepared on this node.", nil, nil)
	heldGPUs       = prometheus.NewDesc("held_gpus", "GPUs of this node that claims hold exclusively.", nil, nil)
)

// Inventory sets whether the node's devices are known, and how many whole GPUs the node offers.
func (m *Metrics) Inventory(ready bool, gpus int) {
	// The vector, although without labels, has no time series before this call. A node without a GPU
	// never calls Inventory, so it lacks the metric and triggers no alert.
	m.ready.WithLabelValues().Set(number(ready))
	m.devices.WithLabelValues("gpu").Set(float64(gpus))
}

// InventoryProblems sets how many problems of each kind the last scan of the node found.
func (m *Metrics) InventoryProblems(byKind map[string]int) {
	for kind, n := range byKind {
		m.problems.WithLabelValues(kind).Set(float64(n))
	}
}

// ClaimStatusError counts one failed attempt to write a claim's status.devices.
func (m *Metrics) ClaimStatusError(cause string) { m.statusErrors.WithLabelValues(cause).Inc() }

// PublishError counts one failed attempt to publish ResourceSlices.
func (m *Metrics) PublishError() { m.publishErrors.Inc() }

// Publisher sets whether this plugin instance is the one that publishes the node's ResourceSlices.
func (m *Metrics) Publisher(is bool) { m.publisher.Set(number(is)) }

// DevicePlugin sets whether NVIDIA's device plugin offers GPUs of the same node.
func (m *Metrics) DevicePlugin(there bool) { m.devicePlugin.Set(number(there)) }

// SlowScheduler sets whether this node publishes shared counters to a cluster whose scheduler is
// slow with them, that is before Kubernetes 1.37.
func (m *Metrics) SlowScheduler(is bool) { m.slowScheduler.Set(number(is)) }

// ReferenceDriver sets how many claims that NVIDIA's DRA driver prepared still exist on this node.
// unreadable says whether the checkpoint of that driver cannot be read.
func (m *Metrics) ReferenceDriver(claims int, unreadable bool) {
	m.referenceClaims.Set(float64(claims))
	m.unreadableCheckpoint.Set(number(unreadable))
}

// Repaired counts one repair that the plugin made on the node. kind says what it repaired.
func (m *Metrics) Repaired(kind string) { m.repairs.WithLabelValues(kind).Inc() }

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
