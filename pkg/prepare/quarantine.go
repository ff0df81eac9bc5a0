package prepare

import (
	"context"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// quarantineRecord moves an unreadable record away when its claim is prepared or unprepared. It
// removes the claim's CDI spec, and removes the claim from all settings, daemons and partitions
// that it shares. MIG instances that were created for this claim alone stay, because nothing proves
// any more that this driver created them. GPUs stay bound to VFIO, because nothing tells which
// drivers they had.
func (p *Preparer) quarantineRecord(ctx context.Context, uid types.UID, unreadable *statefile.UnreadableError) error {
	entries, err := p.node.Records.List()
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	if err := p.node.Specs.RemoveClaim(uid); err != nil {
		return cause.Wrap(cause.Step, err)
	}
	if err := p.LeaveSharedSteps(ctx, uid); err != nil {
		return err
	}
	places, err := p.node.Records.Quarantine(uid, p.node.Now())
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	logger := klog.FromContext(ctx).WithValues("claimUID", uid, "quarantine", places)
	logger.Error(unreadable, "Quarantined unreadable claim record")
	p.opts.Observer.Repaired(Repair{"unreadable-record", "Quarantined unreadable claim record", string(uid)})
	if machines := devicesOf(entries, uid, func(n device.Name) bool { return n.Passthrough }); len(machines) > 0 {
		logger.Error(nil, "Kept GPUs bound to VFIO of a claim whose record was quarantined; only virtual machines can use them until an admin "+
			"writes the driver's name to the driver_override of their PCI functions, and the functions' addresses to the unbind of the "+
			"VFIO driver and to drivers_probe, or reboots the node", "devices", machines)
	}
	if parts, some := possiblePartitions(entries, uid); some {
		logger.Error(nil, "Kept the MIG instances of a claim whose record was quarantined; until they are removed, their GPUs are offered "+
			"with their present partitions only: remove unused instances with nvidia-smi mig -dci and -dgi, or set the GPU's policy to adopt",
			"devices", parts)
	}
	return nil
}

// possiblePartitions returns the unshared partitions in the file names of the claim's records. The
// result some is true if there are any, or if a file name has no room to list the devices.
func possiblePartitions(entries []checkpoint.Entry, uid types.UID) (parts []string, some bool) {
	inexact := slices.ContainsFunc(entries, func(e checkpoint.Entry) bool { return e.ClaimUID == uid && e.Inexact })
	parts = devicesOf(entries, uid, func(n device.Name) bool { return n.Partition != nil && !n.Share })
	return parts, inexact || len(parts) > 0
}

// devicesOf returns the devices in the file names of the claim's records that among selects.
func devicesOf(entries []checkpoint.Entry, uid types.UID, among func(device.Name) bool) (devices []string) {
	for _, e := range entries {
		for _, d := range e.Devices {
			if name, ok := device.ParseName(d); ok && e.ClaimUID == uid && among(name) {
				devices = append(devices, d)
			}
		}
	}
	return devices
}

// LeaveSharedSteps takes a claim without a readable record off all settings, daemons and partitions
// that it shares. It finds these by their files, which list the claims.
func (p *Preparer) LeaveSharedSteps(ctx context.Context, uid types.UID) error {
	keys, err := p.node.Records.Holders()
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	var list []*steps.Shared
	var gpus []string
	for _, key := range keys {
		h, found, err := p.node.Records.Holder(key)
		if err != nil || !found || !h.HeldBy(uid) {
			continue // the last claim whose record names an unreadable file cleans it up
		}
		list = append(list, &steps.Shared{Key: key, GPUs: h.GPUs, Want: h.Step})
		gpus = append(gpus, h.GPUs...)
	}
	if len(list) == 0 {
		return nil
	}
	locks, err := p.opts.Locks.Acquire(ctx, gpus...)
	if err != nil {
		return LockError("another claim is being prepared or unprepared on the same GPU", err)
	}
	defer locks.Release()
	steps.SortShared(list)
	slices.Reverse(list)
	env := steps.NewEnv(p.node, &checkpoint.Record{ClaimUID: uid, BootID: p.node.BootID}, nil)
	work, cancel := steps.WithTimeout(ctx, steps.DestroyTime, steps.AnswerTime)
	defer cancel()
	for _, s := range list {
		if err := s.Revert(work, env); err != nil {
			return cause.OrStep(err)
		}
		Repair{"leftover-share", "Released a shared GPU setting for a claim without a checkpoint record",
			string(uid) + " " + s.Key}.Report(ctx, p.opts.Observer)
	}
	return nil
}
