package publish

import (
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
)

// firstFastVersion is the first Kubernetes version in which the time to schedule a claim does not
// grow with the square of the number of nodes with counters.
var firstFastVersion = version.MustParseGeneric("1.37.0-0")

// reportSlowScheduler warns if the slices have shared counters and the cluster's scheduler is slow
// with them (https://github.com/kubernetes/kubernetes/pull/138917). It assumes that the scheduler
// has the same version as the API server. Until that is known, it does not warn.
func (p *Publisher) reportSlowScheduler(all []resourceslice.Slice) {
	server, state := ptr.Deref(p.server.Load(), ""), ""
	v, err := version.ParseGeneric(server)
	counters := slices.ContainsFunc(all, func(s resourceslice.Slice) bool { return len(s.SharedCounters) > 0 })
	slow := counters && err == nil && v.LessThan(firstFastVersion)
	if slow {
		state = "slow"
	}
	p.opts.Metrics.SlowScheduler(slow)
	p.opts.Events.EventOnChange(events.SlowScheduler, state, fmt.Sprintf(
		"This node publishes counters to a cluster with Kubernetes %s. Before 1.37 the time to "+
			"schedule a claim grows with the square of the nodes with counters (kubernetes PR 138917). Upgrade to 1.37, "+
			"or set mig.policy=static (and no shares) on nodes where no claim needs partitions. "+
			"sum(gpu_dra_slow_scheduler) counts these nodes", server))
}
