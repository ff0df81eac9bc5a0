package prepare

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
)

// Cause sorts errors for the metrics.
type Cause string

const (
	CauseClaim    Cause = "claim"     // the claim, its allocation or its configuration cannot be served
	CauseHeld     Cause = "held"      // another claim holds the device
	CauseNotReady Cause = "not-ready" // the node cannot serve now
	CauseDevice   Cause = "device"    // the device is unknown, gone or another one
	CauseRecord   Cause = "record"    // the record cannot be read or written
	CauseStep     Cause = "step"      // a step could not be applied or reverted
	CauseCanceled Cause = "canceled"  // the caller went away, or waited too long
	causeOther    Cause = "other"
)

// longest is how many bytes of an error reach the kubelet. It puts them into an Event of the Pod, whose message has room for 1024.
const longest = 900

// lineError is an error as the kubelet shall show it: in one line, and no longer than an Event.
type lineError struct{ error }

func (e *lineError) Unwrap() error { return e.error }

func (e *lineError) Error() string {
	line := strings.Join(strings.FieldsFunc(e.error.Error(), func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
	if len(line) > longest {
		line = strings.ToValidUTF8(line[:longest], "") + "…"
	}
	return line
}

// about names the claim that an error is about.
func about(claim string, err error) error {
	return &lineError{fmt.Errorf("claim %s: %w", claim, err)}
}

type causeError struct {
	cause Cause
	error
}

func (e *causeError) Unwrap() error { return e.error }

func because(cause Cause, format string, args ...any) error {
	return &causeError{cause, fmt.Errorf(format, args...)}
}

// Refused is the error of a claim that is not prepared for a reason that lies outside this package.
func Refused(claim string, cause Cause, format string, args ...any) error {
	return about(claim, because(cause, format, args...))
}

// CauseOf is the cause of an error of this package; empty for nil.
func CauseOf(err error) Cause {
	var c *causeError
	switch {
	case err == nil:
		return ""
	case errors.As(err, &c):
		return c.cause
	default:
		return causeOther
	}
}

// HeldError refuses a device that another claim holds.
type HeldError struct {
	Request string
	Device  string
	GPU     string
	// Holds is the device that is held: Device itself, or one that cannot exist beside it. Empty if the holder's record cannot be read.
	Holds string
	UID   types.UID
	// Holder is namespace/name, empty if the holder's record cannot be read.
	Holder string
	// Leaving says that the holder is being given back, which is not finished.
	Leaving bool
	// Otherwise says that the device is shared in another way: as fractions, and the claim has a plain share, or the other way round.
	Otherwise bool
	// Unreadable is why it cannot.
	Unreadable error
}

// until is empty where nobody can say when the claim leaves, or where others share the device as it does.
func (e *HeldError) until() []waitedFor {
	if e.Otherwise || e.Unreadable != nil {
		return nil
	}
	return []waitedFor{{e.UID, e.Holder}}
}

func (e *HeldError) Error() string {
	holder := "claim " + e.Holder + " (UID " + string(e.UID) + ")"
	if e.Holder == "" {
		holder = "the claim with UID " + string(e.UID) + ", whose record cannot be read"
		if e.Unreadable != nil {
			holder += " (" + e.Unreadable.Error() + ")"
		}
	}
	held := "device " + e.Device + " is held"
	if e.Otherwise {
		held = "device " + e.Device + " is shared in another way (fractions or plain shares), which its limits exclude, and held"
	}
	if e.Holds != "" && e.Holds != e.Device {
		held = "device " + e.Device + " cannot be had beside " + e.Holds + ", which is held"
	}
	free := "it is free again when the last Pod of that claim has ended on this node"
	if e.Leaving {
		free = "that claim is being given back, which goes on until nothing uses its partitions any more"
	}
	return fmt.Sprintf("request %s: %s by %s: %s", e.Request, held, holder, free)
}

// LostError says that a device that a claim was given does not exist any more. The claim's spec is removed, so that no container gets another device.
type LostError struct {
	// Claim is namespace/name.
	Claim  string
	UID    types.UID
	Device string
	GPU    string
	// Reason is why it could not be made again.
	Reason error
}

func (e *LostError) Error() string {
	return fmt.Sprintf("claim %s: device %s is lost, containers that use it do not start any more: delete the claim's Pods: %v", e.Claim, e.Device, e.Reason)
}

// claimError is what came of one claim's part of a comparison. Without a UID it is of what no
// claim's record tells.
type claimError struct {
	uid types.UID
	error
}

func (e *claimError) Unwrap() error { return e.error }

func ofClaim(uid types.UID, err error) error {
	if err == nil {
		return nil
	}
	return &claimError{uid, err}
}

// LeavesOpen says whether a comparison that ended with err cannot tell how the claim is. err is of
// [Preparer.Reconcile]; what it says of other claims leaves nothing open.
func LeavesOpen(err error, uid types.UID) bool {
	switch e := err.(type) { //nolint:errorlint // each level is looked at: errors.As would take the first claim's error for that of all
	case nil:
		return false
	case *claimError:
		return e.uid == uid
	case *LostError:
		return e.UID == uid
	case interface{ Unwrap() []error }:
		return slices.ContainsFunc(e.Unwrap(), func(err error) bool { return LeavesOpen(err, uid) })
	default:
		return true
	}
}

// lastingError is of a claim about which nothing can be done until somebody acts.
type lastingError struct{ error }

func (e *lastingError) Unwrap() error { return e.error }

// Passing leaves out of an error of [Preparer.MendSeen] what lasts until somebody acts, so that trying again is of no use: records that cannot be read, or not
// by this version, and cards that were replaced; and, from one of [Preparer.MendUnseen], devices that are lost. Recover says all that at the start, and
// Reconcile when it comes, but for records that cannot be read: whoever leaves those out has to say so.
func Passing(err error) error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var left []error
		for _, e := range joined.Unwrap() {
			left = append(left, Passing(e))
		}
		return errors.Join(left...)
	}
	var unreadable *checkpoint.UnreadableError
	var future *checkpoint.FutureError
	var lost *LostError
	var lasting *lastingError
	if errors.As(err, &unreadable) || errors.As(err, &future) || errors.As(err, &lost) || errors.As(err, &lasting) {
		return nil
	}
	return err
}

// Lost picks out of an error of [Preparer.Reconcile] or [Preparer.MendUnseen] the devices that are lost.
func Lost(err error) []*LostError {
	var joined interface{ Unwrap() []error }
	var one *LostError
	switch {
	case errors.As(err, &joined):
		var lost []*LostError
		for _, e := range joined.Unwrap() {
			lost = append(lost, Lost(e)...)
		}
		return lost
	case errors.As(err, &one):
		return []*LostError{one}
	}
	return nil
}
