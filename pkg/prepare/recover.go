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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// recoverWait limits how long Recover, Reconcile and RepairClaimSpec wait for the lock of a claim
// for which a call is running. That call, or the kubelet's next one, takes care of the claim.
const recoverWait = 2 * time.Second

// tryWait limits the wait for a lock where the caller can skip a claim whose lock is busy.
const tryWait = 10 * time.Millisecond

// Recover repairs the node when the plugin starts. It reverts unfinished preparations, rewrites the
// CDI specs of prepared claims, and removes specs and temporary files without a record. It logs
// unreadable records and leaves them: they block their devices until the claim is unprepared. If
// one claim fails or is busy, Recover still repairs the others without delay.
func (p *Preparer) Recover(ctx context.Context) error {
	traces, err := p.findTraces()
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	for _, uid := range traces {
		wg.Go(func() {
			if err := p.recoverClaim(ctx, uid); err != nil {
				klog.FromContext(ctx).Error(err, "Failed to recover claim; its devices stay in use until it is unprepared", "claimUID", uid)
			}
		})
	}
	wg.Wait()
	return nil
}

// findTraces returns the claims that have a record, an unfinished record file or a CDI spec on the
// node. If it also returns an error, the list is incomplete.
func (p *Preparer) findTraces() (uids []types.UID, _ error) {
	var errs []error
	entries, err := p.Records.List()
	if err != nil {
		errs = append(errs, cause.Wrap(cause.Record, err))
	}
	for _, e := range entries {
		uids = append(uids, e.ClaimUID)
	}
	unfinished, err := p.Records.Unfinished()
	if err != nil {
		errs = append(errs, cause.Wrap(cause.Record, err))
	}
	specified, err := p.Specs.Claims()
	if err != nil {
		errs = append(errs, cause.Wrap(cause.Step, err))
	}
	uids = slices.Concat(uids, unfinished, specified)
	slices.Sort(uids)
	return slices.Compact(uids), errors.Join(errs...)
}

func (p *Preparer) recoverClaim(ctx context.Context, uid types.UID) error {
	ctx, cancel := context.WithTimeout(ctx, recoverWait)
	defer cancel()
	locks, err := p.lockClaim(ctx, uid)
	if err != nil {
		return err
	}
	defer locks.Release()
	r, found, err := p.Records.Load(uid)
	if err == nil && !found {
		return p.removeTraces(ctx, uid)
	}
	if derr := p.Records.DiscardUnfinished(uid); derr != nil {
		return cause.Wrap(cause.Record, derr)
	}
	switch {
	case err != nil:
		return cause.Wrap(cause.Record, err)
	case r.State != checkpoint.Prepared:
		return p.recoverUnfinished(ctx, locks, r)
	}
	if err := p.rewriteSpec(ctx, r, p.checkInventory); !errors.Is(err, errNotInInventory) && !errors.Is(err, errNotChecked) {
		return err
	}
	return nil
}

// recoverUnfinished undoes a claim's unfinished preparation or unpreparation at once if that needs
// no hardware. Otherwise it removes the claim's CDI spec and leaves the rest to Reconcile, so that
// the plugin's start does not wait for a GPU.
func (p *Preparer) recoverUnfinished(ctx context.Context, locks *lock.Guard, r checkpoint.Record) error {
	if err := lockGPUs(ctx, locks, r.GPUs()...); err != nil {
		return err
	}
	logger := klog.FromContext(ctx).WithValues("claim", klog.KRef(r.Namespace, r.Name), "claimUID", r.ClaimUID)
	list, err := steps.Decode(r.Steps)
	if err != nil {
		return cause.Errorf(cause.Record, "claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	if steps.NeedsHardware(list) && r.BootID == p.BootID {
		logger.Info("Deferring rollback of incomplete claim until its GPUs can be read")
		return p.Specs.RemoveClaim(r.ClaimUID)
	}
	state := r.State
	if err := p.revert(ctx, r); err != nil {
		return err
	}
	r.State = state
	p.reportInterrupted(ctx, r)
	return nil
}

// rewriteSpec writes a prepared claim's CDI spec again, after "ensure" found the claim's
// partitions. It returns errNotChecked if the inventory lacks one of the claim's GPUs. It does the
// same after a reboot, because the kubelet prepares every claim again then.
func (p *Preparer) rewriteSpec(ctx context.Context, r checkpoint.Record, ensure driftCheck) error {
	if r.BootID != p.BootID {
		return errNotChecked
	}
	snapshot := p.Hardware.Snapshot()
	if !snapshot.Ready {
		// If the NVIDIA driver was reloaded, the device nodes in the record may belong to another card
		// now. So this call leaves an existing spec alone, and a missing spec is written after the next
		// scan.
		return errNotChecked
	}
	pl, known, err := p.planFromRecord(r, snapshot)
	if err != nil {
		return err
	}
	if !known {
		return cmp.Or(p.writeRecordedSpec(ctx, r), errNotChecked)
	}
	if err := p.refresh(ctx, r, pl, ensure); err != nil {
		if errors.Is(err, errNotInInventory) {
			return err
		}
		return cause.OrStep(fmt.Errorf("claim %s/%s: %w", r.Namespace, r.Name, err))
	}
	return nil
}

// planFromRecord makes a plan from a record and the current inventory. known is false if the
// inventory lacks one of the claim's GPUs. If a card was replaced, planFromRecord removes the
// claim's CDI spec, so that no container gets the new card.
func (p *Preparer) planFromRecord(r checkpoint.Record, snapshot inventory.Snapshot) (pl *plan, known bool, err error) {
	pl = &plan{record: r, spec: &steps.ClaimSpec{}, baseEdits: snapshot.Node.Common}
	pl.record.Devices = slices.Clone(r.Devices)
	for _, d := range r.Devices {
		req, ok := findDevice(snapshot, d.Device)
		if !ok {
			return nil, false, nil
		}
		if req.gpu.UUID != d.GPUUUID {
			return nil, false, errors.Join(replacedError(d, req.gpu.UUID), p.Specs.RemoveClaim(r.ClaimUID))
		}
		pl.requests = append(pl.requests, req)
	}
	ours, err := p.adoptSteps(pl, r)
	if err == nil && !ours {
		err = cause.Permanent(errors.New("another version of the driver recorded steps that this one would not take: " +
			"install that version, or delete the claim's Pods"))
	}
	if err != nil {
		return nil, false, cause.Errorf(cause.Record, "claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	return pl, true, nil
}

// writeRecordedSpec writes the CDI spec as it is in the record, for a claim with a GPU that the
// inventory lacks. It does nothing for a claim with a partition, because the recorded partition may
// no longer exist.
func (p *Preparer) writeRecordedSpec(ctx context.Context, r checkpoint.Record) error {
	list, err := steps.Decode(r.Steps)
	if err != nil {
		return cause.Errorf(cause.Record, "claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	if slices.ContainsFunc(r.Devices, func(d checkpoint.Device) bool { return d.MIGUUID != "" }) {
		return nil
	}
	if err := steps.ApplyAll(ctx, p.newEnv(&r, list), steps.Of[*steps.ClaimSpec](list)); err != nil {
		return cause.OrStep(fmt.Errorf("claim %s/%s: %w", r.Namespace, r.Name, err))
	}
	return nil
}

// RepairSpecs rewrites missing or altered CDI specs of prepared claims, because the kubelet does
// not call Prepare when a container restarts. It reads no hardware and waits for no lock. Claims
// that need either are returned in "left": the caller passes them to [Preparer.RepairClaimSpec].
func (p *Preparer) RepairSpecs(ctx context.Context) (left []types.UID, _ error) {
	entries, err := p.Records.List()
	if err != nil {
		return nil, cause.Wrap(cause.Record, err)
	}
	var errs []error
	for _, e := range entries {
		err := p.repairSpec(ctx, e.ClaimUID, tryWait, p.checkInventory)
		if errors.Is(err, errNotInInventory) || errors.Is(err, errBusy) {
			left = append(left, e.ClaimUID)
			continue
		}
		errs = append(errs, err)
	}
	return left, errors.Join(errs...)
}

// RepairClaimSpec rewrites one claim's CDI spec if it is missing or altered. It reads the hardware
// if the inventory lacks a partition of the claim.
func (p *Preparer) RepairClaimSpec(ctx context.Context, claim types.UID) error {
	return p.repairSpec(ctx, claim, recoverWait, p.checkInventoryOrHardware)
}

var errBusy = errors.New("another call works on the claim and writes its spec")

func (p *Preparer) repairSpec(ctx context.Context, uid types.UID, wait time.Duration, ensure driftCheck) error {
	waiting, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	locks, err := p.lockClaim(waiting, uid)
	if cause.Of(err) == cause.Canceled {
		return errors.Join(errBusy, err)
	}
	if err != nil {
		return err
	}
	defer locks.Release()
	// Work on the hardware may take longer than the wait for the lock, so it has its own limit.
	// Canceling a read of the hardware would also fail other calls that wait for the same read.
	ctx, cancelWork := context.WithTimeout(ctx, reconcileTime)
	defer cancelWork()
	r, found, err := p.Records.Load(uid)
	if err != nil || !found || r.State != checkpoint.Prepared {
		return err
	}
	if err := p.rewriteSpec(ctx, r, ensure); !errors.Is(err, errNotChecked) {
		return err
	}
	return nil
}
