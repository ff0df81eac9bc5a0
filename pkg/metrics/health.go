package metrics

import (
	"github.com/prometheus/client_golang/prometheus"
)

type healthMetrics struct {
	gpus           *current
	findings       *current
	events         *prometheus.CounterVec
	receivesEvents *prometheus.GaugeVec
	tainted        *current
	released       prometheus.Gauge
}

func newHealthMetrics(auto factory) *healthMetrics {
	return &healthMetrics{
		gpus: auto.current("gpu_health", "1 for the state of each GPU, and of each partition with a finding: Healthy, Degraded, "+
			"Unknown, Unhealthy or Lost. The worst finding decides. "+
			"The code names the reason and is empty while healthy.", "device", "state", "code"),
		findings: auto.current("health_findings", "1 for each finding about a GPU or a part of it that has not ended, by the state "+
			"that it causes. "+
			"Findings that do not make a device unhealthy are included.", "device", "state", "code"),
		events: auto.counters("health_events_total", "Events of GPUs about health, by GPU and kind: xid-79, double-bit-ecc, …", "gpu", "code"),
		receivesEvents: auto.gauges("health_events_heard",
			"1 while the plugin receives the hardware's events, else 0. Without events only polling finds health problems."),
		tainted: auto.current("tainted_devices", "Devices with a taint of this driver, by the taint's key without its domain and by "+
			"its effect.", "key", "effect"),
		released: auto.gauge("driver_released", "1 while the plugin has released the hardware for a driver upgrade, else 0."),
	}
}

// DeviceHealth is the health of one device, or one finding (a single problem of the device). Code
// names the reason for State.
type DeviceHealth struct{ Device, State, Code string }

// Health sets the current health of every device. A device that is missing in the parameter all
// loses its time series.
func (m *Metrics) Health(all []DeviceHealth) { m.health.gpus.replaceHealth(all) }

// HealthFindings sets the current findings (single problems) of every device. A finding that is
// missing in the parameter all loses its time series.
func (m *Metrics) HealthFindings(all []DeviceHealth) { m.health.findings.replaceHealth(all) }

func (c *current) replaceHealth(all []DeviceHealth) {
	c.replace(func(set func(n int, labels ...string)) {
		for _, d := range all {
			set(1, d.Device, d.State, d.Code)
		}
	})
}

// HealthEvents adds n events with this code to the counter of a GPU.
func (m *Metrics) HealthEvents(gpu, code string, n uint64) {
	m.health.events.WithLabelValues(gpu, code).Add(float64(n))
}

// Released sets whether the plugin has released the GPUs for a driver upgrade.
func (m *Metrics) Released(is bool) { m.health.released.Set(number(is)) }

// ReceivesEvents sets whether the plugin receives the hardware's events. The metric appears only
// after the first call, so it is missing on a node that does not watch events.
func (m *Metrics) ReceivesEvents(is bool) {
	m.health.receivesEvents.WithLabelValues().Set(number(is))
}

// Taint is one kind of taint on devices. Key is the taint's key without the driver's domain.
type Taint struct{ Key, Effect string }

// Tainted sets how many devices have each kind of taint. A kind of taint that is missing in the
// parameter n loses its time series.
func (m *Metrics) Tainted(n map[Taint]int) {
	m.health.tainted.replace(func(set func(n int, labels ...string)) {
		for t, count := range n {
			set(count, t.Key, t.Effect)
		}
	})
}
