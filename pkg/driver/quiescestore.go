package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// quiesceStore keeps the Node's request for a release of the GPUs on disk. Without it, a plugin
// that starts during a driver upgrade and cannot reach the API server would open the GPUs.
type quiesceStore struct {
	disk      durable.FS
	path      string
	onFailure func(error)
}

func newQuiesceStore(stateDir string, failed func(error)) *quiesceStore {
	return &quiesceStore{disk: durable.OS{}, path: filepath.Join(stateDir, "release"), onFailure: failed}
}

// Load returns the reason of the stored release request, or "" if none is stored.
func (s *quiesceStore) Load() (string, error) {
	if s == nil {
		return "", nil
	}
	raw, err := s.disk.ReadFile(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read the stored release request: %w", err)
	}
	return string(raw), nil
}

// Save stores the reason of the release request. If reason is "", it removes the file.
func (s *quiesceStore) Save(reason string) {
	if s == nil {
		return
	}
	var err error
	if reason == "" {
		err = durable.Remove(s.disk, s.path)
	} else {
		err = durable.Replace(s.disk, s.path, []byte(reason))
	}
	if err != nil {
		s.onFailure(fmt.Errorf("store the release request in %s: %w", s.path, err))
	}
}
