package quiesce

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// store keeps the Node's request for a release of the GPUs on disk. Without it, a plugin that
// starts during a driver upgrade and cannot reach the API server would open the GPUs.
type store struct {
	disk durable.FS
	path string
}

var storeFormat = statefile.Format{Kind: "QuiesceRequest", Version: 1, MinReader: 1}

// storedRequest is the content of the file.
type storedRequest struct {
	Reason string `json:"reason"`
}

func newStore(stateDir string) store {
	return store{disk: durable.OS{}, path: filepath.Join(stateDir, "release")}
}

// Load returns the reason of the stored release request, or "" if none is stored.
func (s store) Load() (string, error) {
	var request storedRequest
	if _, err := storeFormat.Read(s.disk, s.path, &request); err != nil {
		return "", fmt.Errorf("read the stored release request: %w", err)
	}
	return request.Reason, nil
}

// Save stores the reason of the release request. If reason is "", it removes the file.
func (s store) Save(reason string) error {
	if reason != "" {
		return storeFormat.Write(s.disk, s.path, storedRequest{reason})
	}
	var newer *statefile.NewerError
	if _, err := s.Load(); errors.As(err, &newer) {
		return newer
	}
	return durable.Remove(s.disk, s.path)
}
