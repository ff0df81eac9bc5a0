package driver

import (
	"fmt"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// slowScheduler warns where this node publishes counters to a cluster whose scheduler is slow with
// them (https://github.com/kubernetes/kubernetes/pull/138917). The API server's version stands for
// the scheduler's.
type slowScheduler struct {
	warn func(reason, message string)
	show func(slow bool)

	mu sync.Mutex
	// server is empty while the API server has not told its version.
	server   string
	counters bool
	told     bool
}

// firstFast is the first version whose scheduler counts in a time that does not grow with the
// square of the nodes.
var firstFast = version.MustParseGeneric("1.37.0-0")

// Serves takes the API server's version, as it calls itself.
func (s *slowScheduler) Serves(server string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.server = server
	s.look()
}

// Publishes takes what this node publishes.
func (s *slowScheduler) Publishes(all []resourceslice.Slice) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counters = slices.ContainsFunc(all, func(slice resourceslice.Slice) bool { return len(slice.SharedCounters) > 0 })
	s.look()
}

func (s *slowScheduler) look() {
	v, err := version.ParseGeneric(s.server)
	slow := err == nil && s.counters && v.LessThan(firstFast)
	s.show(slow)
	if slow && !s.told {
		s.warn("SlowScheduler", fmt.Sprintf("This node publishes counters, and Kubernetes is %s: before 1.37, each claim takes the scheduler a time that grows with the "+
			"square of the nodes which do so (kubernetes PR 138917). Upgrade to 1.37, or set mig.policy=static (and no shares) where nobody asks for partitions, "+
			"or another policy on some nodes only. sum(gpu_dra_slow_scheduler) counts these nodes", s.server))
	}
	s.told = slow
}
