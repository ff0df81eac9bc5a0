package publish

import (
	"fmt"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
)

// slowScheduler warns if this node publishes shared counters to a cluster whose scheduler is slow
// with them (https://github.com/kubernetes/kubernetes/pull/138917). It assumes that the scheduler
// has the same version as the API server.
type slowScheduler struct {
	events  Events
	metrics *metrics.Metrics

	mu sync.Mutex
	// server is the API server's version, or "" if it is not known.
	server   string
	counters bool
}

// firstFastVersion is the first Kubernetes version in which the time to schedule a claim does not
// grow with the square of the number of nodes with counters.
var firstFastVersion = version.MustParseGeneric("1.37.0-0")

// SetVersion tells slowScheduler the API server's version.
func (s *slowScheduler) SetVersion(server string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.server = server
	s.update()
}

// SetSlices tells slowScheduler which slices this node publishes.
func (s *slowScheduler) SetSlices(all []resourceslice.Slice) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counters = slices.ContainsFunc(all, func(slice resourceslice.Slice) bool { return len(slice.SharedCounters) > 0 })
	s.update()
}

func (s *slowScheduler) update() {
	v, err := version.ParseGeneric(s.server)
	slow := err == nil && s.counters && v.LessThan(firstFastVersion)
	s.metrics.SlowScheduler(slow)
	state := ""
	if slow {
		state = "slow"
	}
	s.events.WarnOnChange("SlowScheduler", state, fmt.Sprintf(
		"This node publishes counters to a cluster with Kubernetes %s. Before 1.37 the time to "+
			"schedule a claim grows with the square of the nodes with counters (kubernetes PR 138917). Upgrade to 1.37, "+
			"or set mig.policy=static (and no shares) on nodes where no claim needs partitions. "+
			"sum(gpu_dra_slow_scheduler) counts these nodes", s.server))
}
