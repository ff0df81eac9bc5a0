package checkpoint

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
)

// FormatVersion is the version of the envelope and of what is in the payload. A field that is added may leave it as it is, since unknown fields are kept.
const FormatVersion = 1

// readableFrom is the oldest version whose readers understand what this one writes: all of it that they must know to give a claim back, and to tell containers
// what they get, because a reader writes a claim's spec by what it knows. It goes up only with a change after which they would do harm.
const readableFrom = 1

// envelope is a record's file. The checksum is over the payload's bytes as they stand in the file, so it needs no canonical form.
type envelope struct {
	FormatVersion int `json:"formatVersion"`
	// ReadableFrom is left out where it is the version itself.
	ReadableFrom int             `json:"readableFrom,omitempty"`
	Checksum     string          `json:"checksum"`
	Payload      json.RawMessage `json:"payload"`
}

// needs is the version that a reader must know.
func (e envelope) needs() int {
	if e.ReadableFrom > 0 {
		return e.ReadableFrom
	}
	return e.FormatVersion
}

// UnreadableError says that a record is there and cannot be understood.
type UnreadableError struct {
	Path   string
	Reason string
}

func (e *UnreadableError) Error() string {
	return fmt.Sprintf("record %s is unreadable (%s)", e.Path, e.Reason)
}

// FutureError says that a record was written by a later version of the driver, in a form that this one does not know.
type FutureError struct {
	Path    string
	Version int
}

func (e *FutureError) Error() string {
	return fmt.Sprintf("record %s needs a reader of format version %d and this version of the driver reads up to %d: install the later driver again, or end the claim's Pods there first",
		e.Path, e.Version, FormatVersion)
}

// encode seals what is kept; of says of whom or of what it is, for errors.
func encode(of string, v any) ([]byte, error) {
	payload, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode the record of %s: %w", of, err)
	}
	e := envelope{FormatVersion: FormatVersion, Checksum: checksum(payload), Payload: payload}
	if readableFrom < FormatVersion {
		e.ReadableFrom = readableFrom
	}
	return json.Marshal(e)
}

// decode reads into v what encode has sealed. Its error is an [*UnreadableError] or a [*FutureError].
func decode(path string, raw []byte, v any) error {
	unreadable := func(format string, args ...any) error {
		return &UnreadableError{Path: path, Reason: fmt.Sprintf(format, args...)}
	}
	if len(bytes.TrimSpace(raw)) == 0 {
		return unreadable("it is empty")
	}
	var e envelope
	if err := json.Unmarshal(raw, &e); err != nil {
		return unreadable("%v", err)
	}
	if e.needs() > FormatVersion {
		return &FutureError{Path: path, Version: e.needs()}
	}
	if e.FormatVersion < 1 {
		return unreadable("format version %d", e.FormatVersion)
	}
	if got := checksum(e.Payload); got != e.Checksum {
		return unreadable("its checksum is %s, its content has %s", e.Checksum, got)
	}
	if err := json.Unmarshal(e.Payload, v); err != nil {
		return unreadable("%v", err)
	}
	return nil
}

func checksum(payload []byte) string {
	sum := sha256.Sum256(payload)
	return "sha256:" + hex.EncodeToString(sum[:])
}
