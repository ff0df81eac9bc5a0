package driver

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// quiesceStore keeps the Node's request for a release of the GPUs on disk. Without it, a plugin
// that starts during a driver upgrade and cannot reach the API server would open the GPUs.
type quiesceStore struct {
	disk      durable.FS
	path      string
	onFailure func(error)
}

var quiesceFormat = statefile.Format{Kind: "QuiesceRequest", Version: 1, MinReader: 1}

// quiesceRequest is the content of the file.
type quiesceRequest struct {
	Reason string `json:"reason"`
}

func newQuiesceStore(stateDir string, failed func(error)) *quiesceStore {
	return &quiesceStore{disk: durable.OS{}, path: filepath.Join(stateDir, "release"), onFailure: failed}
}

// Load returns the reason of the stored release request, or "" if none is stored.
func (s *quiesceStore) Load() (string, error) {
	if s == nil {
		return "", nil
	}
	var request quiesceRequest
	if _, err := quiesceFormat.Read(s.disk, s.path, &request); err != nil {
		return "", fmt.Errorf("read the stored release request: %w", err)
	}
	return request.Reason, nil
}

// Save stores the reason of the release request. If reason is "", it removes the file.
func (s *quiesceStore) Save(reason string) {
	if s == nil {
		return
	}
	if err := s.save(reason); err != nil {
		s.onFailure(fmt.Errorf("store the release request in %s: %w", s.path, err))
	}
}

func (s *quiesceStore) save(reason string) error {
	if reason != "" {
		return quiesceFormat.Write(s.disk, s.path, quiesceRequest{reason})
	}
	var newer *statefile.NewerError
	if _, err := s.Load(); errors.As(err, &newer) {
		return newer
	}
	return durable.Remove(s.disk, s.path)
}
