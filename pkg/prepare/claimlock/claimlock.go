// Package claimlock locks claims and GPUs. All rooms of the transaction lock a claim first and then
// its GPUs.
package claimlock

import (
	"context"
	"errors"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

// claimLocks is the name of the lock file of all claims. Each GPU has its own lock file.
const claimLocks = "claims"

// ClaimName returns the name of a claim's lock.
func ClaimName(uid types.UID) lock.Name {
	return lock.Name{File: claimLocks, Part: string(uid)}
}

// GPUNames returns the names of the locks of the named GPUs, sorted and without duplicates.
func GPUNames(gpus ...string) []lock.Name {
	gpus = slices.Clone(gpus)
	slices.Sort(gpus)
	names := make([]lock.Name, 0, len(gpus))
	for _, g := range slices.Compact(gpus) {
		names = append(names, lock.Name{File: g})
	}
	return names
}

// Claim locks a claim.
func Claim(ctx context.Context, set *lock.Set, uid types.UID) (*lock.Guard, error) {
	return Acquire(ctx, set, "another call for the same claim is still running", ClaimName(uid))
}

// Acquire takes the named locks. If another call has one of them until ctx ends, the error begins
// with waitedFor, which says what that call does.
func Acquire(ctx context.Context, set *lock.Set, waitedFor string, names ...lock.Name) (*lock.Guard, error) {
	guard, err := set.Acquire(ctx, names...)
	if err != nil {
		return nil, withCause(waitedFor, err)
	}
	return guard, nil
}

// AddGPUs locks the GPUs for the caller who has the claim's lock.
func AddGPUs(ctx context.Context, guard *lock.Guard, gpus ...string) error {
	if err := guard.Add(ctx, GPUNames(gpus...)...); err != nil {
		return withCause("another claim is being prepared or unprepared on the same GPU", err)
	}
	return nil
}

// withCause adds a cause to err, an error of package lock. Either another call has the lock, or the
// lock file itself failed.
func withCause(waitedFor string, err error) error {
	if IsBusy(err) {
		return cause.Errorf(cause.Canceled, "%s: %w", waitedFor, err)
	}
	return cause.Wrap(cause.Record, err)
}

// IsBusy reports whether err means that another call has the lock.
func IsBusy(err error) bool {
	busy := new(lock.BusyError)
	return errors.As(err, &busy)
}

// UnlessBusy runs work under the claim's lock and returns its error. If another call has the lock
// until the context waiting ends, it returns nil without running work, because that call takes care
// of the claim. If the lock file cannot be used, it returns an error.
func UnlessBusy(waiting context.Context, set *lock.Set, uid types.UID, work func(guard *lock.Guard) error) error {
	guard, err := Claim(waiting, set, uid)
	if IsBusy(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer guard.Release()
	return work(guard)
}
