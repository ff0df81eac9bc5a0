package prepare

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// orphans removes what no claim's record tells of. The record of a claim goes last, and a daemon before its file, so this finds something only where files
// were lost, or where a call was killed. What cannot be put in order keeps nothing else from it.
func (p *Preparer) orphans(ctx context.Context) error {
	// One after the other, because a claim's lock may be wanted for both: no part of a comparison must take another one for a call that works on the claim.
	return errors.Join(p.recordless(ctx), p.unnamed(ctx))
}

// unnamed puts in order what claims share where no claim's record names it, and ends daemons of which not even a file tells.
func (p *Preparer) unnamed(ctx context.Context) error {
	keys, err := p.Records.Holders()
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	var all together
	for _, key := range keys {
		h, found, err := p.Records.Holder(key)
		if isUnreadable(found, err) {
			all.do(func() error { return p.unheld(ctx, key, err) })
			continue
		}
		if err == nil && found && len(h.Claims) == 0 {
			all.do(func() error { return p.undone(ctx, key) })
		}
	}
	all.do(func() error { return p.strays(ctx) })
	all.do(func() error { return p.begun(ctx, keys) })
	return all.wait()
}

// recordless removes what is left of those claims that have no record: specs, files that were not finished, and their part in what they shared. Of one claim
// everything goes under one hold of its lock.
func (p *Preparer) recordless(ctx context.Context) error {
	entries, err := p.Records.List()
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	traced, tracesErr := p.traces()
	sharing, sharingErr := p.inHolders()
	uids := slices.Concat(traced, sharing)
	slices.Sort(uids)
	var all together
	for _, uid := range slices.Compact(uids) {
		if !hasRecord(entries, uid) {
			all.do(func() error { return p.removeRecordless(ctx, uid) })
		}
	}
	return errors.Join(tracesErr, sharingErr, all.wait())
}

// inHolders are the claims that a file says to share something.
func (p *Preparer) inHolders() (uids []types.UID, _ error) {
	keys, err := p.Records.Holders()
	if err != nil {
		return nil, because(CauseRecord, "%w", err)
	}
	for _, key := range keys {
		h, _, err := p.Records.Holder(key)
		if err != nil {
			continue // see [Preparer.unnamed]
		}
		for _, c := range h.Claims {
			uids = append(uids, c.UID)
		}
	}
	return uids, nil
}

func hasRecord(entries []checkpoint.Entry, uid types.UID) bool {
	return slices.ContainsFunc(entries, func(e checkpoint.Entry) bool { return e.ClaimUID == uid })
}

// removeRecordless leaves a claim alone that another call works on, or that has a record by now.
func (p *Preparer) removeRecordless(ctx context.Context, uid types.UID) error {
	waiting, cancel := context.WithTimeout(ctx, tryWait)
	defer cancel()
	return p.unlessBusy(waiting, uid, func(*lock.Held) error {
		entries, err := p.Records.List()
		if err != nil {
			return because(CauseRecord, "%w", err)
		}
		if hasRecord(entries, uid) {
			return nil
		}
		work, cancelWork := context.WithTimeout(ctx, roundTime+answerTime)
		defer cancelWork()
		return errors.Join(p.removeTraces(ctx, uid), p.leaveAll(work, uid))
	})
}

// removeTraces removes a claim's spec, and the beginning of its record, where there are any. The caller holds the claim, which has no record.
func (p *Preparer) removeTraces(ctx context.Context, uid types.UID) error {
	specified, err := p.Specs.Claims()
	if err != nil {
		return because(CauseStep, "%w", err)
	}
	unfinished, err := p.Records.Unfinished()
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	if slices.Contains(unfinished, uid) {
		if err := p.Records.Discard(uid); err != nil {
			return because(CauseRecord, "%w", err)
		}
		p.repaired(ctx, Repair{"unfinished-write", "Removed the beginning of a record that a killed call left", string(uid)})
	}
	if !slices.Contains(specified, uid) {
		return nil
	}
	if err := p.Specs.RemoveClaim(uid); err != nil {
		return because(CauseStep, "%w", err)
	}
	p.repaired(ctx, Repair{"leftover-spec", "Removed the CDI spec of a claim that holds nothing on this node", string(uid)})
	return nil
}

// unheld sets a file aside that cannot be read, if no record says that a claim holds what it is about, and the hardware to its default.
func (p *Preparer) unheld(ctx context.Context, key string, reason error) error {
	return p.nobodys(ctx, key, isUnreadable, func(work context.Context) error {
		if err := p.setDefault(work, key); err != nil {
			return stepError(fmt.Errorf("what claims shared as %s, of which nothing can be read: %w", key, err))
		}
		place, err := p.Records.QuarantineHolder(key, p.Now())
		if err != nil {
			return because(CauseRecord, "%w", err)
		}
		klog.FromContext(ctx).Error(reason, "Set a file aside that said what claims shared, and that no claim's record names; the hardware was set to its default, because what was found before cannot be told",
			"holder", key, "quarantine", place)
		p.Repaired(Repair{"unreadable-holder", "Set a file aside that said what claims shared, and the hardware to its default", key})
		return nil
	})
}

// undone sets back what the last claim could not. That it cannot either is said, and is no reason to compare everything again soon.
func (p *Preparer) undone(ctx context.Context, key string) error {
	work, cancel := context.WithTimeout(ctx, keepTime)
	defer cancel()
	held, err := p.lockKey(work, key)
	if err != nil {
		return err
	}
	defer held.Release()
	h, found, err := p.Records.Holder(key)
	if err != nil || !found || len(h.Claims) > 0 {
		return nil // somebody else has put it in order, or needs it
	}
	s := &shared{Key: key, GPUs: h.GPUs, Want: h.Step}
	env := p.env(&checkpoint.Record{BootID: p.BootID}, nil)
	if h.BootID == p.BootID {
		if err := s.undo(work, env); err != nil {
			klog.FromContext(ctx).Error(err, "Could not set back what claims shared; it is tried again, and keeps nobody from the GPU", "holder", key)
			return nil
		}
	}
	if err := s.removed(env); err != nil {
		return err
	}
	p.repaired(ctx, Repair{"leftover-holder", "Removed what claims shared that have gone", key})
	return nil
}

// begun removes the beginnings of files that killed calls left and that no claim would take along: the file itself was set aside, or the record that names it.
func (p *Preparer) begun(ctx context.Context, there []string) error {
	keys, err := p.Records.UnfinishedHolders()
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	var all together
	for _, key := range keys {
		if !slices.Contains(there, key) {
			all.do(func() error { return p.neverHeld(ctx, key) })
		}
	}
	return all.wait()
}

func (p *Preparer) neverHeld(ctx context.Context, key string) error {
	return p.nobodys(ctx, key, isAbsent, func(context.Context) error {
		if err := p.Records.RemoveHolder(key); err != nil {
			return because(CauseRecord, "%w", err)
		}
		p.repaired(ctx, Repair{"unfinished-write", "Removed the beginning of a file that said what claims share, which a killed call left", key})
		return nil
	})
}

// setDefault undoes what a key alone tells of. An instance stays: that it is ours nothing proves any more.
func (p *Preparer) setDefault(ctx context.Context, key string) error {
	of, kind := keyOf(key)
	var step sharable
	switch kind {
	case mpsDaemonKind:
		return p.MPS.Stop(ctx, of)
	case computeModeKind, timeSliceKind:
		snapshot := p.Hardware.Snapshot()
		t, there := find(snapshot, of)
		if !there && snapshot.Known {
			return nil // with the card, what was set on it has gone
		}
		if !there {
			return notReady(snapshot)
		}
		step = &computeMode{setting[device.ComputeMode]{GPU: of, Card: t.gpu.Card()}}
		if kind == timeSliceKind {
			step = &timeSlice{setting: setting[device.TimeSlice]{GPU: of, Card: t.gpu.Card()}}
		}
	default:
		return nil
	}
	step.unknown()
	return step.Revert(ctx, p.env(&checkpoint.Record{BootID: p.BootID}, nil))
}

// strays ends daemons of which no file says that claims hold them: their devices are given to others.
func (p *Preparer) strays(ctx context.Context) error {
	work, cancel := context.WithTimeout(ctx, roundTime)
	defer cancel()
	running, err := p.MPS.List(work)
	if absent := new(mps.NotRunningError); errors.As(err, &absent) {
		return nil // nor any daemon
	}
	if err != nil {
		return stepError(err)
	}
	keys, err := p.Records.Holders()
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	var all together
	for _, s := range running {
		if id := s.Daemon.ID; !slices.Contains(keys, sharedKey(id, mpsDaemonKind)) {
			all.do(func() error { return p.endStray(ctx, id) })
		}
	}
	return all.wait()
}

func (p *Preparer) endStray(ctx context.Context, id string) error {
	return p.nobodys(ctx, sharedKey(id, mpsDaemonKind), isAbsent, func(work context.Context) error {
		if err := p.MPS.Stop(work, id); err != nil {
			return stepError(fmt.Errorf("a daemon that no claim holds: %w", err))
		}
		p.repaired(ctx, Repair{"leftover-daemon", "Ended an MPS daemon that no claim holds", id})
		return nil
	})
}

// nobodys puts in order what a key is about that no claim holds, while no call can change that. Its file must be as it was seen before the lock was had, or a call
// has come between; and no record may name it: such a claim is given its file again by its own comparison.
func (p *Preparer) nobodys(ctx context.Context, key string, asSeen func(found bool, err error) bool, order func(work context.Context) error) error {
	work, cancel := context.WithTimeout(ctx, roundTime)
	defer cancel()
	held, err := p.lockKey(work, key)
	if err != nil {
		return err
	}
	defer held.Release()
	if _, found, err := p.Records.Holder(key); !asSeen(found, err) {
		return nil
	}
	if named, err := p.named(key); named || err != nil {
		return err
	}
	return order(work)
}

// isUnreadable and isAbsent are what a holder's file may be seen to be.
func isUnreadable(_ bool, err error) bool {
	reason := new(checkpoint.UnreadableError)
	return errors.As(err, &reason)
}

func isAbsent(found bool, err error) bool { return !found && err == nil }

// lockKey takes the lock of those who could change what the key is about: of the GPU, or of the claim that has it for itself.
func (p *Preparer) lockKey(ctx context.Context, key string) (*lock.Held, error) {
	of, _ := keyOf(key)
	locks := []lock.Name{}
	if name, known := device.ParseName(of); known {
		locks = gpuLocks(name.GPU)
	} else if uid, ok := ownerOf(of); ok {
		locks = append(locks, claimLock(uid))
	}
	held, err := p.Locks.Acquire(ctx, locks...)
	if err != nil {
		return nil, notLocked("a claim is being prepared or unprepared that has to do with "+of, err)
	}
	return held, nil
}

// ownerOf is the claim in the ID of a daemon that is one claim's.
func ownerOf(daemon string) (types.UID, bool) {
	i := strings.LastIndex(daemon, "-")
	if i <= 0 {
		return "", false
	}
	return types.UID(daemon[:i]), true
}

// named says whether a record names the key, or cannot be read and may.
func (p *Preparer) named(key string) (bool, error) {
	entries, err := p.Records.List()
	if err != nil {
		return false, because(CauseRecord, "%w", err)
	}
	return slices.ContainsFunc(entries, func(e checkpoint.Entry) bool {
		r, found, err := p.Records.Load(e.ClaimUID)
		return err != nil || found && slices.ContainsFunc(r.Steps, func(s checkpoint.Step) bool { return names(s, key) })
	}), nil
}

// names says whether a record's step is about the key.
func names(step checkpoint.Step, key string) bool {
	if step.Kind != sharedKind {
		return false
	}
	s := &shared{}
	return json.Unmarshal(step.Params, s) != nil || s.Key == key
}
