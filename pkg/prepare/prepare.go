package prepare

import (
	"context"
	"errors"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claim"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
)

// Prepare makes the claim's devices usable and answers what the container runtime is to inject. It may be called again at any time.
func (p *Preparer) Prepare(ctx context.Context, c *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	held, err := p.lock(ctx, c.UID)
	if err != nil {
		return nil, about(c.Namespace+"/"+c.Name, err)
	}
	defer held.Release()
	devices, err := p.prepareLocked(ctx, held, c)
	if err != nil {
		return nil, about(c.Namespace+"/"+c.Name, err)
	}
	return devices, nil
}

func (p *Preparer) prepareLocked(ctx context.Context, held *lock.Held, c *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	want, err := p.plan(c)
	if err != nil {
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
	if held.Waited {
		if err := p.unchanged(ctx, c); err != nil {
			return nil, err
		}
	}
	if old != nil {
		if kept, err := p.keep(ctx, *old, want); kept || err != nil {
			return want.answer(p.Pool), err
		}
	}
	if len(want.record.Devices) == 0 {
		return nil, nil
	}
	if err := p.free(c, want.record); err != nil {
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

// unchanged makes sure, after a wait, that the caller is still there and the claim still has the allocation that was planned for: the kubelet's call may
// be one that it gave up long ago, and the claim's next Pod may be on another node.
func (p *Preparer) unchanged(ctx context.Context, c *resourceapi.ResourceClaim) error {
	if err := ctx.Err(); err != nil {
		return because(CauseCanceled, "the kubelet gave this call up: %w", err)
	}
	now, err := p.Reread(ctx, c.Namespace, c.Name)
	if err != nil {
		return because(CauseCanceled, "read the claim again after a wait: %w", err)
	}
	if now.UID != c.UID {
		return because(CauseClaim, "it was replaced by another claim of the same name (UID %s) while this call waited", now.UID)
	}
	before, _ := claim.Read(c, p.DriverName)
	after, err := claim.Read(now, p.DriverName)
	if err != nil {
		return because(CauseClaim, "after a wait: %w", err)
	}
	if !equality.Semantic.DeepEqual(before, after) {
		return because(CauseClaim, "its allocation changed while this call waited; the kubelet will try again")
	}
	return nil
}

func same[T comparable](a, b *T) bool {
	return a == b || a != nil && b != nil && *a == *b
}

// keep looks at an earlier preparation of the claim: one that is finished and for the same allocation is verified, mended and kept.
// Any other is reverted.
func (p *Preparer) keep(ctx context.Context, old checkpoint.Record, want *plan) (kept bool, err error) {
	logger := klog.FromContext(ctx)
	if old.State != checkpoint.Prepared || !slices.EqualFunc(old.Devices, want.record.Devices, sameDevice) {
		logger.Info("Reverting an earlier preparation of the claim", "state", old.State, "devices", deviceNames(old.Devices))
		return false, p.revert(ctx, old)
	}
	if !slices.EqualFunc(old.Steps, want.record.Steps, sameKind) {
		// Made by another version of the driver. Nothing that it did may be forgotten: what this version cannot revert, it refuses here by name.
		logger.Info("Preparing the claim anew: an earlier preparation took other steps")
		return false, p.revert(ctx, old)
	}
	for i, d := range old.Devices {
		if now := want.record.Devices[i]; now.GPUUUID != d.GPUUUID {
			return false, replaced(d, now.GPUUUID)
		}
	}
	if err := p.verify(want); err != nil {
		return false, err
	}
	if err := applyAll(ctx, p.env(old.ClaimUID), want.steps); err != nil {
		return false, because(CauseStep, "%w", err)
	}
	if old.BootID == want.record.BootID && slices.EqualFunc(old.Steps, want.record.Steps, sameStep) {
		return true, nil
	}
	old.BootID, old.Steps = want.record.BootID, want.record.Steps
	if err := p.Records.Save(old); err != nil {
		return false, because(CauseRecord, "%w", err)
	}
	return true, nil
}

func replaced(d checkpoint.Device, now string) error {
	return because(CauseDevice, "request %s: device %s was GPU %s when the claim was prepared and is GPU %s now: the card was replaced, delete the claim's Pods to give it back",
		d.Request, d.Device, d.GPUUUID, now)
}

// sameDevice leaves the UUID out: a card that was replaced is told apart from another allocation.
func sameDevice(a, b checkpoint.Device) bool {
	return a.Request == b.Request && a.Pool == b.Pool && a.Device == b.Device && a.AdminAccess == b.AdminAccess && same(a.ShareID, b.ShareID)
}

func sameStep(a, b checkpoint.Step) bool {
	return a.Kind == b.Kind && string(a.Params) == string(b.Params)
}

func sameKind(a, b checkpoint.Step) bool { return a.Kind == b.Kind }

func deviceNames(devices []checkpoint.Device) []string {
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = d.Device
	}
	return names
}

// free refuses GPUs that another claim holds. The caller holds their locks.
func (p *Preparer) free(c *resourceapi.ResourceClaim, r checkpoint.Record) error {
	entries, err := p.Records.List()
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	for _, d := range r.Devices {
		if d.AdminAccess {
			continue
		}
		for _, e := range entries {
			if e.ClaimUID == c.UID || !e.Inexact() && !slices.Contains(e.Devices, d.Device) {
				continue
			}
			refusal := &HeldError{Request: d.Request, Device: d.Device, GPU: d.GPU, UID: e.ClaimUID}
			holder, found, err := p.Records.Load(e.ClaimUID)
			switch {
			case err != nil:
				refusal.Unreadable = err
			case found && e.Inexact() && !slices.Contains(holder.Holds(), d.Device):
				continue
			case found:
				refusal.Holder = holder.Namespace + "/" + holder.Name
			}
			return because(CauseHeld, "%w", refusal)
		}
	}
	return nil
}

// verify looks at everything that the containers will be promised.
func (p *Preparer) verify(want *plan) error {
	if err := p.Verify(want.common); err != nil {
		return because(CauseNotReady, "what every container with a GPU needs is not complete on this node: %w", err)
	}
	if err := p.Specs.WriteBase(want.common); err != nil {
		return because(CauseStep, "%w", err)
	}
	for i, edits := range want.edits {
		if err := p.Verify(edits); err != nil {
			return because(CauseDevice, "device %s: %w", want.record.Devices[i].Device, err)
		}
	}
	return nil
}

// carryOut is the transaction: the plan on the disk, the steps, the result on the disk. What fails is reverted; if even that fails, the record stays
// and the next call for the claim, or the next start, reverts it.
func (p *Preparer) carryOut(ctx context.Context, want *plan) error {
	if err := p.verify(want); err != nil {
		return err
	}
	r := want.record
	r.State = checkpoint.Preparing
	if err := p.Records.Save(r); err != nil {
		return errors.Join(because(CauseRecord, "%w", err), p.Records.Remove(r.ClaimUID))
	}
	err := applyAll(ctx, p.env(r.ClaimUID), want.steps)
	if err != nil {
		err = because(CauseStep, "%w", err)
	} else {
		r.State = checkpoint.Prepared
		if err = p.Records.Save(r); err == nil {
			return nil
		}
		err = because(CauseRecord, "%w", err)
	}
	if rerr := p.revert(context.WithoutCancel(ctx), r); rerr != nil {
		klog.FromContext(ctx).Error(rerr, "Could not revert a preparation that failed; the next call for the claim tries again")
	}
	return err
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
