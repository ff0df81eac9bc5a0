package reconcile

import (
	"context"
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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// collectGarbage removes specs, files and daemons that no claim's record names. A killed process
// may have left them, because every call removes its claim's record last. If one removal fails,
// collectGarbage still tries the others.
func (rec *Reconciler) collectGarbage(ctx context.Context) error {
	// Run these two in sequence. Both may lock the same claim, and each skips a claim that is locked.
	return errors.Join(rec.collectRecordless(ctx), rec.collectUnreferenced(ctx))
}

// collectUnreferenced ends what no claim shares any more: see [prepare.Preparer.EndUnshared]. It
// also quarantines unreadable files of shared settings, deletes unfinished files, and stops MPS
// daemons without a file. It spares what a claim's record names.
func (rec *Reconciler) collectUnreferenced(ctx context.Context) error {
	finished, err := rec.node.Records.Holders()
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	unfinished, err := rec.node.Records.UnfinishedHolders()
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	daemons, daemonsErr := rec.runningDaemons(ctx)
	keys := slices.Concat(finished, unfinished, daemons)
	slices.Sort(keys)
	var all []func() error
	for _, key := range slices.Compact(keys) {
		switch _, found, err := rec.node.Records.Holder(key); {
		case isUnreadable(found, err):
			all = append(all, func() error { return rec.quarantineHolder(ctx, key, err) })
		case isAbsent(found, err):
			all = append(all, func() error {
				return rec.removeAbandoned(ctx, key, slices.Contains(unfinished, key), slices.Contains(daemons, key))
			})
		}
	}
	shared, err := rec.transaction.SharedGPUs()
	for _, gpu := range shared {
		all = append(all, func() error {
			work, cancel := context.WithTimeout(ctx, sharedCheckTime)
			defer cancel()
			return rec.transaction.EndUnshared(work, gpu, "")
		})
	}
	return errors.Join(err, daemonsErr, inParallel(all))
}

// collectRecordless removes unfinished record files, and the CDI specs of claims that have no
// record. For each claim it takes the claim's lock.
func (rec *Reconciler) collectRecordless(ctx context.Context) error {
	entries, err := rec.node.Records.List()
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	unfinished, err := rec.node.Records.Unfinished()
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	specified, specsErr := rec.node.Specs.Claims()
	uids := slices.DeleteFunc(specified, func(uid types.UID) bool { return hasRecord(entries, uid) })
	uids = append(uids, unfinished...)
	slices.Sort(uids)
	var all []func() error
	for _, uid := range slices.Compact(uids) {
		all = append(all, func() error { return rec.removeLeftovers(ctx, uid) })
	}
	return errors.Join(cause.Wrap(cause.Step, specsErr), inParallel(all))
}

func hasRecord(entries []checkpoint.Entry, uid types.UID) bool {
	return slices.ContainsFunc(entries, func(e checkpoint.Entry) bool { return e.ClaimUID == uid })
}

// removeLeftovers removes the claim's unfinished record file, and what the claim left if it has no
// record. It does nothing if a call for the claim is running.
func (rec *Reconciler) removeLeftovers(ctx context.Context, uid types.UID) error {
	waiting, cancel := context.WithTimeout(ctx, tryWait)
	defer cancel()
	return rec.transaction.UnlessBusy(waiting, uid, func(*lock.Guard) error {
		if err := rec.removeUnfinished(ctx, uid); err != nil {
			return cause.Wrap(cause.Record, err)
		}
		entries, err := rec.node.Records.List()
		if err != nil {
			return cause.Wrap(cause.Record, err)
		}
		if hasRecord(entries, uid) {
			return nil
		}
		return rec.removeSpec(ctx, uid)
	})
}

// removeUnfinished removes the claim's unfinished record file. The caller holds the claim's lock.
func (rec *Reconciler) removeUnfinished(ctx context.Context, uid types.UID) error {
	unfinished, err := rec.node.Records.Unfinished()
	if err != nil || !slices.Contains(unfinished, uid) {
		return err
	}
	if err := rec.node.Records.DiscardUnfinished(uid); err != nil {
		return err
	}
	rec.report(ctx, "unfinished-write", "Removed unfinished claim record, left by a killed call", string(uid))
	return nil
}

// removeSpec removes the CDI spec of a claim that has no record. The caller holds the claim's lock.
func (rec *Reconciler) removeSpec(ctx context.Context, uid types.UID) error {
	withSpec, err := rec.node.Specs.Claims()
	if err != nil || !slices.Contains(withSpec, uid) {
		return cause.Wrap(cause.Step, err)
	}
	if err := rec.node.Specs.RemoveClaim(uid); err != nil {
		return cause.Wrap(cause.Step, err)
	}
	rec.report(ctx, "leftover-spec", "Removed CDI spec and metadata without a claim record", string(uid))
	return nil
}

// quarantineHolder moves an unreadable file of a shared setting or daemon to the quarantine
// directory, after it reset the setting to its default or stopped the daemon. It does nothing if a
// claim's record names the setting or daemon.
func (rec *Reconciler) quarantineHolder(ctx context.Context, key string, reason error) error {
	return rec.cleanUnreferenced(ctx, key, isUnreadable, func(work context.Context) error {
		if err := steps.ResetToDefault(work, steps.NewEnv(rec.node, &checkpoint.Record{BootID: rec.node.BootID}, nil), key); err != nil {
			return cause.OrStep(fmt.Errorf("reset shared setting %s, whose file is unreadable: %w", key, err))
		}
		place, err := rec.node.Records.QuarantineHolder(key, rec.node.Now())
		if err != nil {
			return cause.Wrap(cause.Record, err)
		}
		klog.FromContext(ctx).Error(reason,
			"Quarantined unreadable file of a shared setting that no claim uses; reset the setting to its default",
			"holder", key, "quarantine", place)
		rec.observer.Repaired(prepare.Repair{
			Kind: "unreadable-holder", Object: key, What: "Quarantined unreadable file of a shared setting and reset the setting to its default",
		})
		return cause.Wrap(cause.Record, rec.node.Records.RemoveHolder(key)) // what killed calls left of it
	})
}

// removeAbandoned removes the unfinished file of a shared setting that a killed call left, and
// stops an MPS daemon. Neither has a finished file with the claims that use it.
func (rec *Reconciler) removeAbandoned(ctx context.Context, key string, unfinished, daemon bool) error {
	return rec.cleanUnreferenced(ctx, key, isAbsent, func(work context.Context) error {
		if unfinished {
			if err := rec.node.Records.RemoveHolder(key); err != nil {
				return cause.Wrap(cause.Record, err)
			}
			rec.report(ctx, "unfinished-write", "Removed unfinished file of a shared setting, left by a killed call", key)
		}
		if daemon {
			id, _ := steps.SplitKey(key)
			if err := rec.node.MPS.Stop(work, id); err != nil {
				return cause.OrStep(fmt.Errorf("stop leftover MPS daemon %s: %w", id, err))
			}
			rec.report(ctx, "leftover-daemon", "Stopped leftover MPS daemon", id)
		}
		return nil
	})
}

// runningDaemons returns the keys of the MPS daemons that run.
func (rec *Reconciler) runningDaemons(ctx context.Context) (keys []string, _ error) {
	work, cancel := context.WithTimeout(ctx, steps.PeriodicTime)
	defer cancel()
	running, err := rec.node.MPS.List(work)
	if absent := new(mps.NotRunningError); errors.As(err, &absent) {
		return nil, nil // without a supervisor there is no daemon
	}
	for _, s := range running {
		keys = append(keys, steps.SharedKey(s.Daemon.ID, steps.MPSDaemonKind))
	}
	return keys, cause.OrStep(err)
}

// cleanUnreferenced runs clean under the lock of the shared setting or daemon called key. It does
// nothing if a claim's record names the key, because Reconcile then repairs that claim, or if
// unchanged returns false: then another call changed the file before the lock was taken.
func (rec *Reconciler) cleanUnreferenced(ctx context.Context, key string, unchanged func(found bool, err error) bool,
	clean func(work context.Context) error) error {
	work, cancel := context.WithTimeout(ctx, steps.PeriodicTime)
	defer cancel()
	locks, err := rec.lockKey(work, key)
	if err != nil {
		return err
	}
	defer locks.Release()
	if _, found, err := rec.node.Records.Holder(key); !unchanged(found, err) {
		return nil
	}
	if sharers, err := steps.ReadSharers(rec.node.Records, rec.node.BootID, nil); err != nil || len(sharers.Of(key)) > 0 {
		return err
	}
	return clean(work)
}

func isUnreadable(_ bool, err error) bool {
	reason := new(statefile.UnreadableError)
	return errors.As(err, &reason)
}

func isAbsent(found bool, err error) bool { return !found && err == nil }

// lockKey takes the lock that belongs to the key of a shared setting, partition or daemon: that of
// the GPU, or that of the claim whose daemon it is.
func (rec *Reconciler) lockKey(ctx context.Context, key string) (*lock.Guard, error) {
	of, _ := steps.SplitKey(key)
	var locks []string
	if name, known := device.ParseName(of); known {
		locks = append(locks, name.GPU)
	} else if uid, ok := ownerOf(of); ok {
		locks = append(locks, string(uid))
	}
	guard, err := rec.locks.Acquire(ctx, locks...)
	if err != nil {
		return nil, prepare.LockError("a claim is being prepared or unprepared on "+of, err)
	}
	return guard, nil
}

// ownerOf returns the UID of the claim that an MPS daemon serves. It returns false if the daemon's
// ID contains none.
func ownerOf(daemon string) (types.UID, bool) {
	i := strings.LastIndex(daemon, "-")
	if i <= 0 {
		return "", false
	}
	return types.UID(daemon[:i]), true
}
