package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// Mark remembers, durably, that we may have turned on a GPU's MIG mode. Who wants the GPU whole needs to ask the hardware only where there is a mark:
// what the inventory last saw may be older than what was done since.
func (s *Store) Mark(gpu string) error {
	if marked, err := s.Marked(gpu); marked || err != nil {
		return err
	}
	return durable.Replace(s.disk, filepath.Join(s.marks, gpu), nil)
}

// Unmark forgets it. A mark that is not there is forgotten already.
func (s *Store) Unmark(gpu string) error {
	if marked, err := s.Marked(gpu); !marked || err != nil {
		return err
	}
	return durable.Remove(s.disk, filepath.Join(s.marks, gpu))
}

// Marked says whether there is a mark.
func (s *Store) Marked(gpu string) (bool, error) {
	_, err := s.disk.ReadFile(filepath.Join(s.marks, gpu))
	var untrusted *durable.UntrustedError
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case errors.As(err, &untrusted):
		return true, nil // A mark does no more than have the hardware asked, which never harms.
	}
	if err != nil {
		return false, fmt.Errorf("look whether the MIG mode of %s was turned on: %w", gpu, err)
	}
	return true, nil
}
