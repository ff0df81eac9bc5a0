package predecessor

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// File is the name of the checkpoint that NVIDIA's DRA driver wrote in the plugin directory.
const File = "checkpoint.json"

// Notes is the name of the directory, in the state directory, with the notes about ended claims.
const Notes = "predecessor"

// Store reads the checkpoint of NVIDIA's DRA driver and notes which of its claims have ended. Store
// reads the checkpoint again when that file changes.
type Store struct {
	path, notesDir string
	driver, bootID string
	disk           durable.FS

	mu sync.Mutex
	// seen is the checkpoint's stamp when Claims was last called, lastStamp when it was last read.
	seen, lastStamp durable.Stamp
	claims          []Claim
	err             error
}

// NewStore returns the store for the checkpoint in pluginDir. Its notes about ended claims are
// below stateDir.
func NewStore(pluginDir, stateDir, driver, bootID string, disk durable.FS) *Store {
	return &Store{
		path: filepath.Join(pluginDir, File), notesDir: filepath.Join(stateDir, Notes),
		driver: driver, bootID: bootID, disk: disk,
	}
}

// Path returns the path of the checkpoint.
func (s *Store) Path() string { return s.path }

// Changed reports whether Claims may have another answer than at its last call, because the
// checkpoint has changed or could not be read. Without a checkpoint, a call costs only one stat.
func (s *Store) Changed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err != nil || durable.StampOf(s.path) != s.seen
}

// Claims returns the claims in the checkpoint that have not ended, or none if there is no
// checkpoint. An error is an [*UnreadableError].
func (s *Store) Claims() ([]Claim, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	left, err := s.left()
	s.seen = s.lastStamp
	return left, err
}

// Claim returns the claim with this UID if the checkpoint has it and it has not ended. It does not
// count as a call of Claims: that caller still has to learn of a change.
func (s *Store) Claim(uid types.UID) (c Claim, found bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	left, err := s.left()
	i := slices.IndexFunc(left, func(c Claim) bool { return c.UID == uid })
	if err != nil || i < 0 {
		return Claim{}, false, err
	}
	return left[i], true, nil
}

// left is Claims for callers that hold s.mu.
func (s *Store) left() ([]Claim, error) {
	now := durable.StampOf(s.path)
	// Without a stamp the file is missing or cannot be read, which only reading it tells.
	if s.err != nil || now != s.lastStamp || now == (durable.Stamp{}) {
		s.lastStamp = now
		if s.claims, s.err = s.read(); errors.Is(s.err, fs.ErrNotExist) {
			s.err = nil
		}
	}
	if s.err != nil {
		return nil, &UnreadableError{s.path, s.err.Error()}
	}
	var left []Claim
	for _, c := range s.claims {
		ended, err := s.ended(c)
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
	// This driver destroys MIG instances that the checkpoint names, so only root may be able to write
	// the checkpoint.
	raw, err := durable.OS{}.ReadFile(s.path)
	if err != nil {
		return nil, err
	}
	claims, _, err := Parse(raw, s.driver, s.bootID)
	for i := range claims {
		claims[i].Preparation = cmp.Or(claims[i].Preparation, fmt.Sprint(s.lastStamp))
	}
	return claims, err
}

func (s *Store) notePath(uid types.UID) string { return filepath.Join(s.notesDir, string(uid)) }

// ended reports whether the claim has ended since it was prepared. If NVIDIA's DRA driver prepared
// it again after the note, it has not.
func (s *Store) ended(c Claim) (bool, error) {
	note, err := s.disk.ReadFile(s.notePath(c.UID))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("check whether claim %s has ended: %w", c.UID, err)
	}
	return string(note) == c.Preparation, nil
}

// MarkEnded notes that the claim, as Claims returned it, has ended. If no claim is left, it renames
// the checkpoint and returns the new path. If claims are left or the checkpoint is unreadable,
// renamedTo is empty.
func (s *Store) MarkEnded(c Claim) (renamedTo string, err error) {
	if err := durable.MakeDir(s.disk, s.notesDir); err != nil {
		return "", err
	}
	if err := durable.Replace(s.disk, s.notePath(c.UID), []byte(c.Preparation)); err != nil {
		return "", fmt.Errorf("note that claim %s has ended: %w", c.UID, err)
	}
	s.mu.Lock()
	left, err := s.left()
	s.mu.Unlock()
	if err != nil || len(left) > 0 {
		return "", nil //nolint:nilerr // an unreadable file is reported where GPUs are withheld
	}
	renamedTo = s.path + ".ended"
	if err := s.disk.Rename(s.path, renamedTo); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("rename the checkpoint of NVIDIA's DRA driver, whose claims have all ended: %w", err)
	}
	if err := s.disk.SyncDir(filepath.Dir(s.path)); err != nil {
		return "", fmt.Errorf("rename the checkpoint of NVIDIA's DRA driver: %w", err)
	}
	return renamedTo, s.removeNotes()
}

// removeNotes removes the notes about ended claims. They are useless after the checkpoint was
// renamed.
func (s *Store) removeNotes() error {
	names, err := s.disk.ReadDir(s.notesDir)
	if err != nil {
		return fmt.Errorf("remove the notes about ended claims of NVIDIA's DRA driver: %w", err)
	}
	for _, name := range names {
		if err := durable.Remove(s.disk, filepath.Join(s.notesDir, name)); err != nil {
			return err
		}
	}
	return nil
}
