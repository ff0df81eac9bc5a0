package checkpoint

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
)

// FormatVersion is the version of this package's JSON files: of the envelope and of the payload in
// it. A new field need not raise FormatVersion, since older readers keep fields that they do not
// know.
const FormatVersion = 1

// readableFrom is the oldest format version whose readers understand what this version writes. Such
// a reader can unprepare a claim and write its CDI spec. Raise readableFrom only for a change after
// which older readers would do harm.
const readableFrom = 1

// envelope is the content of a record's file. Checksum covers the bytes of Payload as they are in
// the file, so the JSON needs no canonical form.
type envelope struct {
	FormatVersion int `json:"formatVersion"`
	// ReadableFrom is the oldest reader version that understands Payload. It is omitted if it equals
	// FormatVersion.
	ReadableFrom int             `json:"readableFrom,omitempty"`
	Checksum     string          `json:"checksum"`
	Payload      json.RawMessage `json:"payload"`
}

// requiredReader returns the oldest reader version that understands the payload.
func (e envelope) requiredReader() int {
	if e.ReadableFrom > 0 {
		return e.ReadableFrom
	}
	return e.FormatVersion
}

// UnreadableError means that the file of a claim's record, or of a GPU setting or MPS daemon that
// claims share, exists but is damaged or may have been written by another user.
type UnreadableError struct {
	Path   string
	Reason string
}

func (e *UnreadableError) Error() string {
	return fmt.Sprintf("record %s is unreadable (%s)", e.Path, e.Reason)
}

// FutureError means that a later version of the driver wrote the file in a format that this version
// cannot read.
type FutureError struct {
	Path    string
	Version int
}

func (e *FutureError) Error() string {
	return fmt.Sprintf("record %s has format version %d, but this version of the driver reads up to %d: "+
		"install the later driver again, or end the claim's Pods with it first", e.Path, e.Version, FormatVersion)
}

// encode wraps v in an envelope with a checksum. The parameter "of" names the object in error
// messages.
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

// decode reads an envelope's payload into v. A returned error is an [*UnreadableError] or a
// [*FutureError].
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
	if e.requiredReader() > FormatVersion {
		return &FutureError{Path: path, Version: e.requiredReader()}
	}
	if e.FormatVersion < 1 {
		return unreadable("format version %d", e.FormatVersion)
	}
	if got := checksum(e.Payload); got != e.Checksum {
		return unreadable("its checksum is %s, but its content has %s", e.Checksum, got)
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
