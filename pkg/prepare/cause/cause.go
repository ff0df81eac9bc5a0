// Package cause classifies the errors of the transaction, for the metrics and for callers that
// decide by the kind of an error. It also formats errors for the kubelet.
//
// The kubelet retries after every error. A retry helps after Held, NotReady and Canceled once the
// obstacle is gone, after Record and Step if the disk or the hardware recovers, and after Claim and
// Device rarely.
package cause

import (
	"errors"
	"fmt"
	"strings"
)

// Cause says what kind of problem an error reports.
type Cause string

const (
	// Claim means that the claim, its allocation or its configuration cannot be served.
	Claim    Cause = "claim"
	Held     Cause = "held"      // another claim uses the device, or a process of none
	NotReady Cause = "not-ready" // the node cannot serve now
	Device   Cause = "device"    // the device is unknown, gone or replaced
	Record   Cause = "record"    // the record cannot be read or written
	Step     Cause = "step"      // a step could not be applied or reverted
	Canceled Cause = "canceled"  // the caller canceled, or waited too long
	Other    Cause = "other"     // the error has no cause
)

type causeError struct {
	cause Cause
	error
}

func (e *causeError) Unwrap() error { return e.error }

// Errorf is fmt.Errorf for an error with a cause.
func Errorf(cause Cause, format string, args ...any) error {
	return &causeError{cause, fmt.Errorf(format, args...)}
}

// Wrap adds a cause to err, or replaces the cause that err has. It returns nil if err is nil.
func Wrap(cause Cause, err error) error {
	if err == nil {
		return nil
	}
	return &causeError{cause, err}
}

// OrStep adds the cause Step to an error without a cause.
func OrStep(err error) error {
	if err == nil || Of(err) != Other {
		return err
	}
	return &causeError{Step, err}
}

// Of returns the cause of err, which is not nil.
func Of(err error) Cause {
	if c, ok := errors.AsType[*causeError](err); ok {
		return c.cause
	}
	return Other
}

// maxMessage is how many bytes of an error the driver returns to the kubelet. The kubelet adds its
// own text and reports both as an Event, whose message can have 1024 bytes.
const maxMessage = 900

// lineError prints an error in one line that is short enough for an Event.
type lineError struct{ error }

func (e *lineError) Unwrap() error { return e.error }

func (e *lineError) Error() string {
	line := strings.Join(strings.FieldsFunc(e.error.Error(), func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
	if len(line) > maxMessage {
		line = strings.ToValidUTF8(line[:maxMessage], "") + "…"
	}
	return line
}

// ForClaim puts the claim's name in front of err and prints both in one line.
func ForClaim(claim string, err error) error {
	return &lineError{fmt.Errorf("claim %s: %w", claim, err)}
}

// Refusal returns the error with which a package refuses a claim. claim is the claim's namespace
// and name.
func Refusal(claim string, cause Cause, format string, args ...any) error {
	return ForClaim(claim, Errorf(cause, format, args...))
}
