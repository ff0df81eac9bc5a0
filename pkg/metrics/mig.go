package metrics

import (
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

type migMetrics struct {
	duration  *prometheus.HistogramVec
	errors    *prometheus.CounterVec
	instances *current
	gpus      *current
}

func newMIGMetrics(auto factory) migMetrics {
	return migMetrics{
		duration: auto.histograms("mig_operation_duration_seconds",
			"Time of one call that reads or changes a GPU's partitions, successful or not.",
			prometheus.ExponentialBuckets(0.01, 2, 13), "operation"), // 10 ms … 41 s
		errors: auto.counters("mig_operation_errors_total", "Failed calls that read or change a GPU's partitions, by code.", "operation", "code"),
		instances: auto.current("mig_instances", "MIG devices by profile and state: offered (they may not exist yet), made for "+
			"claims (ours), made by an admin (foreign).", "profile", "state"),
		gpus: auto.current("mig_gpus", "GPUs with MIG, by the reason why they are not offered as their policy says. The reason is "+
			"empty for GPUs that are.",
			"reason"),
	}
}

// MIGCall adds the duration of one call that reads or changes a GPU's partitions, and counts
// an error if code is not empty.
func (m *Metrics) MIGCall(operation string, took time.Duration, code string) {
	m.mig.duration.WithLabelValues(operation).Observe(took.Seconds())
	if code != "" {
		m.mig.errors.WithLabelValues(operation, code).Inc()
	}
}

// MIGState counts the node's partitions and the GPUs with MIG.
type MIGState struct {
	// Offered, Ours and Foreign count partitions by profile. Offered partitions are in the node's
	// ResourceSlices and may not exist yet. Ours are those that the plugin created for claims, Foreign
	// those that an admin created.
	Offered, Ours, Foreign map[string]int
	// GPUs counts the GPUs with MIG by the reason why the node does not offer them as their policy
	// says. The reason is "" for GPUs that the node does offer so. Use few reasons: each is a time
	// series.
	GPUs map[string]int
}

// MIG sets the numbers of MIG devices and of GPUs with MIG. A profile or reason that is missing in
// the parameter now loses its time series.
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

// current is a gauge whose time series are replaced as a whole. In contrast to a Reset followed by
// new values, a scrape meanwhile still has each time series that stays.
type current struct {
	*prometheus.GaugeVec

	mu    sync.Mutex
	shown map[string][]string // label values of the current time series
}

func (f factory) current(name, help string, labels ...string) *current {
	return &current{GaugeVec: f.gauges(name, help, labels...)}
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
