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
	publishErrors  prometheus.Counter
	repairs        *prometheus.CounterVec
	preparedClaims prometheus.Gauge
	heldGPUs       prometheus.Gauge
	devices        *prometheus.GaugeVec
	ready          prometheus.Gauge
	publisher      prometheus.Gauge
	hasGPU         sync.Once
}

// New makes a registry of its own, so that two in one process (a test) do not meet.
func New(version string) *Metrics {
	m := &Metrics{
		Registry: prometheus.NewRegistry(),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "gpu_dra_request_duration_seconds",
			Help:    "Time to prepare or unprepare one claim, successful or not.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 16), // 1 ms … 33 s; the kubelet gives a call 45 s
		}, []string{"operation"}),
		requestErrors: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "gpu_dra_request_errors_total",
			Help: "Claims that could not be prepared or unprepared, by cause.",
		}, []string{"operation", "cause"}),
		publishErrors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "gpu_dra_publish_errors_total",
			Help: "Failed attempts to publish ResourceSlices; each is retried.",
		}),
		repairs: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "gpu_dra_repairs_total",
			Help: "Things that were found missing or altered on the node and mended, by kind.",
		}, []string{"kind"}),
		preparedClaims: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "gpu_dra_prepared_claims",
			Help: "Claims that are held on this node.",
		}),
		heldGPUs: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "gpu_dra_held_gpus",
			Help: "GPUs that claims hold for themselves on this node.",
		}),
		devices: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "gpu_dra_inventory_devices",
			Help: "Devices that this node offers, by type.",
		}, []string{"type"}),
		ready: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "gpu_dra_inventory_ready",
			Help: "1 when the NVIDIA driver answers and the node's devices are known, else 0. Absent on a node without a GPU.",
		}),
		publisher: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "gpu_dra_publisher",
			Help: "1 in the one instance per node that publishes ResourceSlices, else 0.",
		}),
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name:        "gpu_dra_build_info",
		Help:        "Always 1; the labels say what runs.",
		ConstLabels: prometheus.Labels{"version": version, "go_version": runtime.Version()},
	})
	build.Set(1)
	m.Registry.MustRegister(m.duration, m.requestErrors, m.publishErrors, m.repairs, m.preparedClaims, m.heldGPUs,
		m.devices, m.publisher, build,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Request records one claim of one kubelet call. cause is empty when it succeeded.
func (m *Metrics) Request(op Operation, took time.Duration, cause string) {
	m.duration.WithLabelValues(string(op)).Observe(took.Seconds())
	if cause != "" {
		m.requestErrors.WithLabelValues(string(op), cause).Inc()
	}
}

// Held sets how much is prepared now.
func (m *Metrics) Held(claims, gpus int) {
	m.preparedClaims.Set(float64(claims))
	m.heldGPUs.Set(float64(gpus))
}

// Inventory sets what the node offers now.
func (m *Metrics) Inventory(ready bool, gpus int) {
	// Only from here on: a node without a GPU has nothing that could be ready, and an alert must not take it for one that is not.
	m.hasGPU.Do(func() { m.Registry.MustRegister(m.ready) })
	m.ready.Set(number(ready))
	m.devices.WithLabelValues("gpu").Set(float64(gpus))
}

// PublishError counts one failed attempt.
func (m *Metrics) PublishError() { m.publishErrors.Inc() }

// Publisher says whether this instance is the one that publishes.
func (m *Metrics) Publisher(is bool) { m.publisher.Set(number(is)) }

// Repaired counts one thing mended.
func (m *Metrics) Repaired(kind string) { m.repairs.WithLabelValues(kind).Inc() }

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
