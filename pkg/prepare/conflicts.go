package prepare

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// conflictPoll is how often a waiting Prepare checks whether a conflicting claim was unprepared.
const conflictPoll = 50 * time.Millisecond

// checkConflicts returns an error if another claim uses a device of the claim, or one that
// cannot exist together with it. If sameAllocation is true, the claim was prepared with the same
// devices before. The caller holds the GPUs' locks.
func (p *Preparer) checkConflicts(pl *plan, sameAllocation bool) error {
	entries, err := p.node.Records.List()
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	others := slices.DeleteFunc(entries, func(e checkpoint.Entry) bool { return e.ClaimUID == pl.record.ClaimUID })
	for i, d := range pl.record.Devices {
		if d.AdminAccess {
			continue
		}
		if pl.requests[i].name.Share {
			if err := p.checkShare(pl, i, others, sameAllocation); err != nil {
				return err
			}
		}
		for _, e := range others {
			conflict := findConflict(pl.requests[i], e.Devices)
			if conflict == "" && !e.Inexact {
				continue
			}
			holder, found, err := p.node.Records.Load(e.ClaimUID)
			if err != nil {
				return inUnknownUseError(d, conflictProblem(d, conflict), e.ClaimUID, err)
			}
			if e.Inexact {
				conflict = findConflict(pl.requests[i], holder.OccupiedDevices())
			}
			if found && conflict != "" {
				return &heldError{inUseError(d, conflictProblem(d, conflict), holder), []checkpoint.ClaimRef{holder.Claim()}}
			}
		}
	}
	return nil
}

// checkShare returns an error if other claims on the shared device i leave too little capacity,
// have an unreadable record, or have shares of the other sort (with or without limits). If
// sameAllocation is true, the claim had this share before, so capacity does not matter.
func (p *Preparer) checkShare(pl *plan, i int, others []checkpoint.Entry, sameAllocation bool) error {
	d := pl.record.Devices[i]
	var holders []checkpoint.Record
	for _, e := range others {
		if !e.Inexact && !slices.Contains(e.Devices, d.Device) {
			continue
		}
		holder, found, err := p.node.Records.Load(e.ClaimUID)
		switch {
		case err != nil:
			if err := p.checkUnreadableShare(d, e.ClaimUID, err, sameAllocation); err != nil {
				return err
			}
		case found && sharesDifferently(d, holder):
			return inUseError(d, sharedDifferently, holder)
		case found:
			holders = append(holders, holder)
		}
	}
	if sameAllocation {
		return nil
	}
	return pl.checkCapacity(i, holders)
}

// checkUnreadableShare refuses the share d because it is unknown how much of the device the claim
// with this uid uses, whose record is unreadable. If sameAllocation is true, the claim had d
// before. Then d is refused only if exactly one of the two claims has limited shares.
func (p *Preparer) checkUnreadableShare(d checkpoint.Device, uid types.UID, unreadable error, sameAllocation bool) error {
	_, fractions, err := p.node.Records.Holder(steps.SharedKey(d.Device, steps.MPSDaemonKind))
	alike := err == nil && fractions == d.Fraction
	if alike && sameAllocation {
		return nil
	}
	problem := "is in use"
	if !alike {
		problem = sharedDifferently
	}
	return inUnknownUseError(d, problem, uid, unreadable)
}

const sharedDifferently = "cannot have fractions and plain shares at the same time, and is in use"

// sharesDifferently reports whether one claim has shares of the device with limited memory and the
// other has shares without limits, which exclude each other. The scheduler allocates both only if
// an admin changed the sharing rules while claims used the device.
func sharesDifferently(d checkpoint.Device, holder checkpoint.Record) bool {
	return slices.ContainsFunc(holder.Devices, func(h checkpoint.Device) bool {
		return h.Device == d.Device && !h.AdminAccess && h.Fraction != d.Fraction
	})
}

// conflictProblem says what is wrong with device d while another claim uses the device conflict,
// which is d itself, another device, or empty if that is unknown.
func conflictProblem(d checkpoint.Device, conflict string) string {
	if conflict == "" || conflict == d.Device {
		return "is in use"
	}
	return "cannot exist together with " + conflict + ", which is in use"
}

// findConflict returns the first name in occupied of a device that cannot be used together with the
// requested one, or "". A name that this version cannot parse comes from a later version of the
// driver, and counts as occupying the whole GPU.
func findConflict(req deviceRequest, occupied []string) string {
	for _, h := range occupied {
		if h != req.name.GPU && !strings.HasPrefix(h, req.name.GPU+"-") {
			continue
		}
		if name, known := device.ParseName(h); !known || device.Conflict(req.name, name, req.gpu) {
			return h
		}
	}
	return ""
}

// prepareAfterConflict waits for the claims that "refused", the error of the last attempt, names.
// Each time one of them was unprepared, it tries to prepare c again.
func (p *Preparer) prepareAfterConflict(ctx context.Context, c *resourceapi.ResourceClaim, refused error) (devices []kubeletplugin.Device,
	err error) {
	waiting, cancel := context.WithTimeout(ctx, p.opts.ConflictWait)
	defer cancel()
	err = refused
	for held := new(heldError); errors.As(err, &held) && p.waitForUnprepare(waiting, held.blockers); {
		devices, err = p.prepare(ctx, c, true)
	}
	return devices, err
}

// waitForUnprepare waits until one of the claims in "holders" is unprepared, and returns true. It
// returns false if ctx ends or the plugin stops first, or if the record of one of these claims
// cannot be read.
func (p *Preparer) waitForUnprepare(ctx context.Context, holders []checkpoint.ClaimRef) bool {
	if ctx.Err() != nil {
		return false
	}
	names := make([]string, len(holders))
	for i, h := range holders {
		names[i] = h.Namespace + "/" + h.Name
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
			if _, found, err := p.node.Records.Load(h.UID); err != nil || !found {
				return err == nil
			}
		}
	}
}
