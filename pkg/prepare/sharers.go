package prepare

import (
	"context"
	"errors"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// checkDaemons returns an error if the claim needs MPS daemons but the MPS supervisor does not run.
// Prepare calls it before it changes anything.
func (p *Preparer) checkDaemons(ctx context.Context, pl *plan) error {
	if len(pl.sharing.clients) == 0 {
		return nil
	}
	_, err := p.MPS.List(ctx)
	if absent := new(mps.NotRunningError); errors.As(err, &absent) {
		return cause.Errorf(cause.NotReady, "the claim needs MPS: %w", err)
	}
	return nil // Start will report any other error
}

// leaveSharedSteps takes a claim without a readable record off all settings, daemons and partitions
// that it shares. It finds these by their files, which list the claims.
func (p *Preparer) leaveSharedSteps(ctx context.Context, uid types.UID) error {
	keys, err := p.Records.Holders()
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	var list []*steps.Shared
	var gpus []string
	for _, key := range keys {
		h, found, err := p.Records.Holder(key)
		if err != nil || !found || !h.HeldBy(uid) {
			continue // the last claim whose record names an unreadable file cleans it up
		}
		list = append(list, &steps.Shared{Key: key, GPUs: h.GPUs, Want: h.Step})
		gpus = append(gpus, h.GPUs...)
	}
	if len(list) == 0 {
		return nil
	}
	locks, err := p.Locks.Acquire(ctx, gpuLocks(gpus...)...)
	if err != nil {
		return lockError("another claim is being prepared or unprepared on the same GPU", err)
	}
	defer locks.Release()
	steps.SortShared(list)
	slices.Reverse(list)
	env := p.newEnv(&checkpoint.Record{ClaimUID: uid, BootID: p.BootID}, nil)
	work, cancel := steps.WithTimeout(ctx, steps.DestroyTime, steps.AnswerTime)
	defer cancel()
	for _, s := range list {
		if err := s.Revert(work, env); err != nil {
			return cause.OrStep(err)
		}
		p.reportRepair(ctx, Repair{"leftover-share", "Released a shared GPU setting for a claim without a checkpoint record",
			string(uid) + " " + s.Key})
	}
	return nil
}
