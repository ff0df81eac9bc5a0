package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// Mark notes durably, before we turn on a GPU's MIG mode, that we did so in this boot. It has two
// readers. Whoever wants the GPU whole asks the hardware where there is a mark, because the
// inventory may be out of date. And only a mode with a mark of this boot is ours to turn off.
func (s *Store) Mark(gpu, bootID string) error {
	boot, marked, err := s.mark(gpu)
	if err != nil || marked && boot == bootID {
		return err
	}
	return durable.Replace(s.disk, filepath.Join(s.marks, gpu), []byte(bootID))
}

// Unmark forgets it. A mark that is not there is forgotten already.
func (s *Store) Unmark(gpu string) error {
	if _, marked, err := s.mark(gpu); !marked || err != nil {
		return err
	}
	return durable.Remove(s.disk, filepath.Join(s.marks, gpu))
}

// Marked says whether there is a mark, of any boot.
func (s *Store) Marked(gpu string) (bool, error) {
	_, marked, err := s.mark(gpu)
	return marked, err
}

// MarkedIn says whether we turned the mode on in this boot. A mark of an earlier boot proves
// nothing: cards whose mode we turn on forget it at a reboot. Nor does an empty one of an earlier
// version, which also marked modes that an admin had turned on.
func (s *Store) MarkedIn(gpu, bootID string) (bool, error) {
	boot, marked, err := s.mark(gpu)
	return marked && boot == bootID, err
}

func (s *Store) mark(gpu string) (bootID string, marked bool, _ error) {
	raw, err := s.disk.ReadFile(filepath.Join(s.marks, gpu))
	var untrusted *durable.UntrustedError
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", false, nil
	case errors.As(err, &untrusted):
		return "", true, nil // it may have the hardware asked, and proves nothing
	}
	if err != nil {
		return "", false, fmt.Errorf("look whether the MIG mode of %s was turned on: %w", gpu, err)
	}
	return string(raw), true, nil
}
