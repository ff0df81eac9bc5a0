package driver

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// supervisorGrace is how long the MPS supervisor may be absent before an Event says so. The
// supervisor's Pod starts at the same time as the plugin's.
const supervisorGrace = time.Minute

// daemonReports shows admins the node's MPS daemons, and tells them if the MPS supervisor is absent
// although claims need it. Only one goroutine may use it.
type daemonReports struct {
	supervisor steps.Daemons
	metrics    *metrics.Metrics
	events     *events.Recorder
	// fractionsOffered reports whether the node offers MPS shares with a limited part of a GPU's
	// memory and compute.
	fractionsOffered func() bool

	// absentSince is when Report first missed the supervisor, or zero if it is there.
	absentSince time.Time
}

// Report updates the metrics of the MPS daemons. Without a supervisor it reports no daemons.
func (r *daemonReports) Report(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, mpsTimeout)
	defer cancel()
	all, err := r.supervisor.List(ctx)
	absent := new(mps.NotRunningError)
	if err != nil && !errors.As(err, &absent) {
		klog.FromContext(ctx).Error(err, "Failed to list the MPS daemons")
		return
	}
	r.checkSupervisor(err, time.Now())
	now := make([]metrics.MPSDaemon, len(all))
	for i, s := range all {
		now[i] = metrics.MPSDaemon{ID: s.Daemon.ID, State: string(s.State), Restarts: s.Restarts}
	}
	r.metrics.MPS(now)
}

// checkSupervisor writes an Event if the node offers MPS shares with limited memory and compute,
// and the MPS supervisor has been absent for longer than supervisorGrace. It writes one Event per
// absence. absent is the error that says that the supervisor is absent, or nil.
func (r *daemonReports) checkSupervisor(absent error, now time.Time) {
	switch {
	case absent == nil:
		r.absentSince = time.Time{}
		r.events.EventOnChange(events.MPSNotRunning, "", "")
	case !r.fractionsOffered():
		r.absentSince = time.Time{}
	case r.absentSince.IsZero():
		r.absentSince = now
	case now.Sub(r.absentSince) > supervisorGrace:
		r.events.EventOnChange(events.MPSNotRunning, "absent",
			"This node offers fractions of GPUs (the chart's value shares) but cannot prepare claims for them: "+absent.Error())
	}
}
