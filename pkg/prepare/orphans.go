package prepare

import (
	"context"
	"encoding/json"
	"errors"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// orphans takes claims that have no record any more out of what they shared. The record of a claim goes last, so this finds something only where records were
// lost.
func (p *Preparer) orphans(ctx context.Context) error {
	keys, err := p.Records.Holders()
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	var uids []types.UID
	for _, key := range keys {
		h, _, err := p.Records.Holder(key)
		var unreadable *checkpoint.UnreadableError
		if errors.As(err, &unreadable) {
			if err := p.unheld(ctx, key, unreadable); err != nil {
				return err
			}
			continue
		}
		for _, c := range h.Claims {
			uids = append(uids, c.UID)
		}
	}
	slices.Sort(uids)
	var errs []error
	for _, uid := range slices.Compact(uids) {
		if entries, err := p.Records.List(); err != nil || hasRecord(entries, uid) {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, p.leaveAlone(ctx, uid))
	}
	return errors.Join(errs...)
}

func hasRecord(entries []checkpoint.Entry, uid types.UID) bool {
	return slices.ContainsFunc(entries, func(e checkpoint.Entry) bool { return e.ClaimUID == uid })
}

// leaveAlone takes a claim out of what it shares if no other call works on it, and if it has no record still.
func (p *Preparer) leaveAlone(ctx context.Context, uid types.UID) error {
	waiting, cancel := context.WithTimeout(ctx, tryWait)
	defer cancel()
	held, err := p.lock(waiting, uid)
	if err != nil {
		return nil // the call that works on it knows better
	}
	defer held.Release()
	entries, err := p.Records.List()
	if err != nil || hasRecord(entries, uid) {
		return err
	}
	work, cancelWork := context.WithTimeout(ctx, roundTime+answerTime)
	defer cancelWork()
	return p.leaveAll(work, uid)
}

// unheld sets a file aside that cannot be read, if no record says that a claim holds what it is about.
func (p *Preparer) unheld(ctx context.Context, key string, reason error) error {
	of, kind := keyOf(key)
	name, known := device.ParseName(of)
	var locks []string
	if known {
		locks = []string{name.GPU}
	}
	work, cancel := context.WithTimeout(ctx, roundTime)
	defer cancel()
	held, err := p.Locks.Acquire(work, gpuLocks(locks...)...)
	if err != nil {
		return notLocked(ctx, "a claim is being prepared or unprepared on the GPU", err)
	}
	defer held.Release()
	entries, err := p.Records.List()
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	for _, e := range entries {
		r, found, err := p.Records.Load(e.ClaimUID)
		if err != nil || found && slices.ContainsFunc(r.Steps, func(s checkpoint.Step) bool { return names(s, key) }) {
			return nil // a record that cannot be read may name it
		}
	}
	if kind == mpsDaemonKind {
		if err := p.daemons().Stop(work, of); err != nil {
			return stepError(err)
		}
	}
	place, err := p.Records.QuarantineHolder(key, p.Now())
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	klog.FromContext(ctx).Error(reason, "Set a file aside that said what claims shared, and that no claim's record names: what it set may be set still, see nvidia-smi",
		"holder", key, "quarantine", place)
	return nil
}

// names says whether a record's step is about the key.
func names(step checkpoint.Step, key string) bool {
	if step.Kind != sharedKind {
		return false
	}
	s := &shared{}
	return json.Unmarshal(step.Params, s) != nil || s.Key == key
}
