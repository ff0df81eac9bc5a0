package checkpoint

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// mark is the content of a GPU's mark: the boot in which the plugin enabled the MIG mode.
type mark struct {
	BootID string `json:"bootID"`
}

// Mark durably records, in a file, that the plugin is about to enable a GPU's MIG mode in this
// boot. While the file exists, a claim for the whole GPU reads the hardware, because the inventory
// may be out of date. Without such a claim, the plugin disables MIG mode only on a GPU with a mark
// of the current boot.
func (s *Store) Mark(gpu, bootID string) error {
	boot, marked, err := s.Marked(gpu)
	if err != nil || marked && boot == bootID {
		return err
	}
	return markFormat.Write(s.disk, filepath.Join(s.marks, gpu), mark{BootID: bootID})
}

// Unmark removes the GPU's mark, which [Store.Mark] wrote. It is no error if the GPU has none.
func (s *Store) Unmark(gpu string) error {
	if _, marked, err := s.Marked(gpu); !marked || err != nil {
		return err
	}
	return durable.Remove(s.disk, filepath.Join(s.marks, gpu))
}

// Marked reports whether the GPU has a mark, and in which boot [Store.Mark] wrote it. A mark of an
// earlier boot does not make the MIG mode the plugin's: a GPU forgets the mode at a reboot.
//
// The boot of a damaged mark is "". Then claims read the hardware, but nothing is proved.
func (s *Store) Marked(gpu string) (bootID string, marked bool, _ error) {
	var m mark
	marked, err := markFormat.Read(s.disk, filepath.Join(s.marks, gpu), &m)
	var unreadable *statefile.UnreadableError
	if errors.As(err, &unreadable) {
		return "", true, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("read the MIG mode mark of %s: %w", gpu, err)
	}
	return m.BootID, marked, nil
}
