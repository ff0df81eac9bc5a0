// Package statefile reads and writes the plugin's JSON files on the node's disk.
//
// All of them have the same envelope around their payload:
//
//	{"kind":"ClaimRecord","version":1,"minReader":1,"checksum":"sha256:…","payload":{…}}
//
// kind says what the payload is. version is the format version of the driver that wrote the file.
// minReader is the lowest format version that a driver must have to use the file. The checksum
// covers the payload's bytes as they are in the file, so the JSON needs no canonical form.
//
// A file whose minReader is higher than the reader's version is refused: [Format.Read] returns a
// [NewerError], and [Format.Write] does not replace the file. A file that is damaged, or that
// another user may have written, gives an [UnreadableError].
//
// Fields that a reader does not know are ignored, and lost when it writes the file again. So a
// change of the format that adds a field which must survive raises minReader. So does a change
// after which older readers would do harm. Other new fields raise neither number. The names kind,
// minReader and their meaning never change.
//
// The package does not lock, and it decides nothing about a refused file.
package statefile

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// Format is the format of one kind of file, as this version of the driver reads and writes it.
type Format struct {
	Kind string
	// Version is the format version that this driver has. It reads files up to this minReader.
	Version int
	// MinReader is the lowest format version that can use the files that this driver writes.
	MinReader int
}

type envelope struct {
	Kind      string          `json:"kind"`
	Version   int             `json:"version"`
	MinReader int             `json:"minReader"`
	Checksum  string          `json:"checksum"`
	Payload   json.RawMessage `json:"payload"`
}

// UnreadableError means that the file exists but is damaged or may have been written by another
// user.
type UnreadableError struct {
	Path   string
	Reason string
}

func (e *UnreadableError) Error() string {
	return fmt.Sprintf("record %s is unreadable (%s)", e.Path, e.Reason)
}

// NewerError means that a later version of the driver wrote the file in a format that this version
// cannot use.
type NewerError struct {
	Path string
	// MinReader is the format version that the file needs. Version is the one that this driver has.
	MinReader, Version int
}

func (e *NewerError) Error() string {
	return fmt.Sprintf("record %s needs a driver that reads format version %d, but this version of the driver reads up to %d: "+
		"install the later driver again", e.Path, e.MinReader, e.Version)
}

// Read decodes the payload of the file at path into v. found is false, without an error, if the
// file does not exist. If err is an [*UnreadableError] or a [*NewerError], the file cannot be used.
// With any other error the read may succeed later.
func (f Format) Read(disk durable.FS, path string, v any) (found bool, err error) {
	raw, err := disk.ReadFile(path)
	var untrusted *durable.UntrustedError
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case errors.As(err, &untrusted):
		// The files decide what this process does as root, so another user's content is never used.
		return true, &UnreadableError{Path: path, Reason: untrusted.Reason}
	case err != nil:
		return true, fmt.Errorf("read the record %s: %w", path, err)
	}
	return true, f.decode(path, raw, v)
}

// Write durably replaces the file at path by one with the payload v. If the file is there and needs
// a newer reader, Write leaves it untouched and returns a [*NewerError].
func (f Format) Write(disk durable.FS, path string, v any) error {
	payload, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode the record %s: %w", path, err)
	}
	raw, err := json.Marshal(envelope{f.Kind, f.Version, f.MinReader, checksum(payload), payload})
	if err != nil {
		return fmt.Errorf("encode the record %s: %w", path, err)
	}
	var newer *NewerError
	if _, err := f.Read(disk, path, new(json.RawMessage)); errors.As(err, &newer) {
		return fmt.Errorf("write %s: %w", path, newer)
	}
	return durable.Replace(disk, path, raw)
}

// decode decodes the payload of raw, the content of the file at path, into v. Its errors are
// [*UnreadableError] and [*NewerError].
func (f Format) decode(path string, raw []byte, v any) error {
	unreadable := func(format string, args ...any) error {
		return &UnreadableError{Path: path, Reason: fmt.Sprintf(format, args...)}
	}
	if len(bytes.TrimSpace(raw)) == 0 {
		return unreadable("it is empty")
	}
	// Read minReader before everything else, whose form a later version may have changed.
	var asks struct {
		MinReader int `json:"minReader"`
	}
	if err := json.Unmarshal(raw, &asks); err != nil {
		return unreadable("%v", err)
	}
	if asks.MinReader > f.Version {
		return &NewerError{Path: path, MinReader: asks.MinReader, Version: f.Version}
	}
	var e envelope
	if err := json.Unmarshal(raw, &e); err != nil {
		return unreadable("%v", err)
	}
	if e.MinReader < 1 {
		return unreadable("it names no minReader")
	}
	if e.Kind != f.Kind {
		return unreadable("it is a %q, not a %q", e.Kind, f.Kind)
	}
	if got := checksum(e.Payload); got != e.Checksum {
		return unreadable("its checksum is %s, but its content has %s", e.Checksum, got)
	}
	if err := json.Unmarshal(e.Payload, v); err != nil {
		return unreadable("%v", err)
	}
	return nil
}

func checksum(payload []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(payload)) }
