package metrics

import "github.com/prometheus/client_golang/prometheus"

// healthMetrics are about what the hardware says of itself.
type healthMetrics struct {
	gpus    *current
	known   *current
	events  *prometheus.CounterVec
	hears   prometheus.Gauge
	tainted *current
	// released says that the hardware was let go of.
	released prometheus.Gauge
}

func newHealthMetrics() healthMetrics {
	return healthMetrics{
		gpus: newCurrent("gpu_health", "1 for the state of each GPU, the gravest of what is known of it: Healthy, Degraded, Unknown, Unhealthy or Lost, and of each partition "+
			"of which something is known. The code is one word for the reason, empty while healthy.", "device", "state", "code"),
		known: newCurrent("health_findings", "1 for each thing that is known of a GPU or a part of it and that is not over, also where it makes nothing unhealthy, by the state "+
			"that it is a reason for.", "device", "code", "state"),
		events:   counters("health_events_total", "Events of GPUs that say something about health, by GPU and kind: xid-79, double-bit-ecc, …", "gpu", "code"),
		hears:    gauge("health_events_heard", "1 while the hardware's events are listened to, else 0: then only regular questions show how GPUs are."),
		tainted:  newCurrent("tainted_devices", "Devices with a taint of this driver, by the taint's key without its domain and by its effect.", "key", "effect"),
		released: gauge("driver_released", "1 while the hardware is let go of so that its driver can be changed, else 0."),
	}
}

func (h healthMetrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{h.gpus, h.known, h.events, h.tainted, h.released}
}

// DeviceHealth is how a device is.
type DeviceHealth struct{ Device, State, Code string }

// Health sets how all devices are of which something is known.
func (m *Metrics) Health(all []DeviceHealth) {
	m.health.gpus.replace(func(set func(n int, labels ...string)) {
		for _, d := range all {
			set(1, d.Device, d.State, d.Code)
		}
	})
}

// HealthFindings sets what is known.
func (m *Metrics) HealthFindings(all []DeviceHealth) {
	m.health.known.replace(func(set func(n int, labels ...string)) {
		for _, f := range all {
			set(1, f.Device, f.Code, f.State)
		}
	})
}

// HealthEvents counts events of a GPU.
func (m *Metrics) HealthEvents(gpu, code string, n uint64) {
	m.health.events.WithLabelValues(gpu, code).Add(float64(n))
}

// Released says whether the hardware is let go of.
func (m *Metrics) Released(is bool) { m.health.released.Set(number(is)) }

// Hears says whether events are listened to. A node on which nobody listens by intent does not have the metric.
func (m *Metrics) Hears(is bool) {
	m.listens.Do(func() { m.Registry.MustRegister(m.health.hears) })
	m.health.hears.Set(number(is))
}

// Taint is one kind of taint on devices. Key lacks the driver's domain.
type Taint struct{ Key, Effect string }

// Tainted sets how many devices have taints.
func (m *Metrics) Tainted(n map[Taint]int) {
	m.health.tainted.replace(func(set func(n int, labels ...string)) {
		for t, count := range n {
			set(count, t.Key, t.Effect)
		}
	})
}
