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
// removes the claim's CDI spec, and what only this claim may have shared. MIG instances that were
// created for this claim alone stay, because nothing proves any more that this driver created them.
// GPUs stay bound to VFIO, because nothing tells which drivers they had.
func (p *Preparer) quarantineRecord(ctx context.Context, uid types.UID, unreadable *statefile.UnreadableError) error {
	entries, err := p.node.Records.List()
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	if err := p.node.Specs.RemoveClaim(uid); err != nil {
		return cause.Wrap(cause.Step, err)
	}
	shared, err := p.SharedGPUs()
	if err != nil {
		return err
	}
	work, cancel := steps.WithTimeout(ctx, steps.DestroyTime, steps.AnswerTime)
	defer cancel()
	for _, gpu := range shared {
		if !slices.ContainsFunc(entries, func(e checkpoint.Entry) bool { return e.ClaimUID == uid && e.MayHave(gpu) }) {
			continue
		}
		if err := p.EndUnshared(work, gpu, uid); err != nil {
			return err
		}
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

// SharedGPUs returns the GPUs of which something was set up for several claims.
func (p *Preparer) SharedGPUs() (gpus []string, _ error) {
	keys, err := p.node.Records.Holders()
	for _, key := range keys {
		h, _, _ := p.node.Records.Holder(key) // an unreadable one names no GPUs
		gpus = append(gpus, h.GPUs...)
	}
	slices.Sort(gpus)
	return slices.Compact(gpus), cause.Wrap(cause.Record, err)
}

// EndUnshared ends what no claim but "ending" shares any more of what was shared on the GPU:
// settings, daemons and partitions. It leaves those whose file is unreadable. A claim that ends has
// its record until all is reverted, so that no other claim gets the place of a partition before.
func (p *Preparer) EndUnshared(ctx context.Context, gpu string, ending types.UID) error {
	list, err := p.unshared(ending, func(h checkpoint.Holder) bool { return slices.Contains(h.GPUs, gpu) })
	if err != nil || len(list) == 0 {
		return err
	}
	var gpus []string
	for _, s := range list {
		gpus = append(gpus, s.GPUs...)
	}
	locks, err := p.opts.Locks.Acquire(ctx, gpus...)
	if err != nil {
		return LockError("a claim is being prepared or unprepared on the same GPU", err)
	}
	defer locks.Release()
	isFree := func(gpu string) bool { return !slices.Contains(gpus, gpu) }
	list, err = p.unshared(ending, func(h checkpoint.Holder) bool { return !slices.ContainsFunc(h.GPUs, isFree) })
	if err != nil {
		return err
	}
	env := steps.NewEnv(p.node, &checkpoint.Record{BootID: p.node.BootID}, nil)
	for _, s := range list {
		ended, err := s.End(ctx, env)
		if err != nil {
			return cause.OrStep(err)
		}
		if ended {
			Repair{"leftover-share", "Reverted what no claim shares any more", s.Key}.Report(ctx, p.opts.Observer)
		}
	}
	return nil
}

// unshared returns, of what among selects, what no claim but "ending" shares, in the order in which
// it must be reverted.
func (p *Preparer) unshared(ending types.UID, among func(checkpoint.Holder) bool) (list []*steps.Shared, _ error) {
	keys, err := p.node.Records.Holders()
	if err != nil {
		return nil, cause.Wrap(cause.Record, err)
	}
	var gpus []string
	for _, key := range keys {
		if h, found, err := p.node.Records.Holder(key); err == nil && found && among(h) {
			list = append(list, &steps.Shared{Key: key, GPUs: h.GPUs, Want: h.Step})
			gpus = append(gpus, h.GPUs...)
		}
	}
	if len(list) == 0 {
		return nil, nil
	}
	sharers, err := steps.ReadSharers(p.node.Records, p.node.BootID, gpus)
	list = slices.DeleteFunc(list, func(s *steps.Shared) bool {
		return slices.ContainsFunc(sharers.Of(s.Key), func(c checkpoint.ClaimRef) bool { return c.UID != ending })
	})
	steps.SortShared(list)
	slices.Reverse(list)
	return list, err
}
