package reconcile

import (
	"errors"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// Retryable returns the parts of err that may pass if the caller retries. err comes from
// [Reconciler.RepairSpecs] or [Reconciler.RepairClaimSpec]. Retryable drops errors about replaced
// cards, lost devices, and records that are unreadable or that a later version wrote. Reconcile
// reports all of these except unreadable records, which only Recover and the caller can report.
func Retryable(err error) error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var left []error
		for _, e := range joined.Unwrap() {
			left = append(left, Retryable(e))
		}
		return errors.Join(left...)
	}
	var unreadable *statefile.UnreadableError
	var future *statefile.NewerError
	var lost *prepare.LostError
	if errors.As(err, &unreadable) || errors.As(err, &future) || errors.As(err, &lost) || cause.IsPermanent(err) {
		return nil
	}
	return err
}

// LostDevices returns the [prepare.LostError]s in err, which [Reconciler.Reconcile] or
// [Reconciler.RepairClaimSpec] returned.
func LostDevices(err error) (lost []*prepare.LostError) {
	var joined interface{ Unwrap() []error }
	if errors.As(err, &joined) {
		for _, e := range joined.Unwrap() {
			lost = append(lost, LostDevices(e)...)
		}
	} else if one, ok := errors.AsType[*prepare.LostError](err); ok {
		lost = append(lost, one)
	}
	return lost
}
