package metrics

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// mpsMetrics are the metrics of the node's MPS daemons. The daemons run in the supervisor's Pod,
// not in the plugin's.
type mpsMetrics struct {
	start    prometheus.Histogram
	errors   prometheus.Counter
	daemons  *current
	restarts prometheus.Counter

	mu   sync.Mutex
	seen map[string]int // restarts counted so far, by daemon ID; nil before the first call of MPS
}

func newMPSMetrics(auto factory) *mpsMetrics {
	return &mpsMetrics{
		start: auto.NewHistogram(prometheus.HistogramOpts{
			Name: "mps_start_duration_seconds", Help: "Time until an MPS daemon for a claim was ready, or failed to start.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 16), // 1 ms … 33 s
		}),
		errors:   auto.counter("mps_start_errors_total", "Failed starts of MPS daemons. Each is retried."),
		daemons:  auto.current("mps_daemons", "MPS daemons of this node, by state: Starting, Ready, Failed.", "state"),
		restarts: auto.counter("mps_restarts_total", "MPS daemons that ended unexpectedly, which also ends their clients."),
	}
}

// MPSStart adds the duration of one start of a daemon, and counts an error if the start failed.
func (m *Metrics) MPSStart(took time.Duration, failed bool) {
	m.mps.start.Observe(took.Seconds())
	if failed {
		m.mps.errors.Inc()
	}
}

// MPSDaemon is the supervisor's status of one daemon.
type MPSDaemon struct {
	ID, State string
	// Restarts counts how often the daemon ended unexpectedly since it was requested.
	Restarts int
}

// MPS sets the number of daemons in each state. It also adds the restarts since the previous call
// to a counter.
func (m *Metrics) MPS(now []MPSDaemon) {
	states := map[string]int{}
	m.mps.mu.Lock()
	seen := map[string]int{}
	for _, d := range now {
		states[d.State]++
		seen[d.ID] = d.Restarts
		// Do not count the restarts in the first call: the plugin's previous process already counted
		// them.
		if more := d.Restarts - m.mps.seen[d.ID]; more > 0 && m.mps.seen != nil {
			m.mps.restarts.Add(float64(more))
		}
	}
	m.mps.seen = seen
	m.mps.mu.Unlock()
	m.mps.daemons.replace(func(set func(n int, labels ...string)) {
		for state, n := range states {
			set(n, state)
		}
	})
}

// Shares sets how many devices that several claims can share the node publishes, by device type.
func (m *Metrics) Shares(byType map[string]int) {
	for _, kind := range []string{"gpu-share", "mig-share"} {
		m.devices.WithLabelValues(kind).Set(float64(byType[kind]))
	}
}
