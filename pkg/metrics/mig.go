package metrics

import (
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// migMetrics are about what GPUs are cut into.
type migMetrics struct {
	duration  *prometheus.HistogramVec
	errors    *prometheus.CounterVec
	instances *current
	gpus      *current
}

func newMIGMetrics() migMetrics {
	return migMetrics{
		duration: histograms("mig_operation_duration_seconds", "Time of one call that looks at or changes how a GPU is cut, successful or not.",
			prometheus.ExponentialBuckets(0.01, 2, 13), "operation"), // 10 ms … 41 s
		errors:    counters("mig_operation_errors_total", "Calls that look at or change how a GPU is cut and failed, by code.", "operation", "code"),
		instances: newCurrent("mig_instances", "MIG devices by profile and state: offered (cut or not), made for claims (ours), made by an admin (foreign).", "profile", "state"),
		gpus:      newCurrent("mig_gpus", "GPUs that can be cut, by why they are not offered as their policy wants; the reason is empty for those that are.", "reason"),
	}
}

// MIGCall records one call that looks at or changes how a GPU is cut. code is empty when it succeeded.
func (m *Metrics) MIGCall(operation string, took time.Duration, code string) {
	m.mig.duration.WithLabelValues(operation).Observe(took.Seconds())
	if code != "" {
		m.mig.errors.WithLabelValues(operation, code).Inc()
	}
}

// MIGState is how the node's GPUs are cut and offered.
type MIGState struct {
	// Offered are the partitions in the node's slices, whether they are cut yet or not; Ours exist for claims; Foreign were made by an admin.
	// Each by profile.
	Offered, Ours, Foreign map[string]int
	// GPUs that can be cut, by why they are not offered as their policy wants. The reasons must be
	// few: each is a time series.
	GPUs map[string]int
}

// MIG sets how the node's GPUs are cut and offered now. What is not in it is no more.
func (m *Metrics) MIG(now MIGState) {
	offered := 0
	for _, n := range now.Offered {
		offered += n
	}
	m.devices.WithLabelValues("mig").Set(float64(offered))
	m.mig.instances.replace(func(set func(n int, labels ...string)) {
		for state, profiles := range map[string]map[string]int{"offered": now.Offered, "ours": now.Ours, "foreign": now.Foreign} {
			for profile, n := range profiles {
				set(n, profile, state)
			}
		}
	})
	m.mig.gpus.replace(func(set func(n int, labels ...string)) {
		for reason, n := range now.GPUs {
			set(n, reason)
		}
	})
}

// current is a gauge whose series come and go with what they count. Those that stay are never missing from a scrape, as they would be after a Reset.
type current struct {
	*prometheus.GaugeVec

	mu    sync.Mutex
	shown map[string][]string // label values
}

func newCurrent(name, help string, labels ...string) *current {
	return &current{GaugeVec: gauges(name, help, labels...)}
}

func (c *current) replace(all func(set func(n int, labels ...string))) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.shown
	c.shown = map[string][]string{}
	all(func(n int, labels ...string) {
		c.WithLabelValues(labels...).Set(float64(n))
		c.shown[strings.Join(labels, "\xff")] = labels
	})
	for key, labels := range before {
		if _, still := c.shown[key]; !still {
			c.DeleteLabelValues(labels...)
		}
	}
}
