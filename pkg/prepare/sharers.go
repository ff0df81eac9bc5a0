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

// unserved is the supervisor of a Preparer that was given none.
type unserved struct{}

var errUnserved = &mps.NotRunningError{Socket: "none", Err: errors.New("this instance of the plugin was started without one")}

func (unserved) Start(context.Context, mps.Daemon) error { return errUnserved }

func (unserved) Stop(context.Context, string) error { return errUnserved }

func (unserved) List(context.Context) ([]mps.Status, error) { return nil, errUnserved }

// served makes sure, before anything is done for a claim that needs daemons, that there is somebody to run them.
func (p *Preparer) served(ctx context.Context, w *plan) error {
	if len(w.sharing.daemons) == 0 {
		return nil
	}
	_, err := p.MPS.List(ctx)
	if absent := new(mps.NotRunningError); errors.As(err, &absent) {
		return because(CauseNotReady, "the claim needs MPS: %w", err)
	}
	return nil // whatever else ails it, who starts a daemon is told
}

// sharers are the claims whose records name the key, and those on the GPUs whose records cannot be read.
func (p *Preparer) sharers(key string, gpus []string) ([]types.UID, error) {
	entries, err := p.Records.ListAbout(gpus...)
	if err != nil {
		return nil, because(CauseRecord, "%w", err)
	}
	var uids []types.UID
	for _, e := range entries {
		if !e.Inexact() && !slices.ContainsFunc(e.Devices, func(d string) bool { return onAny(d, gpus) }) {
			continue
		}
		r, found, err := p.Records.Load(e.ClaimUID)
		if err == nil && !found {
			continue
		}
		var steps []Step
		if err == nil {
			steps, err = restore(r.Steps)
		}
		if err != nil || slices.ContainsFunc(sharedSteps(steps), func(s *shared) bool { return s.Key == key }) {
			uids = append(uids, e.ClaimUID)
		}
	}
	return uids, nil
}

func onAny(deviceName string, gpus []string) bool {
	name, known := device.ParseName(deviceName)
	return slices.ContainsFunc(gpus, func(gpu string) bool {
		return known && name.GPU == gpu || !known && (deviceName == gpu || strings.HasPrefix(deviceName, gpu+"-"))
	})
}

// leaveAll takes a claim whose record is of no use out of all that it shares: the holders' files have what that takes.
func (p *Preparer) leaveAll(ctx context.Context, uid types.UID) error {
	keys, err := p.Records.Holders()
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	var steps []*shared
	var gpus []string
	for _, key := range keys {
		h, found, err := p.Records.Holder(key)
		if err != nil || !found || !h.Holds(uid) {
			continue // one that cannot be read is left by the last claim whose record names it
		}
		steps = append(steps, &shared{Key: key, GPUs: h.GPUs, Want: h.Step})
		gpus = append(gpus, h.GPUs...)
	}
	if len(steps) == 0 {
		return nil
	}
	held, err := p.Locks.Acquire(ctx, gpuLocks(gpus...)...)
	if err != nil {
		return notLocked("a claim is being prepared or unprepared on the same GPU", err)
	}
	defer held.Release()
	slices.SortStableFunc(steps, func(a, b *shared) int { return order(b.Key) - order(a.Key) })
	env := p.env(&checkpoint.Record{ClaimUID: uid, BootID: p.BootID}, nil)
	work, cancel := within(ctx, destroyTime, answerTime)
	defer cancel()
	for _, s := range steps {
		if err := s.Revert(work, env); err != nil {
			return stepError(err)
		}
		p.repaired(ctx, Repair{"leftover-share", "Took a claim without a record out of what it shared", string(uid) + " " + s.Key})
	}
	return nil
}

// order is that in which the kinds of shared steps are applied.
func order(key string) int {
	_, kind := keyOf(key)
	return slices.Index([]string{migInstanceKind, computeModeKind, timeSliceKind, mpsDaemonKind}, kind)
}
