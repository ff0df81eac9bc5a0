package prepare

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claim"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/claimlock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// conflictPoll is how often a waiting Prepare checks whether a conflicting claim was unprepared.
const conflictPoll = 50 * time.Millisecond

// readClaimTime limits how long Prepare waits for the API server. It is far below the kubelet's
// timeout of 45 s, so that an error still reaches the kubelet.
const readClaimTime = 5 * time.Second

// Prepare makes the claim's devices usable and returns the CDI devices that the container runtime
// injects. The kubelet may call it again at any time. It looks for the devices in snapshot, the
// inventory when the call arrived.
//
// If another claim uses one of the devices, Prepare waits for that claim, at most ConflictWait. A
// Pod deleted by force frees its claim for the scheduler before the kubelet has stopped the Pod.
// Without this wait the kubelet would retry only after ten seconds or more.
func (p *Preparer) Prepare(ctx context.Context, snapshot inventory.Snapshot, c *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	devices, err := p.prepare(ctx, snapshot, c, false)
	if cause.Of(err) == cause.Held {
		devices, err = p.prepareAfterConflict(ctx, c, err)
	}
	if err != nil {
		return nil, cause.ForClaim(c.Namespace+"/"+c.Name, err)
	}
	return devices, nil
}

// prepareAfterConflict waits for the claims that "refused", the error of the last attempt, names.
// Each time one of them was unprepared, it tries to prepare c again.
func (p *Preparer) prepareAfterConflict(ctx context.Context, c *resourceapi.ResourceClaim, refused error) (devices []kubeletplugin.Device,
	err error) {
	waiting, cancel := context.WithTimeout(ctx, p.opts.ConflictWait)
	defer cancel()
	err = refused
	for refusal := conflictError(nil); errors.As(err, &refusal) && p.waitForUnprepare(waiting, refusal.blockers()); {
		devices, err = p.prepare(ctx, p.node.Hardware.Snapshot(), c, true)
	}
	return devices, err
}

// conflictError is an error that names the claims in the way. A retry can succeed only after one of
// these claims was unprepared.
type conflictError interface {
	error
	blockers() []blockingClaim
}

// blockingClaim is a claim that must be unprepared before another claim can be prepared.
type blockingClaim struct {
	uid  types.UID
	name string
}

// waitForUnprepare waits until one of the claims in "holders" is unprepared, and returns true. It
// returns false if ctx ends or the plugin stops first, or if the record of one of these claims
// cannot be read.
func (p *Preparer) waitForUnprepare(ctx context.Context, holders []blockingClaim) bool {
	if len(holders) == 0 || ctx.Err() != nil {
		return false
	}
	names := make([]string, len(holders))
	for i, h := range holders {
		names[i] = h.name
	}
	klog.FromContext(ctx).Info("Waiting for another claim to be unprepared", "claims", names)
	poll := time.NewTicker(conflictPoll)
	defer poll.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-p.opts.Stopping:
			return false
		case <-poll.C:
		}
		for _, h := range holders {
			if _, found, err := p.node.Records.Load(h.uid); err != nil || !found {
				return err == nil
			}
		}
	}
}

// prepare tries once to prepare the claim. If "waited" is true, the claim may have changed since c
// was read from the API server, so prepare reads it again.
func (p *Preparer) prepare(ctx context.Context, snapshot inventory.Snapshot, c *resourceapi.ResourceClaim,
	waited bool) ([]kubeletplugin.Device, error) {
	locks, err := claimlock.Claim(ctx, p.opts.Locks, c.UID)
	if err != nil {
		return nil, err
	}
	defer locks.Release()
	return p.prepareLocked(ctx, locks, snapshot, c, waited)
}

func (p *Preparer) prepareLocked(ctx context.Context, locks *lock.Guard, snapshot inventory.Snapshot, c *resourceapi.ResourceClaim,
	waited bool) ([]kubeletplugin.Device, error) {
	if err := checkReserved(c); err != nil {
		return nil, err
	}
	pl, err := p.makePlan(snapshot, c)
	if err != nil {
		return nil, err
	}
	// No other call can unprepare the claim while it is locked, so the API server's answer stays valid
	// until this call has locked the GPUs. Asking before that keeps other claims on the GPUs from
	// waiting for the API server.
	if err := p.checkTimely(ctx, c, waited || locks.Waited); err != nil {
		return nil, err
	}
	old, err := p.loadOldRecord(ctx, c)
	if err != nil {
		return nil, err
	}
	gpus := pl.record.GPUs()
	if old != nil {
		gpus = append(gpus, old.GPUs()...)
	}
	if err := claimlock.AddGPUs(ctx, locks, gpus...); err != nil {
		return nil, err
	}
	if err := checkNotCanceled(ctx); err != nil {
		return nil, err
	}
	if old != nil {
		if kept, err := p.reprepare(ctx, *old, pl); kept || err != nil {
			return pl.kubeletDevices(p.opts.Pool), err
		}
	}
	if len(pl.record.Devices) == 0 {
		return nil, nil
	}
	sameAllocation := old != nil && slices.EqualFunc(old.Devices, pl.record.Devices, sameDevice)
	if err := p.checkConflicts(c, pl, sameAllocation); err != nil {
		return nil, err
	}
	if err := p.execute(ctx, pl); err != nil {
		return nil, err
	}
	return pl.kubeletDevices(p.opts.Pool), nil
}

// loadOldRecord returns the record that an earlier call wrote for the claim, or nil. It quarantines
// the record if it is unreadable.
func (p *Preparer) loadOldRecord(ctx context.Context, c *resourceapi.ResourceClaim) (*checkpoint.Record, error) {
	old, found, err := p.node.Records.Load(c.UID)
	var unreadable *statefile.UnreadableError
	switch {
	case errors.As(err, &unreadable):
		return nil, p.quarantineRecord(ctx, c.UID, unreadable)
	case err != nil:
		return nil, cause.Wrap(cause.Record, err)
	case !found:
		return nil, nil
	}
	return &old, nil
}

// checkReserved refuses a claim that is reserved for no Pod. The kubelet never prepares such a
// claim, so this must be a late call: its Pod is gone and the claim was already unprepared. If the
// call succeeded, no later call would unprepare the claim.
//
// A late call cannot always be recognized. The call for the claim's next Pod has the same UID and
// allocation, and a PodGroup keeps its claim reserved while it has no Pod. If a late call prepares
// such a claim, the driver unprepares the claim once the PodGroup is gone: see
// [ledger.Ledger.OrphanReason].
func checkReserved(c *resourceapi.ResourceClaim) error {
	if c.Status.Allocation != nil && len(c.Status.ReservedFor) == 0 {
		return cause.Errorf(cause.Claim, "the claim is not reserved for any Pod: this call is late, or was sent twice")
	}
	return nil
}

// checkNotCanceled refuses a call that the kubelet has canceled. After that the kubelet unprepares
// the claim.
func checkNotCanceled(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return cause.Errorf(cause.Canceled, "the kubelet canceled this call: %w", err)
	}
	return nil
}

// checkTimely returns an error if the kubelet has canceled this call. If "waited" is true, or the
// claim was unprepared since this call arrived, it also returns an error if the claim has changed
// in the API server. The caller holds the claim's lock.
func (p *Preparer) checkTimely(ctx context.Context, c *resourceapi.ResourceClaim, waited bool) error {
	if err := checkNotCanceled(ctx); err != nil {
		return err
	}
	if waited || p.opts.Claims.UnpreparedSince(ctx, c.UID) {
		return p.checkUnchanged(ctx, c)
	}
	return nil
}

// checkUnchanged reads the claim from the API server. It returns an error unless the claim has the
// same allocation and is reserved for a Pod, because the kubelet may have canceled this call while
// it waited, and the claim's next Pod may be on another node.
func (p *Preparer) checkUnchanged(ctx context.Context, c *resourceapi.ResourceClaim) error {
	reading, cancel := context.WithTimeoutCause(ctx, readClaimTime, fmt.Errorf("the API server did not answer within %s: the kubelet retries",
		readClaimTime))
	defer cancel()
	now, err := p.opts.Claims.Read(reading, c.Namespace, c.Name)
	if err != nil {
		return cause.Errorf(cause.Canceled, "read the claim again after a wait: %w", cmp.Or(context.Cause(reading), err))
	}
	if now.UID != c.UID {
		return cause.Errorf(cause.Claim, "another claim of the same name (UID %s) replaced the claim while this call waited", now.UID)
	}
	before, _ := claim.Read(c, device.DriverName)
	after, err := claim.Read(now, device.DriverName)
	if err != nil {
		return cause.Errorf(cause.Claim, "after a wait: %w", err)
	}
	if err := checkReserved(now); err != nil {
		return err
	}
	if !equality.Semantic.DeepEqual(before, after) {
		return cause.Errorf(cause.Claim, "the claim's allocation changed while this call waited: the kubelet retries")
	}
	return nil
}

// verifyNode writes the node-wide CDI spec. It returns an error if a file that every GPU container
// needs, or a device node of the plan's GPUs, does not exist.
func (p *Preparer) verifyNode(pl *plan) error {
	if err := p.opts.Edits.Verify(pl.baseEdits); err != nil {
		return cause.Errorf(cause.NotReady, "files that every GPU container needs are missing on this node: %w", err)
	}
	if err := p.node.Specs.WriteBase(pl.baseEdits); err != nil {
		return cause.Wrap(cause.Step, err)
	}
	for i, req := range pl.requests {
		if err := p.opts.Edits.Verify(req.gpuEdits); err != nil {
			return cause.Errorf(cause.Device, "device %s: %w", pl.record.Devices[i].Device, err)
		}
	}
	return nil
}

// execute prepares the claim: it saves the plan as a record, applies the steps and saves the
// result. If one of these fails, execute reverts the steps. If that fails too, the record stays,
// and the claim's next call, the plugin's next start or Reconcile reverts it.
func (p *Preparer) execute(ctx context.Context, pl *plan) error {
	if err := p.verifyNode(pl); err != nil {
		return err
	}
	work, cancel := steps.WithTimeout(ctx, steps.CallTime, steps.AnswerTime+steps.UndoTime)
	defer cancel()
	if err := p.checkDaemons(work, pl); err != nil {
		return err
	}
	cards := steps.NewCardStates(p.node.Partitions)
	if err := p.resolve(work, cards, pl); err != nil {
		return err
	}
	if !pl.hasPartitions() {
		if err := p.buildSpec(pl); err != nil {
			return err
		}
	}
	r := &pl.record
	r.State = checkpoint.Preparing
	list := pl.allSteps()
	env := steps.NewEnv(p.node, r, list)
	env.Cards, env.UUID = cards, pl.deviceUUID
	// If writing the CDI spec is the only step, the plan need not be recorded first: the plugin's next
	// start removes a spec without a record.
	if len(pl.steps) > 0 {
		if err := env.Journal(); err != nil {
			return errors.Join(err, p.node.Records.Remove(r.ClaimUID))
		}
	}
	err := steps.ApplyAll(work, env, pl.steps)
	if err == nil {
		err = p.writeSpec(work, env, pl)
	}
	if err == nil {
		if err = p.recordResult(*r, pl); err == nil {
			return nil
		}
	}
	undo, cancelUndo := context.WithTimeout(context.WithoutCancel(ctx), steps.UndoTime+steps.AnswerTime)
	defer cancelUndo()
	if rerr := p.undo(undo, r, list); rerr != nil {
		klog.FromContext(ctx).Error(rerr, "Failed to revert a failed preparation; the next call for the claim, or Reconcile, reverts it")
	}
	return cause.OrStep(err)
}

// writeSpec writes the claim's CDI spec. If a file or device node in the spec does not exist, it
// returns an error instead.
func (p *Preparer) writeSpec(ctx context.Context, env *steps.Env, pl *plan) error {
	if err := p.buildSpec(pl); err != nil {
		return err
	}
	for i, req := range pl.requests {
		if req.name.Partition == nil {
			continue
		}
		part, err := req.partition()
		if err != nil {
			return err
		}
		if err := p.opts.Edits.Verify(p.opts.Edits.MIG(req.gpuEdits, part.instance, part.compute)); err != nil {
			return cause.Errorf(cause.Device, "device %s: %w", pl.record.Devices[i].Device, err)
		}
	}
	for _, c := range pl.spec.Clients {
		if err := p.opts.Edits.Verify(p.opts.Edits.MPSClient(c.Daemon)); err != nil {
			return cause.Errorf(cause.Step, "files that clients of MPS daemon %s need are missing on this node: %w", c.Daemon, err)
		}
	}
	return steps.ApplyAll(ctx, env, []steps.Step{pl.spec})
}

// recordResult saves r as the record of a prepared claim, with the plan's steps.
func (p *Preparer) recordResult(r checkpoint.Record, pl *plan) error {
	stored, err := steps.Encode(slices.DeleteFunc(pl.allSteps(), func(s steps.Step) bool { return !s.Lasting() }))
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	r.State, r.BootID, r.Steps = checkpoint.Prepared, p.node.BootID, stored
	if err := p.node.Records.Save(r); err != nil {
		return cause.Wrap(cause.Record, err)
	}
	return nil
}

// kubeletDevices returns the answer to the kubelet. Each allocated device has two CDI devices: the
// node-wide one and the claim's own.
func (pl *plan) kubeletDevices(pool string) []kubeletplugin.Device {
	answer := make([]kubeletplugin.Device, len(pl.record.Devices))
	for i, d := range pl.record.Devices {
		answer[i] = kubeletplugin.Device{
			Requests: []string{d.Request}, PoolName: pool, DeviceName: d.Device, ShareID: d.ShareID,
			CDIDeviceIDs: []string{cdi.BaseID(), cdi.ClaimDeviceID(pl.record.ClaimUID, d.Device, d.ShareID)},
		}
	}
	return answer
}
