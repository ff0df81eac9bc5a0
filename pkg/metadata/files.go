package metadata

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
)

const (
	podClaimAnnotation = resourceapi.PodResourceClaimAnnotation
	// suffix ends the name of each file.
	suffix = ".json"
)

// Files are the metadata files of all claims. The caller holds the claim's lock.
type Files struct{ root string }

// NewFiles keeps the files in root, a directory at the same path on the host. It is created with
// the first file.
func NewFiles(root string) *Files { return &Files{root} }

// path returns where the file of a claim's request is. It refuses a UID that would lead out of
// root, although the API server makes no such UID.
func path(root string, uid types.UID, request string) (string, error) {
	if uid == "" || uid == "." || uid == ".." || strings.ContainsAny(string(uid), "/\x00") {
		return "", fmt.Errorf("claim UID %q cannot name a directory", uid)
	}
	return filepath.Join(root, string(uid), request+suffix), nil
}

// Write makes the file of the request say what r says. It leaves a file that does already.
// Otherwise it raises the generation in the file. A container sees the new file when it starts
// again.
func (f *Files) Write(c Claim, r Request) error {
	base, err := r.base()
	if err != nil {
		return err
	}
	name, err := path(f.root, c.UID, base)
	if err != nil {
		return err
	}
	there, err := os.ReadFile(name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read device metadata: %w", err)
	}
	generation := generationIn(there)
	data, err := encode(c, r, max(generation, 1))
	if err != nil || bytes.Equal(data, there) {
		return err
	}
	if generation > 0 {
		if data, err = encode(c, r, generation+1); err != nil {
			return err
		}
	}
	if err := replace(name, data); err != nil {
		return fmt.Errorf("write device metadata: %w", err)
	}
	return nil
}

// generationIn returns the generation that a file's content has, or 0 if it cannot be read.
func generationIn(data []byte) int64 {
	var there metadata.DeviceMetadata
	if devicemetadata.DecodeMetadataFromStream(json.NewDecoder(bytes.NewReader(data)), &there) != nil {
		return 0
	}
	return there.Generation
}

// Remove removes the claim's files. If there are none, it succeeds.
func (f *Files) Remove(uid types.UID) error {
	name, err := path(f.root, uid, "")
	if err == nil {
		err = os.RemoveAll(filepath.Dir(name))
	}
	if err != nil {
		return fmt.Errorf("remove device metadata: %w", err)
	}
	return nil
}

// RemoveAll removes the files of all claims, and their directory.
func (f *Files) RemoveAll() error {
	if err := os.RemoveAll(f.root); err != nil {
		return fmt.Errorf("remove all device metadata: %w", err)
	}
	return nil
}

// Claims lists the UIDs of the claims that have files.
func (f *Files) Claims() ([]types.UID, error) {
	entries, err := os.ReadDir(f.root)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list device metadata: %w", err)
	}
	uids := make([]types.UID, len(entries))
	for i, e := range entries {
		uids[i] = types.UID(e.Name())
	}
	return uids, nil
}

// replace writes data to name so that a reader sees the old file or the new one. Containers of any
// user read it. fsync is not needed, because after a crash of the node the kubelet prepares each
// claim again, and Write compares the content.
func replace(name string, data []byte) error {
	dir := filepath.Dir(name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	temporary, err := os.CreateTemp(dir, ".*"+suffix)
	if err != nil {
		return err
	}
	_, err = temporary.Write(data)
	err = errors.Join(err, temporary.Chmod(0o644), temporary.Close())
	if err == nil {
		err = os.Rename(temporary.Name(), name)
	}
	if err != nil {
		_ = os.Remove(temporary.Name())
	}
	return err
}
