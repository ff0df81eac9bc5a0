package metrics

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// mpsMetrics are about the daemons of MPS, which have their own life in the supervisor's Pod.
type mpsMetrics struct {
	start    prometheus.Histogram
	errors   prometheus.Counter
	daemons  *current
	restarts prometheus.Counter

	mu   sync.Mutex
	seen map[string]int // restarts by daemon, as counted already; nil before the first look
}

func newMPSMetrics() *mpsMetrics {
	return &mpsMetrics{
		start: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: named("mps_start_duration_seconds", "").Name, Help: "Time until an MPS daemon that a claim needs was ready, or was found so, or could not be started.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 16), // 1 ms … 33 s
		}),
		errors:   prometheus.NewCounter(prometheus.CounterOpts(named("mps_start_errors_total", "MPS daemons that could not be started; each is tried again."))),
		daemons:  newCurrent("mps_daemons", "MPS daemons of this node, by state: Starting, Ready, Failed.", "state"),
		restarts: prometheus.NewCounter(prometheus.CounterOpts(named("mps_restarts_total", "MPS daemons that ended by themselves, and with them the work of their clients."))),
	}
}

// MPSStart records one start of a daemon.
func (m *Metrics) MPSStart(took time.Duration, failed bool) {
	m.mps.start.Observe(took.Seconds())
	if failed {
		m.mps.errors.Inc()
	}
}

// MPSDaemon is what the supervisor says of one daemon.
type MPSDaemon struct {
	ID, State string
	// Restarts is how often it ended by itself since it was asked for.
	Restarts int
}

// MPS sets which daemons there are now. What is not in it is no more.
func (m *Metrics) MPS(now []MPSDaemon) {
	states := map[string]int{}
	m.mps.mu.Lock()
	seen := map[string]int{}
	for _, d := range now {
		states[d.State]++
		seen[d.ID] = d.Restarts
		// What was before the first look was counted by the plugin's last process, or never.
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

// Shares sets how many devices that several claims may hold the node offers, by type.
func (m *Metrics) Shares(byType map[string]int) {
	for _, kind := range []string{"gpu-share", "mig-share"} {
		m.devices.WithLabelValues(kind).Set(float64(byType[kind]))
	}
}
