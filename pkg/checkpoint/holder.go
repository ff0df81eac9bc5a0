package checkpoint

import (
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// HolderState says how far a GPU setting, MPS daemon or partition that several claims share was set
// up or undone.
type HolderState string

const (
	// Applying means that the shared setting, daemon or partition is being set up, so some of its
	// effects may exist.
	Applying HolderState = "Applying"
	// Applied means that the shared setting, daemon or partition is completely set up for all of its
	// claims.
	Applied HolderState = "Applied"
	// Undoing means that the shared setting, daemon or partition is being undone for the last claim,
	// so some of its effects may be gone.
	Undoing HolderState = "Reverting"
)

// Holder is a GPU setting, MPS daemon or partition that several claims share. The first claim sets
// it up, and the last one undoes it: the records say which claims share it. The file has all that
// is needed to undo it, so no claim's record is needed for that.
type Holder struct {
	// Key names what is shared: the name of a GPU, partition or MPS daemon, and the kind of setting,
	// for example the time slice. The Holder's file name is made from Key.
	Key string `json:"key"`
	// GPUs are the GPUs whose locks a caller must have before it changes the shared setting or daemon,
	// or the Holder's file.
	GPUs  []string    `json:"gpus"`
	State HolderState `json:"state"`
	// BootID is the kernel's boot ID when the setting, daemon or partition was set up.
	BootID string `json:"bootID"`
	// Step is the shared setting, daemon or partition in its stored form. It includes the original
	// state of the hardware, which the last claim restores.
	Step Step `json:"step"`
}

func (s *Store) holderFile(key string) (string, error) {
	if key == "" || strings.HasPrefix(key, ".") || strings.ContainsAny(key, "/\x00") || len(key)+len(suffix) > maxName {
		return "", fmt.Errorf("key %q of a shared setting cannot be a file name", key)
	}
	return filepath.Join(s.holders, key+suffix), nil
}

// SaveHolder writes h to its file durably.
func (s *Store) SaveHolder(h Holder) error {
	path, err := s.holderFile(h.Key)
	if err != nil {
		return err
	}
	return holderFormat.Write(s.disk, path, h)
}

// Holder reads the shared setting, daemon or partition with this key. If err is an
// [*statefile.UnreadableError] or a [*statefile.NewerError], the file exists but cannot be used.
func (s *Store) Holder(key string) (h Holder, found bool, err error) {
	path, err := s.holderFile(key)
	if err != nil {
		return Holder{}, false, err
	}
	found, err = s.read(holderFormat, path, &h)
	if err != nil || !found {
		return Holder{}, found, err
	}
	if h.Key != key {
		return Holder{}, true, &statefile.UnreadableError{Path: path, Reason: "it belongs to key " + h.Key}
	}
	return h, true, nil
}

// Holders lists the keys of all shared settings, daemons and partitions that have a file.
func (s *Store) Holders() ([]string, error) {
	return list(s, s.holders, "the files of shared settings", func(name string) (string, bool) {
		key, ok := strings.CutSuffix(name, suffix)
		return key, ok && !strings.HasPrefix(key, ".")
	})
}

// UnfinishedHolders lists the keys for which an interrupted [Store.SaveHolder] left a temporary
// file. A complete file may exist for the same key.
func (s *Store) UnfinishedHolders() ([]string, error) {
	return list(s, s.holders, "the unfinished files of shared settings", func(name string) (string, bool) {
		base, unfinished := durable.Unfinished(name)
		return strings.TrimSuffix(base, suffix), unfinished
	})
}

// RemoveHolder deletes the file of the shared setting, daemon or partition with this key, and the
// temporary files that interrupted writes of it left. It is no error if there are none.
func (s *Store) RemoveHolder(key string) error {
	path, err := s.holderFile(key)
	if err != nil {
		return err
	}
	names, err := s.disk.ReadDir(s.holders)
	if err != nil {
		return fmt.Errorf("remove the file of shared setting %s: %w", key, err)
	}
	for _, name := range names {
		base, unfinished := durable.Unfinished(name)
		if !unfinished || !strings.HasPrefix(filepath.Base(path), base) {
			continue
		}
		if err := s.disk.Remove(filepath.Join(s.holders, name)); err != nil {
			return fmt.Errorf("remove an unfinished file of shared setting %s: %w", key, err)
		}
	}
	return durable.Remove(s.disk, path)
}

// QuarantineHolder moves the unreadable file of a shared setting, daemon or partition to the
// quarantine directory and returns its new path.
func (s *Store) QuarantineHolder(key string, now time.Time) (string, error) {
	path, err := s.holderFile(key)
	if err != nil {
		return "", err
	}
	place, err := s.quarantineFile(path, fmt.Sprintf("holder-%s-%d", key, now.UnixNano()))
	if err != nil {
		return place, fmt.Errorf("quarantine the file of shared setting %s: %w", key, err)
	}
	return place, nil
}
