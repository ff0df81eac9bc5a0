package prepare

import (
	"errors"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// InUseError refuses a device because another claim uses this device, or a device that cannot exist
// together with it.
type InUseError struct {
	Request string
	Device  string
	GPU     string
	// Conflict is the device that the other claim uses. It is Device itself, or a device that cannot
	// exist together with Device. It is empty if the other claim's record cannot be read.
	Conflict string
	UID      types.UID
	// Claim is the namespace and name of the other claim. It is empty if that claim's record cannot be
	// read.
	Claim string
	// Leaving means that the other claim is being unprepared.
	Leaving bool
	// SharedDifferently means that one of the two claims has shares of the device with limited memory,
	// and the other has shares without limits.
	SharedDifferently bool
	// Unreadable is why the other claim's record cannot be read.
	Unreadable error
}

// blockers returns the other claim, for which Prepare waits. It returns none if waiting cannot
// help: the other claim's record is unreadable, or the two claims share the device in different
// ways.
func (e *InUseError) blockers() []blockingClaim {
	if e.SharedDifferently || e.Unreadable != nil {
		return nil
	}
	return []blockingClaim{{e.UID, e.Claim}}
}

func (e *InUseError) Error() string {
	claim := "claim " + e.Claim + " (UID " + string(e.UID) + ")"
	if e.Claim == "" {
		claim = "the claim with UID " + string(e.UID) + ", whose record cannot be read"
		if e.Unreadable != nil {
			claim += " (" + e.Unreadable.Error() + ")"
		}
	}
	problem := "device " + e.Device + " is in use"
	if e.SharedDifferently {
		problem = "device " + e.Device + " cannot have fractions and plain shares at the same time, and is in use"
	}
	if e.Conflict != "" && e.Conflict != e.Device {
		problem = "device " + e.Device + " cannot exist together with " + e.Conflict + ", which is in use"
	}
	wayOut := "wait until the last Pod of that claim has ended on this node"
	if e.Leaving {
		wayOut = "that claim is being unprepared, which ends when no process uses its partitions"
	}
	return fmt.Sprintf("request %s: %s by %s: %s", e.Request, problem, claim, wayOut)
}

// LostError reports that a device of a prepared claim no longer exists. The driver has removed the
// claim's CDI spec, so that no container gets another device instead.
type LostError struct {
	// Claim is the claim's namespace and name.
	Claim  string
	UID    types.UID
	Device string
	GPU    string
	// Reason is why the driver cannot recreate the device.
	Reason error
}

func (e *LostError) Error() string {
	return fmt.Sprintf("claim %s: device %s is lost and its containers can no longer start (%v): delete the claim's Pods",
		e.Claim, e.Device, e.Reason)
}

// claimError is an error that Reconcile met while it repaired the claim uid. uid is empty if the
// error concerns no particular claim.
type claimError struct {
	uid types.UID
	error
}

func (e *claimError) Unwrap() error { return e.error }

func withClaim(uid types.UID, err error) error {
	if err == nil {
		return nil
	}
	return &claimError{uid, err}
}

// Undetermined reports whether the state of the claim uid is unknown after Reconcile returned err.
// Errors that concern only other claims do not make it unknown.
func Undetermined(err error, uid types.UID) bool {
	switch e := err.(type) { //nolint:errorlint // checks each level: errors.As would find only the first claim
	case nil:
		return false
	case *claimError:
		return e.uid == uid
	case *LostError:
		return e.UID == uid
	case interface{ Unwrap() []error }:
		return slices.ContainsFunc(e.Unwrap(), func(err error) bool { return Undetermined(err, uid) })
	default:
		return true
	}
}

// Retryable returns the parts of err that may pass if the caller retries. err comes from
// [Preparer.RepairSpecs] or [Preparer.RepairClaimSpec]. Retryable drops errors about replaced
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
	var lost *LostError
	if errors.As(err, &unreadable) || errors.As(err, &future) || errors.As(err, &lost) || cause.IsPermanent(err) {
		return nil
	}
	return err
}

// LostDevices returns the LostErrors in err, which [Preparer.Reconcile] or
// [Preparer.RepairClaimSpec] returned.
func LostDevices(err error) []*LostError {
	var joined interface{ Unwrap() []error }
	var one *LostError
	switch {
	case errors.As(err, &joined):
		var lost []*LostError
		for _, e := range joined.Unwrap() {
			lost = append(lost, LostDevices(e)...)
		}
		return lost
	case errors.As(err, &one):
		return []*LostError{one}
	}
	return nil
}
