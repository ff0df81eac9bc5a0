package predecessor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// File is the checkpoint's name in the plugin directory.
const File = "checkpoint.json"

// Store is the checkpoint of a node, and the notes of which of its claims have ended. The file is read again when it has changed.
type Store struct {
	path, notes    string
	driver, bootID string
	disk           durable.FS

	mu     sync.Mutex
	seen   stamp
	claims []Claim
	err    error
}

// stamp tells one content of the file from another.
type stamp struct {
	there bool
	size  int64
	at    time.Time
}

// NewStore is about the checkpoint in pluginDir. Its notes are in stateDir.
func NewStore(pluginDir, stateDir, driver, bootID string, disk durable.FS) *Store {
	return &Store{path: filepath.Join(pluginDir, File), notes: filepath.Join(stateDir, "predecessor"), driver: driver, bootID: bootID, disk: disk}
}

// Path is the checkpoint's.
func (s *Store) Path() string { return s.path }

// Claims lists those that have not ended. The error is an [*UnreadableError]. A node without the file costs one look for its name.
func (s *Store) Claims() ([]Claim, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	info, err := os.Stat(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		s.seen, s.claims, s.err = stamp{}, nil, nil
		return nil, nil
	}
	if err != nil {
		return nil, &UnreadableError{s.path, err.Error()}
	}
	if now := (stamp{true, info.Size(), info.ModTime()}); now != s.seen {
		s.seen, s.claims, s.err = now, nil, nil
		if s.claims, s.err = s.read(); s.err != nil {
			s.err = &UnreadableError{s.path, s.err.Error()}
			s.seen = stamp{} // an admin may mend owner and rights, which a stamp does not show
		}
	}
	if s.err != nil {
		return nil, s.err
	}
	var left []Claim
	for _, c := range s.claims {
		ended, err := s.ended(c.UID)
		if err != nil {
			return nil, &UnreadableError{s.path, err.Error()}
		}
		if !ended {
			left = append(left, c)
		}
	}
	return left, nil
}

func (s *Store) read() ([]Claim, error) {
	if err := durable.CheckFile(s.path); err != nil { // instances are removed on its word
		return nil, err
	}
	raw, err := os.ReadFile(s.path)
	if err != nil {
		return nil, err
	}
	claims, _, err := Parse(raw, s.driver, s.bootID)
	return claims, err
}

func (s *Store) note(uid types.UID) string { return filepath.Join(s.notes, string(uid)) }

func (s *Store) ended(uid types.UID) (bool, error) {
	switch _, err := os.Stat(s.note(uid)); {
	case err == nil:
		return true, nil
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	default:
		return false, fmt.Errorf("look whether claim %s has ended: %w", uid, err)
	}
}

// End notes that a claim has ended. When the last one has, the checkpoint is renamed; aside is its new place then.
func (s *Store) End(uid types.UID) (aside string, err error) {
	if err := durable.MakeDir(s.disk, s.notes); err != nil {
		return "", err
	}
	if err := durable.Replace(s.disk, s.note(uid), nil); err != nil {
		return "", fmt.Errorf("note that claim %s has ended: %w", uid, err)
	}
	left, err := s.Claims()
	if err != nil || len(left) > 0 {
		return "", nil //nolint:nilerr // what cannot be read now is withheld, and said, elsewhere
	}
	aside = s.path + ".ended"
	if err := s.disk.Rename(s.path, aside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("set the checkpoint of the reference driver aside, whose claims have all ended: %w", err)
	}
	if err := s.disk.SyncDir(filepath.Dir(s.path)); err != nil {
		return "", fmt.Errorf("set the checkpoint of the reference driver aside: %w", err)
	}
	return aside, s.forget()
}

// forget removes the notes, which nobody needs without the checkpoint.
func (s *Store) forget() error {
	names, err := s.disk.ReadDir(s.notes)
	if err != nil {
		return fmt.Errorf("remove the notes about the reference driver's claims: %w", err)
	}
	for _, name := range names {
		if err := durable.Remove(s.disk, filepath.Join(s.notes, name)); err != nil {
			return err
		}
	}
	return nil
}
