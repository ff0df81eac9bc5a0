package prepare

import (
	"errors"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/types"
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
	UID     types.UID
	// Holder is namespace/name, empty if the holder's record cannot be read.
	Holder string
	// Unreadable is why it cannot.
	Unreadable error
}

func (e *HeldError) Error() string {
	holder := "claim " + e.Holder + " (UID " + string(e.UID) + ")"
	if e.Holder == "" {
		holder = "the claim with UID " + string(e.UID) + ", whose record cannot be read"
		if e.Unreadable != nil {
			holder += " (" + e.Unreadable.Error() + ")"
		}
	}
	return fmt.Sprintf("request %s: device %s is held by %s: it is free again when the last Pod of that claim has ended on this node", e.Request, e.Device, holder)
}
