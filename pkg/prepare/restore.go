package prepare

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
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
		// If the NVIDIA driver was reloaded, the device nodes in the record may belong to another card
		// now. So this call leaves an existing spec alone, and a missing spec is written after the next
		// scan.
		return ErrNotChecked
	}
	pl, known, err := p.planFromRecord(r, snapshot)
	if err != nil {
		return err
	}
	if !known {
		return cmp.Or(p.writeRecordedSpec(ctx, r), ErrNotChecked)
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
		if !ok || req.isAway() {
			return nil, false, nil
		}
		if wasReplaced(d, req) {
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
	claimSpecs := steps.Of[*steps.ClaimSpec](list)
	for _, s := range claimSpecs {
		renumber(s, p.opts.Edits.Monitor().DeviceNodes)
	}
	if err := steps.ApplyAll(ctx, steps.NewEnv(p.node, &r, list), claimSpecs); err != nil {
		return cause.OrStep(fmt.Errorf("claim %s/%s: %w", r.Namespace, r.Name, err))
	}
	return nil
}

// renumber gives the device nodes of a recorded spec their current numbers. A driver reload changes
// them, and the old number may belong to another driver now.
func renumber(s *steps.ClaimSpec, current []*specs.DeviceNode) {
	for _, d := range s.Devices {
		for i, n := range d.ContainerEdits.DeviceNodes {
			if at := slices.IndexFunc(current, func(c *specs.DeviceNode) bool { return c.Path == n.Path }); at >= 0 {
				d.ContainerEdits.DeviceNodes[i] = current[at]
			}
		}
	}
}
