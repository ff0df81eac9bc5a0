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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
)

// heldPoll is how often is looked whether another claim has been given back.
const heldPoll = 50 * time.Millisecond

// rereadTime bounds how long a call waits for the API server: well below the kubelet's 45 s, so
// that the kubelet hears why the call failed.
const rereadTime = 5 * time.Second

// Prepare makes the claim's devices usable and answers what the container runtime is to inject. It may be called again at any time.
//
// A device that is held by another claim may be about to be given back: a Pod that was deleted by force has freed its claim for the scheduler before the
// kubelet has stopped it. That is waited for a little, because the kubelet comes back only after ten seconds and more.
func (p *Preparer) Prepare(ctx context.Context, c *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	devices, err := p.prepare(ctx, c, false)
	if CauseOf(err) == CauseHeld {
		devices, err = p.prepareAfterOthers(ctx, c, err)
	}
	if err != nil {
		return nil, about(c.Namespace+"/"+c.Name, err)
	}
	return devices, nil
}

// prepareAfterOthers tries again each time that a claim has been given back that held a device.
func (p *Preparer) prepareAfterOthers(ctx context.Context, c *resourceapi.ResourceClaim, refused error) (devices []kubeletplugin.Device, err error) {
	waiting, cancel := context.WithTimeout(ctx, p.HeldPatience)
	defer cancel()
	err = refused
	for refusal := refusal(nil); errors.As(err, &refusal) && p.givenBack(waiting, refusal.until()); {
		devices, err = p.prepare(ctx, c, true)
	}
	return devices, err
}

// refusal names the claims that have to be given back, one of them, before trying again is of use.
type refusal interface {
	error
	until() []waitedFor
}

// waitedFor is a claim that has to be given back first.
type waitedFor struct {
	uid  types.UID
	name string
}

// givenBack waits for one of the claims. It is false if that has not happened in time, or cannot be expected.
func (p *Preparer) givenBack(ctx context.Context, holders []waitedFor) bool {
	if len(holders) == 0 || ctx.Err() != nil {
		return false
	}
	names := make([]string, len(holders))
	for i, h := range holders {
		names[i] = h.name
	}
	klog.FromContext(ctx).Info("Waiting for another claim to be given back", "claims", names)
	poll := time.NewTicker(heldPoll)
	defer poll.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-p.Stopping:
			return false
		case <-poll.C:
		}
		for _, h := range holders {
			if _, found, err := p.Records.Load(h.uid); err != nil || !found {
				return err == nil
			}
		}
	}
}

// prepare is one attempt. waited says that the claim may have changed since it was read.
func (p *Preparer) prepare(ctx context.Context, c *resourceapi.ResourceClaim, waited bool) ([]kubeletplugin.Device, error) {
	held, err := p.lock(ctx, c.UID)
	if err != nil {
		return nil, err
	}
	defer held.Release()
	return p.prepareLocked(ctx, held, c, waited)
}

func (p *Preparer) prepareLocked(ctx context.Context, held *lock.Held, c *resourceapi.ResourceClaim, waited bool) ([]kubeletplugin.Device, error) {
	if err := reserved(c); err != nil {
		return nil, err
	}
	want, err := p.plan(c)
	if err != nil {
		return nil, err
	}
	// No call gives the claim back while its lock is held, so what the API server says holds until
	// the GPUs are locked. It is asked before that: other claims on the GPUs do not wait for it.
	if err := p.timely(ctx, c, waited || held.Waited); err != nil {
		return nil, err
	}
	old, err := p.oldRecord(ctx, c)
	if err != nil {
		return nil, err
	}
	gpus := want.record.GPUs()
	if old != nil {
		gpus = append(gpus, old.GPUs()...)
	}
	if err := lockGPUs(ctx, held, gpus...); err != nil {
		return nil, err
	}
	if err := givenUp(ctx); err != nil {
		return nil, err
	}
	if old != nil {
		if kept, err := p.keep(ctx, *old, want); kept || err != nil {
			return want.answer(p.Pool), err
		}
	}
	if len(want.record.Devices) == 0 {
		return nil, nil
	}
	had := old != nil && slices.EqualFunc(old.Devices, want.record.Devices, sameDevice)
	if err := p.free(c, want, had); err != nil {
		return nil, err
	}
	if err := p.carryOut(ctx, want); err != nil {
		return nil, err
	}
	return want.answer(p.Pool), nil
}

// oldRecord is what an earlier call left, if it can be read.
func (p *Preparer) oldRecord(ctx context.Context, c *resourceapi.ResourceClaim) (*checkpoint.Record, error) {
	old, found, err := p.Records.Load(c.UID)
	var unreadable *checkpoint.UnreadableError
	switch {
	case errors.As(err, &unreadable):
		return nil, p.setAside(ctx, c.UID, unreadable)
	case err != nil:
		return nil, because(CauseRecord, "%w", err)
	case !found:
		return nil, nil
	}
	return &old, nil
}

// reserved refuses a claim that no Pod may use. The kubelet asks for none: such a call comes after
// its Pod has gone and the claim was given back, and nobody would give it back once more. The next
// Pod of a claim with a name is told from it by nothing else: UID and allocation are the same. A
// PodGroup keeps its claim reserved between its Pods. What a late call prepares of such a claim is
// garbage when the group is gone: see [Preparer.Abandoned].
func reserved(c *resourceapi.ResourceClaim) error {
	if c.Status.Allocation != nil && len(c.Status.ReservedFor) == 0 {
		return because(CauseClaim, "it is not reserved for any Pod: this call is late, or was sent twice")
	}
	return nil
}

// givenUp refuses a call that the kubelet does not wait for any more. It is not begun: the kubelet
// gives the claim back next.
func givenUp(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return because(CauseCanceled, "the kubelet gave this call up: %w", err)
	}
	return nil
}

// timely makes sure that the kubelet still waits for this call. Where others may have worked on the
// claim since it was read, the claim must also be as it was. The caller holds the claim's lock.
func (p *Preparer) timely(ctx context.Context, c *resourceapi.ResourceClaim, waited bool) error {
	if err := givenUp(ctx); err != nil {
		return err
	}
	if waited || p.Overtaken(ctx, c.UID) {
		return p.unchanged(ctx, c)
	}
	return nil
}

// unchanged makes sure, after a wait, that the claim still has the allocation that was planned for, and a Pod: the kubelet's call may be one that it gave up
// long ago, and the claim's next Pod may be on another node.
func (p *Preparer) unchanged(ctx context.Context, c *resourceapi.ResourceClaim) error {
	reading, cancel := context.WithTimeoutCause(ctx, rereadTime, fmt.Errorf("the API server did not answer within %s; the kubelet will try again", rereadTime))
	defer cancel()
	now, err := p.Reread(reading, c.Namespace, c.Name)
	if err != nil {
		return because(CauseCanceled, "read the claim again after a wait: %w", cmp.Or(context.Cause(reading), err))
	}
	if now.UID != c.UID {
		return because(CauseClaim, "it was replaced by another claim of the same name (UID %s) while this call waited", now.UID)
	}
	before, _ := claim.Read(c, p.DriverName)
	after, err := claim.Read(now, p.DriverName)
	if err != nil {
		return because(CauseClaim, "after a wait: %w", err)
	}
	if err := reserved(now); err != nil {
		return err
	}
	if !equality.Semantic.DeepEqual(before, after) {
		return because(CauseClaim, "its allocation changed while this call waited; the kubelet will try again")
	}
	return nil
}

// verify looks at what the containers will be promised, of the node and of whole cards.
func (p *Preparer) verify(w *plan) error {
	if err := p.Verify(w.common); err != nil {
		return because(CauseNotReady, "what every container with a GPU needs is not complete on this node: %w", err)
	}
	if err := p.Specs.WriteBase(w.common); err != nil {
		return because(CauseStep, "%w", err)
	}
	for i, t := range w.wants {
		if err := p.Verify(t.whole); err != nil {
			return because(CauseDevice, "device %s: %w", w.record.Devices[i].Device, err)
		}
	}
	return nil
}

// carryOut is the transaction: the plan on the disk, the steps, the result on the disk. What fails is reverted; if even that fails, the record stays
// and the next call for the claim, the next start or the next comparison with the hardware reverts it.
func (p *Preparer) carryOut(ctx context.Context, w *plan) error {
	if err := p.verify(w); err != nil {
		return err
	}
	work, cancel := within(ctx, callTime, answerTime+undoTime)
	defer cancel()
	if err := p.served(work, w); err != nil {
		return err
	}
	looks := newLooks(p.Partitions)
	if err := p.resolve(work, looks, w); err != nil {
		return err
	}
	if !w.partitioned() {
		if err := p.describe(w); err != nil {
			return err
		}
	}
	r := &w.record
	r.State = checkpoint.Preparing
	steps := w.all()
	env := p.env(r, steps)
	env.Looks, env.UUID = looks, w.uuid
	// Nothing but a spec needs no note beforehand: it has the claim's name, and one without a record is removed.
	if len(w.steps) > 0 {
		if err := env.Journal(); err != nil {
			return errors.Join(err, p.Records.Remove(r.ClaimUID))
		}
	}
	err := applyAll(work, env, w.steps)
	if err == nil {
		err = p.finish(work, env, w)
	}
	if err == nil {
		if err = p.settle(*r, w); err == nil {
			return nil
		}
	}
	undo, cancelUndo := context.WithTimeout(context.WithoutCancel(ctx), undoTime+answerTime)
	defer cancelUndo()
	if rerr := p.undo(undo, r, steps); rerr != nil {
		klog.FromContext(ctx).Error(rerr, "Could not revert a preparation that failed; the next call for the claim tries again")
	}
	return stepError(err)
}

// finish writes the claim's spec, after all that it names is there.
func (p *Preparer) finish(ctx context.Context, env *Env, w *plan) error {
	if err := p.describe(w); err != nil {
		return err
	}
	for i, t := range w.wants {
		if t.name.Partition == nil {
			continue
		}
		part, err := t.partition()
		if err != nil {
			return err
		}
		if err := p.Verify(p.MIGEdits(t.whole, part.instance, part.compute)); err != nil {
			return because(CauseDevice, "device %s: %w", w.record.Devices[i].Device, err)
		}
	}
	for _, c := range w.spec.Clients {
		if err := p.Verify(p.MPSEdits(c.Daemon)); err != nil {
			return because(CauseStep, "what the clients of MPS daemon %s need is not complete on this node: %w", c.Daemon, err)
		}
	}
	return applyAll(ctx, env, []Step{w.spec})
}

// settle makes the record that of a prepared claim.
func (p *Preparer) settle(r checkpoint.Record, w *plan) error {
	stored, err := store(lasting(w.all()), r.Steps)
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	r.State, r.BootID, r.Steps = checkpoint.Prepared, p.BootID, stored
	if err := p.Records.Save(r); err != nil {
		return because(CauseRecord, "%w", err)
	}
	return nil
}

// answer is what the kubelet is told: for each result the node-wide edits and the claim's own.
func (w *plan) answer(pool string) []kubeletplugin.Device {
	answer := make([]kubeletplugin.Device, len(w.record.Devices))
	for i, d := range w.record.Devices {
		answer[i] = kubeletplugin.Device{
			Requests: []string{d.Request}, PoolName: pool, DeviceName: d.Device, ShareID: d.ShareID,
			CDIDeviceIDs: []string{cdi.BaseID(), cdi.ClaimDeviceID(w.record.ClaimUID, d.Device, d.ShareID)},
		}
	}
	return answer
}

// notReady is the inventory's reason, as the answer to a claim.
func notReady(s inventory.Snapshot) error {
	reason := s.Reason
	if reason == "" {
		reason = "the node's devices are not known yet"
	}
	return because(CauseNotReady, "not ready yet: %s", reason)
}
