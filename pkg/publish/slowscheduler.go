package publish

import (
	"fmt"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
)

// firstFastVersion is the first Kubernetes version in which the time to schedule a claim does not
// grow with the square of the number of nodes with counters.
var firstFastVersion = version.MustParseGeneric("1.37.0-0")

// slowScheduler warns if this node publishes shared counters to a cluster whose scheduler is slow
// with them (https://github.com/kubernetes/kubernetes/pull/138917). It assumes that the scheduler
// has the same version as the API server.
type slowScheduler struct {
	events  Events
	metrics *metrics.Metrics

	mu sync.Mutex
	// server is the API server's last known version, or "".
	server string
	// counters is true if the last built slices have shared counters.
	counters bool
}

// setVersion sets the API server's version.
func (s *slowScheduler) setVersion(server string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.server = server
	s.report()
}

// setSlices sets the node's slices.
func (s *slowScheduler) setSlices(all []resourceslice.Slice) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counters = slices.ContainsFunc(all, func(s resourceslice.Slice) bool { return len(s.SharedCounters) > 0 })
	s.report()
}

func (s *slowScheduler) report() {
	slow, state := false, ""
	if s.counters {
		if s.server == "" {
			return // setVersion reports it
		}
		v, err := version.ParseGeneric(s.server)
		slow = err == nil && v.LessThan(firstFastVersion)
	}
	if slow {
		state = "slow"
	}
	s.metrics.SlowScheduler(slow)
	s.events.EventOnChange(events.SlowScheduler, state, fmt.Sprintf(
		"This node publishes counters to a cluster with Kubernetes %s. Before 1.37 the time to "+
			"schedule a claim grows with the square of the nodes with counters (kubernetes PR 138917). Upgrade to 1.37, "+
			"or set mig.policy=static (and no shares) on nodes where no claim needs partitions. "+
			"sum(gpu_dra_slow_scheduler) counts these nodes", s.server))
}
