package prepare

import (
	"context"
	"errors"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// noDaemons implements Daemons for a Preparer without an MPS supervisor. Every call fails.
type noDaemons struct{}

var errNoDaemons = &mps.NotRunningError{Socket: "none", Err: errors.New("the plugin was started without an MPS supervisor")}

func (noDaemons) Start(context.Context, mps.Daemon) error { return errNoDaemons }

func (noDaemons) Stop(context.Context, string) error { return errNoDaemons }

func (noDaemons) List(context.Context) ([]mps.Status, error) { return nil, errNoDaemons }

// checkDaemons returns an error if the claim needs MPS daemons but the MPS supervisor does not run.
// Prepare calls it before it changes anything.
func (p *Preparer) checkDaemons(ctx context.Context, pl *plan) error {
	if len(pl.sharing.daemons) == 0 {
		return nil
	}
	_, err := p.MPS.List(ctx)
	if absent := new(mps.NotRunningError); errors.As(err, &absent) {
		return withCause(CauseNotReady, "the claim needs MPS: %w", err)
	}
	return nil // Start will report any other error
}

// claimsSharing returns the claims on the GPUs whose records name the shared setting, partition or
// daemon with this key. It includes claims with unreadable records, because they may share it too.
func (p *Preparer) claimsSharing(key string, gpus []string) ([]types.UID, error) {
	entries, err := p.Records.ListForGPUs(gpus...)
	if err != nil {
		return nil, withCause(CauseRecord, "%w", err)
	}
	var uids []types.UID
	for _, e := range entries {
		if !e.Inexact() && !slices.ContainsFunc(e.Devices, func(d string) bool { return isOnAny(d, gpus) }) {
			continue
		}
		r, found, err := p.Records.Load(e.ClaimUID)
		if err == nil && !found {
			continue
		}
		var steps []Step
		if err == nil {
			steps, err = decodeSteps(r.Steps)
		}
		if err != nil || slices.ContainsFunc(sharedSteps(steps), func(s *sharedStep) bool { return s.Key == key }) {
			uids = append(uids, e.ClaimUID)
		}
	}
	return uids, nil
}

func isOnAny(deviceName string, gpus []string) bool {
	name, known := device.ParseName(deviceName)
	return slices.ContainsFunc(gpus, func(gpu string) bool {
		return known && name.GPU == gpu || !known && (deviceName == gpu || strings.HasPrefix(deviceName, gpu+"-"))
	})
}

// leaveSharedSteps takes a claim without a readable record off all settings, daemons and partitions
// that it shares. It finds these by their files, which list the claims.
func (p *Preparer) leaveSharedSteps(ctx context.Context, uid types.UID) error {
	keys, err := p.Records.Holders()
	if err != nil {
		return withCause(CauseRecord, "%w", err)
	}
	var steps []*sharedStep
	var gpus []string
	for _, key := range keys {
		h, found, err := p.Records.Holder(key)
		if err != nil || !found || !h.HeldBy(uid) {
			continue // the last claim whose record names an unreadable file cleans it up
		}
		steps = append(steps, &sharedStep{Key: key, GPUs: h.GPUs, Want: h.Step})
		gpus = append(gpus, h.GPUs...)
	}
	if len(steps) == 0 {
		return nil
	}
	locks, err := p.Locks.Acquire(ctx, gpuLocks(gpus...)...)
	if err != nil {
		return lockError("another claim is being prepared or unprepared on the same GPU", err)
	}
	defer locks.Release()
	slices.SortStableFunc(steps, func(a, b *sharedStep) int { return stepOrder(b.Key) - stepOrder(a.Key) })
	env := p.newEnv(&checkpoint.Record{ClaimUID: uid, BootID: p.BootID}, nil)
	work, cancel := withTimeout(ctx, destroyTime, answerTime)
	defer cancel()
	for _, s := range steps {
		if err := s.Revert(work, env); err != nil {
			return stepError(err)
		}
		p.reportRepair(ctx, Repair{"leftover-share", "Released a shared GPU setting for a claim without a checkpoint record",
			string(uid) + " " + s.Key})
	}
	return nil
}

// stepOrder returns a number that says when a step of this key's kind is applied: MIG instances
// come first, then compute modes, time slices and MPS daemons.
func stepOrder(key string) int {
	_, kind := keyOf(key)
	return slices.Index([]string{migInstanceKind, computeModeKind, timeSliceKind, mpsDaemonKind}, kind)
}
