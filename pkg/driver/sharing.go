package driver

import (
	"context"
	"errors"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/supervisor"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// mpsTimeout limits calls to the MPS supervisor outside Prepare and Unprepare.
const mpsTimeout = 5 * time.Second

// nodeSupervisor wraps the client of this node's MPS supervisor. Start measures how long daemons
// take to start. If the supervisor is gone, Stop removes the daemon's files itself, so that claims
// can be unprepared.
type nodeSupervisor struct {
	steps.Daemons
	paths   mps.Paths
	proc    string // the node's /proc
	metrics *metrics.Metrics
}

func (s nodeSupervisor) Start(ctx context.Context, d mps.Daemon) error {
	start := time.Now()
	err := s.Daemons.Start(ctx, d)
	s.metrics.MPSStart(time.Since(start), err != nil)
	return err
}

func (s nodeSupervisor) Stop(ctx context.Context, id string) error {
	err := s.Daemons.Stop(ctx, id)
	if absent := new(mps.NotRunningError); errors.As(err, &absent) {
		return supervisor.Forget(ctx, s.paths, s.proc, id)
	}
	return err
}

// StopAll stops all MPS daemons of the node and removes their files. The node must have no prepared
// claims. It also works if the supervisor is already gone.
func (s nodeSupervisor) StopAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, mpsTimeout)
	defer cancel()
	all, err := s.List(ctx)
	if absent := new(mps.NotRunningError); errors.As(err, &absent) {
		err = nil
	}
	for _, daemon := range all {
		err = errors.Join(err, s.Stop(ctx, daemon.Daemon.ID))
	}
	if err != nil {
		return err
	}
	return supervisor.RemoveAll(s.paths)
}
