package prepare

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
)

// recoverWait bounds how long Recover and MendUnseen wait for a claim that another call works on: that call, or the kubelet's next one, finishes it.
const recoverWait = 2 * time.Second

// tryWait is for a lock that is free, or not worth waiting for yet.
const tryWait = 10 * time.Millisecond

// Recover puts the node in order at the start: unfinished preparations are reverted, specs of finished ones are written again, and specs and
// temporary files without a record are removed. What cannot be read is reported and left: it keeps holding its GPUs until its claim is unprepared.
// One claim's failure stops no other, and one that another instance works on keeps no other waiting.
func (p *Preparer) Recover(ctx context.Context) error {
	traces, err := p.traces()
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	for _, uid := range traces {
		wg.Go(func() {
			if err := p.recoverClaim(ctx, uid); err != nil {
				klog.FromContext(ctx).Error(err, "Could not recover a claim; what it holds stays held until it is unprepared", "claimUID", uid)
			}
		})
	}
	wg.Wait()
	return nil
}

// traces are the claims that anything on the node reminds of; with an error, those that could be found.
func (p *Preparer) traces() (uids []types.UID, _ error) {
	var errs []error
	entries, err := p.Records.List()
	if err != nil {
		errs = append(errs, because(CauseRecord, "%w", err))
	}
	for _, e := range entries {
		uids = append(uids, e.ClaimUID)
	}
	unfinished, err := p.Records.Unfinished()
	if err != nil {
		errs = append(errs, because(CauseRecord, "%w", err))
	}
	specified, err := p.Specs.Claims()
	if err != nil {
		errs = append(errs, because(CauseStep, "%w", err))
	}
	uids = slices.Concat(uids, unfinished, specified)
	slices.Sort(uids)
	return slices.Compact(uids), errors.Join(errs...)
}

func (p *Preparer) recoverClaim(ctx context.Context, uid types.UID) error {
	ctx, cancel := context.WithTimeout(ctx, recoverWait)
	defer cancel()
	held, err := p.lock(ctx, uid)
	if err != nil {
		return err
	}
	defer held.Release()
	r, found, err := p.Records.Load(uid)
	if err == nil && !found {
		return p.removeTraces(ctx, uid)
	}
	if derr := p.Records.Discard(uid); derr != nil {
		return because(CauseRecord, "%w", derr)
	}
	switch {
	case err != nil:
		return because(CauseRecord, "%w", err)
	case r.State != checkpoint.Prepared:
		return p.recoverUnfinished(ctx, held, r)
	}
	if err := p.rewrite(ctx, r, p.seen); !errors.Is(err, errUnseen) && !errors.Is(err, errNotLooked) {
		return err
	}
	return nil
}

// recoverUnfinished reverts what needs no hardware. The rest is for Reconcile: the start of the plugin does not wait for a GPU.
func (p *Preparer) recoverUnfinished(ctx context.Context, held *lock.Held, r checkpoint.Record) error {
	if err := lockGPUs(ctx, held, r.GPUs()...); err != nil {
		return err
	}
	logger := klog.FromContext(ctx).WithValues("claim", klog.KRef(r.Namespace, r.Name), "claimUID", r.ClaimUID)
	steps, err := restore(r.Steps)
	if err != nil {
		return because(CauseRecord, "claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	if hard(steps) && r.BootID == p.BootID {
		logger.Info("A preparation that was interrupted will be reverted when its GPUs can be asked")
		return p.Specs.RemoveClaim(r.ClaimUID)
	}
	state := r.State
	if err := p.revert(ctx, r); err != nil {
		return err
	}
	r.State = state
	p.interrupted(ctx, r)
	return nil
}

// rewrite writes a prepared claim's spec again. After a reboot the record's edits may name other cards' device nodes: the kubelet prepares every claim
// again then, and Prepare looks. Where the node does not show the claim's devices, the error is errNotLooked.
func (p *Preparer) rewrite(ctx context.Context, r checkpoint.Record, ensure ensure) error {
	if r.BootID != p.BootID {
		return errNotLooked
	}
	snapshot := p.Hardware.Snapshot()
	if !snapshot.Ready {
		// The record's device nodes may be another card's since the driver was loaded anew. A spec that is there stays; one that is missing is
		// written when the node has been looked at.
		return errNotLooked
	}
	w, known, err := p.planned(r, snapshot)
	if err != nil {
		return err
	}
	if !known {
		return cmp.Or(p.asRecorded(ctx, r), errNotLooked)
	}
	if err := p.refresh(ctx, r, w, ensure); err != nil {
		if errors.Is(err, errUnseen) {
			return err
		}
		return stepError(fmt.Errorf("claim %s/%s: %w", r.Namespace, r.Name, err))
	}
	return nil
}

// planned is the plan that the record was made of, on the node as it is now. It is not known if the node does not show all GPUs. It leaves no spec in place
// that would give a container another card than the one that the claim was prepared with: the next container of the claim then fails to start instead.
func (p *Preparer) planned(r checkpoint.Record, snapshot inventory.Snapshot) (w *plan, known bool, err error) {
	w = &plan{record: r, spec: &claimSpec{}, common: snapshot.Node.Common}
	w.record.Devices = slices.Clone(r.Devices)
	for _, d := range r.Devices {
		t, ok := find(snapshot, d.Device)
		if !ok {
			return nil, false, nil
		}
		if t.gpu.UUID != d.GPUUUID {
			return nil, false, errors.Join(replaced(d, t.gpu.UUID), p.Specs.RemoveClaim(r.ClaimUID))
		}
		w.wants = append(w.wants, t)
	}
	ours, err := p.adopt(w, r)
	if err == nil && !ours {
		err = &lastingError{errors.New("its steps are of another version of the driver")}
	}
	if err != nil {
		return nil, false, because(CauseRecord, "claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	return w, true, nil
}

// asRecorded writes the spec of a claim whose GPUs are not all to be seen. One with a partition is left as it is: what the record knows of the partition
// may be out of date.
func (p *Preparer) asRecorded(ctx context.Context, r checkpoint.Record) error {
	steps, err := restore(r.Steps)
	if err != nil {
		return because(CauseRecord, "claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	if slices.ContainsFunc(r.Devices, func(d checkpoint.Device) bool { return d.MIGUUID != "" }) {
		return nil
	}
	if err := applyAll(ctx, p.env(&r, steps), slices.DeleteFunc(steps, func(s Step) bool { return s.Kind() != claimSpecKind })); err != nil {
		return stepError(fmt.Errorf("claim %s/%s: %w", r.Namespace, r.Name, err))
	}
	return nil
}

// MendSeen writes the specs of all prepared claims again where they are missing or altered. The kubelet does not prepare again when a container restarts.
// It asks no hardware, and waits for no other call: claims that need either are left, for [Preparer.MendUnseen].
func (p *Preparer) MendSeen(ctx context.Context) (left []types.UID, _ error) {
	entries, err := p.Records.List()
	if err != nil {
		return nil, because(CauseRecord, "%w", err)
	}
	var errs []error
	for _, e := range entries {
		err := p.mendClaim(ctx, e.ClaimUID, tryWait, p.seen)
		if errors.Is(err, errUnseen) || errors.Is(err, errBusy) {
			left = append(left, e.ClaimUID)
			continue
		}
		errs = append(errs, err)
	}
	return left, errors.Join(errs...)
}

// MendUnseen is [Preparer.MendSeen] for one claim that was left. Hardware is asked about partitions that the inventory does not see.
func (p *Preparer) MendUnseen(ctx context.Context, claim types.UID) error {
	return p.mendClaim(ctx, claim, recoverWait, p.seenOrLooked)
}

var errBusy = errors.New("another call works on the claim, and gives it its spec")

func (p *Preparer) mendClaim(ctx context.Context, uid types.UID, wait time.Duration, ensure ensure) error {
	waiting, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	held, err := p.lock(waiting, uid)
	if CauseOf(err) == CauseCanceled {
		return errors.Join(errBusy, err)
	}
	if err != nil {
		return err
	}
	defer held.Release()
	// The hardware has its own, longer time: who gives up a look that was begun ends it for others who wait for that GPU too.
	ctx, cancelWork := context.WithTimeout(ctx, reconcileTime)
	defer cancelWork()
	r, found, err := p.Records.Load(uid)
	if err != nil || !found || r.State != checkpoint.Prepared {
		return err
	}
	if err := p.rewrite(ctx, r, ensure); !errors.Is(err, errNotLooked) {
		return err
	}
	return nil
}
