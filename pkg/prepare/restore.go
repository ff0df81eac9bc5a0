package prepare

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// ErrNotChecked means that a claim's devices were not examined, for example because the inventory
// is not ready. It is no sign that something is wrong with them.
var ErrNotChecked = errors.New("the claim's devices were not checked")

// RewriteSpec writes a prepared claim's CDI spec again, if the inventory has all of the claim's
// partitions. Otherwise it returns [ErrNotInInventory]. It reads no hardware.
func (p *Preparer) RewriteSpec(ctx context.Context, r checkpoint.Record) error {
	return p.rewriteSpec(ctx, r, p.checkInventory)
}

// Restore recreates a prepared claim's lost partitions, restores what the claim shares with others,
// and then rewrites its CDI spec. What several claims share is restored once in a pass. The caller
// holds the GPUs' locks.
func (p *Preparer) Restore(ctx context.Context, pass *steps.Pass, r checkpoint.Record) error {
	return p.rewriteSpec(ctx, r, func(ctx context.Context, env *steps.Env, pl *plan) error {
		env.Pass = pass
		return p.restoreAll(ctx, env, pl)
	})
}

// rewriteSpec writes a prepared claim's CDI spec again, after "ensure" found the claim's
// partitions. It returns ErrNotChecked if the inventory lacks one of the claim's GPUs. It does the
// same after a reboot, because the kubelet prepares every claim again then.
func (p *Preparer) rewriteSpec(ctx context.Context, r checkpoint.Record, ensure driftCheck) error {
	if r.BootID != p.node.BootID {
		return ErrNotChecked
	}
	snapshot := p.node.Hardware.Snapshot()
	if !snapshot.Ready && !onlyPassthrough(r) {
		return ErrNotChecked
	}
	pl, known, err := p.planFromRecord(r, snapshot)
	if err != nil {
		return err
	}
	if !known || slices.ContainsFunc(pl.requests, func(req deviceRequest) bool { return p.checkBinding(req) != nil }) {
		return ErrNotChecked // a lost GPU, or one that the inventory has not read again yet
	}
	if err := p.refresh(ctx, r, pl, ensure); err != nil {
		if errors.Is(err, ErrNotInInventory) {
			return err
		}
		return cause.OrStep(fmt.Errorf("claim %s/%s: %w", r.Namespace, r.Name, err))
	}
	return nil
}

// planFromRecord makes a plan from a record and the current inventory. known is false if the
// inventory lacks one of the claim's GPUs. If a card was replaced, the claim's device is lost: see
// [LostError].
func (p *Preparer) planFromRecord(r checkpoint.Record, snapshot inventory.Snapshot) (pl *plan, known bool, err error) {
	pl = &plan{snapshot: snapshot, record: r}
	pl.record.Devices = slices.Clone(r.Devices)
	for _, d := range r.Devices {
		req, ok := findDevice(snapshot, d.Device)
		if !ok || req.isAway() && !d.AdminAccess {
			return nil, false, nil
		}
		if req.isAway() {
			// An admin's claim takes nothing, so a virtual machine may have one of its GPUs.
			req.gpuEdits.Env = []string{"NVIDIA_VISIBLE_DEVICES=void"}
			req.binding = p.opts.Edits.Binding(req.gpu.PCIAddress)
		} else if wasReplaced(d, req) {
			return nil, false, p.markLost(pl, d, fmt.Errorf("the card was replaced: it was GPU %s and is GPU %s", d.GPUUUID, req.gpu.UUID))
		}
		req.gpu.UUID = cmp.Or(req.gpu.UUID, d.GPUUUID)
		pl.partitioned = pl.partitioned || req.name.Partition != nil
		pl.requests = append(pl.requests, req)
	}
	ours, err := p.adoptSteps(pl, r)
	if err == nil && !ours {
		err = errors.New("another version of the driver recorded steps that this one would not take: " +
			"install that version, or delete the claim's Pods")
	}
	if err != nil {
		return nil, false, cause.Errorf(cause.Record, "claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	return pl, true, nil
}

// checkBinding refuses a device whose card was bound to NVIDIA's driver again since the inventory
// read the numbers of its device nodes. They may belong to another card now.
func (p *Preparer) checkBinding(req deviceRequest) error {
	if req.name.Passthrough || p.opts.Edits.Binding(req.gpu.PCIAddress) == req.binding {
		return nil
	}
	return cause.Errorf(cause.NotReady, "the NVIDIA driver was loaded again, or took %s again, since the inventory read its device node: "+
		"the inventory notices within seconds, and the kubelet retries", req.name.GPU)
}

// WithdrawSpecs removes the CDI specs of those prepared claims whose device nodes may have other
// numbers now, because NVIDIA's driver was loaded again or took a card again. The kubelet restarts
// containers without a Prepare, and they would get another claim's GPU. Reconcile writes the specs
// again once the inventory has the new numbers. It accesses no hardware.
func (p *Preparer) WithdrawSpecs(ctx context.Context, claims []checkpoint.Record) error {
	var errs []error
	for _, r := range claims {
		if !p.isRenumbered(r) {
			continue
		}
		waiting, cancel := context.WithTimeout(ctx, withdrawWait)
		errs = append(errs, p.UnlessBusy(waiting, r.ClaimUID, func(*lock.Guard) error {
			now, found, err := p.node.Records.Load(r.ClaimUID)
			if err != nil || !found || !p.isRenumbered(now) {
				return err
			}
			return p.node.Specs.RemoveClaim(r.ClaimUID)
		}))
		cancel()
	}
	return cause.OrStep(errors.Join(errs...))
}

// withdrawWait limits how long WithdrawSpecs waits for a claim. A running call for the claim reads
// the numbers itself, and the next WithdrawSpecs looks again.
const withdrawWait = 10 * time.Millisecond

// isRenumbered reports whether the device nodes in the spec of a prepared claim may have other
// numbers now.
func (p *Preparer) isRenumbered(r checkpoint.Record) bool {
	return r.State == checkpoint.Prepared && r.BootID == p.node.BootID && slices.ContainsFunc(r.Devices, func(d checkpoint.Device) bool {
		name, ok := device.ParseName(d.Device)
		return ok && !name.Passthrough && p.opts.Edits.Binding(name.PCIAddress()) != d.Binding
	})
}
