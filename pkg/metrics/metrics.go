// Package metrics names what the plugin counts and times, in one place. Durations are in seconds, in buckets from one millisecond: a Prepare that
// does its two durable writes takes a few of them. The package decides nothing and knows no other room.
package metrics

import (
	"runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// Operation is a kubelet call that is timed.
type Operation string

const (
	Prepare   Operation = "prepare"
	Unprepare Operation = "unprepare"
)

// Metrics is the plugin's registry and its instruments.
type Metrics struct {
	Registry *prometheus.Registry

	duration       *prometheus.HistogramVec
	requestErrors  *prometheus.CounterVec
	statusErrors   *prometheus.CounterVec
	publishErrors  prometheus.Counter
	repairs        *prometheus.CounterVec
	devices        *prometheus.GaugeVec
	ready          prometheus.Gauge
	publisher      prometheus.Gauge
	hasGPU         sync.Once
	devicePlugin   prometheus.Gauge
	slowScheduler  prometheus.Gauge
	withheldClaims prometheus.Gauge
	unreadableLeft prometheus.Gauge
	mig            migMetrics
	health         healthMetrics
	listens        sync.Once
	mps            *mpsMetrics
}

// New makes a registry of its own, so that two in one process (a test) do not meet.
func New(version string) *Metrics {
	m := &Metrics{
		Registry: prometheus.NewRegistry(),
		duration: histograms("request_duration_seconds", "Time to prepare or unprepare one claim, successful or not.",
			prometheus.ExponentialBuckets(0.001, 2, 16), "operation"), // 1 ms … 33 s; the kubelet gives a call 45 s
		requestErrors: counters("request_errors_total", "Claims that could not be prepared or unprepared, by cause.", "operation", "cause"),
		statusErrors:  counters("claim_status_errors_total", "Failed attempts to write what a claim got into its status.devices.", "cause"),
		publishErrors: prometheus.NewCounter(prometheus.CounterOpts(named("publish_errors_total", "Failed attempts to publish ResourceSlices; each is retried."))),
		repairs:       counters("repairs_total", "Things that were found missing or altered on the node and mended, by kind.", "kind"),
		devices:       gauges("inventory_devices", "Devices that this node offers, by type.", "type"),
		ready: gauge("inventory_ready",
			"1 when the NVIDIA driver answers and the node's devices are known, else 0. Absent on a node without a GPU."),
		publisher:      gauge("publisher", "1 in the one instance per node that publishes ResourceSlices, else 0."),
		devicePlugin:   gauge("device_plugin", "1 while NVIDIA's device plugin offers GPUs of the same node, else 0."),
		slowScheduler:  gauge("slow_scheduler", "1 on a node that publishes counters to an API server before Kubernetes 1.37, whose scheduler is slow with them, else 0."),
		withheldClaims: gauge("predecessor_claims", "Claims that NVIDIA's reference driver prepared on this node and that have not ended: their GPUs are not offered."),
		unreadableLeft: gauge("predecessor_unreadable", "1 while the reference driver's checkpoint cannot be understood, so that no GPU is offered, else 0."),
		mig:            newMIGMetrics(),
		health:         newHealthMetrics(),
		mps:            newMPSMetrics(),
	}
	build := named("build_info", "Always 1; the labels say what runs.")
	build.ConstLabels = prometheus.Labels{"version": version, "go_version": runtime.Version()}
	m.Registry.MustRegister(m.duration, m.requestErrors, m.statusErrors, m.publishErrors, m.repairs, m.devices, m.publisher, m.devicePlugin, m.slowScheduler, m.withheldClaims, m.unreadableLeft,
		m.mig.duration, m.mig.errors, m.mig.instances, m.mig.gpus, m.mps.start, m.mps.errors, m.mps.daemons, m.mps.restarts,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts(build), func() float64 { return 1 }),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.Registry.MustRegister(m.health.collectors()...)
	return m
}

// named puts the prefix that all of the plugin's own metrics have in front.
func named(name, help string) prometheus.Opts {
	return prometheus.Opts{Name: "gpu_dra_" + name, Help: help}
}

func counters(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts(named(name, help)), labels)
}

func gauge(name, help string) prometheus.Gauge {
	return prometheus.NewGauge(prometheus.GaugeOpts(named(name, help)))
}

func gauges(name, help string, labels ...string) *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts(named(name, help)), labels)
}

func histograms(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: named(name, help).Name, Help: help, Buckets: buckets}, labels)
}

// Request records one claim of one kubelet call. cause is empty when it succeeded.
func (m *Metrics) Request(op Operation, took time.Duration, cause string) {
	m.duration.WithLabelValues(string(op)).Observe(took.Seconds())
	if cause != "" {
		m.requestErrors.WithLabelValues(string(op), cause).Inc()
	}
}

// Held has count asked, with each scrape, how much is prepared then: who holds hundreds of claims pays nothing for that in a kubelet's call. What cannot be
// counted is left out.
func (m *Metrics) Held(count func() (claims, gpus int, err error)) {
	m.Registry.MustRegister(held{count})
}

type held struct {
	count func() (claims, gpus int, err error)
}

var (
	heldClaims = prometheus.NewDesc(named("prepared_claims", "").Name, "Claims that are held on this node.", nil, nil)
	heldGPUs   = prometheus.NewDesc(named("held_gpus", "").Name, "GPUs that claims hold for themselves on this node.", nil, nil)
)

func (held) Describe(to chan<- *prometheus.Desc) { to <- heldClaims; to <- heldGPUs }

func (h held) Collect(to chan<- prometheus.Metric) {
	claims, gpus, err := h.count()
	if err != nil {
		return
	}
	to <- prometheus.MustNewConstMetric(heldClaims, prometheus.GaugeValue, float64(claims))
	to <- prometheus.MustNewConstMetric(heldGPUs, prometheus.GaugeValue, float64(gpus))
}

// Inventory sets what the node offers now.
func (m *Metrics) Inventory(ready bool, gpus int) {
	// Only from here on: a node without a GPU has nothing that could be ready, and an alert must not take it for one that is not.
	m.hasGPU.Do(func() { m.Registry.MustRegister(m.ready) })
	m.ready.Set(number(ready))
	m.devices.WithLabelValues("gpu").Set(float64(gpus))
}

// ClaimStatusError counts one failed attempt to write into a claim's status.
func (m *Metrics) ClaimStatusError(cause string) { m.statusErrors.WithLabelValues(cause).Inc() }

// PublishError counts one failed attempt.
func (m *Metrics) PublishError() { m.publishErrors.Inc() }

// Publisher says whether this instance is the one that publishes.
func (m *Metrics) Publisher(is bool) { m.publisher.Set(number(is)) }

// DevicePlugin says whether NVIDIA's device plugin serves the same node.
func (m *Metrics) DevicePlugin(there bool) { m.devicePlugin.Set(number(there)) }

// SlowScheduler says whether this node publishes counters to a cluster whose scheduler is slow with
// them.
func (m *Metrics) SlowScheduler(is bool) { m.slowScheduler.Set(number(is)) }

// Withheld says what the reference driver has left on the node.
func (m *Metrics) Withheld(claims int, unreadable bool) {
	m.withheldClaims.Set(float64(claims))
	m.unreadableLeft.Set(number(unreadable))
}

// Repaired counts one thing mended.
func (m *Metrics) Repaired(kind string) { m.repairs.WithLabelValues(kind).Inc() }

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
