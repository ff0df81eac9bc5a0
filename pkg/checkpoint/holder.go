package checkpoint

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// HolderState says how far that which is held has come.
type HolderState string

const (
	// Applying means that any part of the step may have been applied, for the first claim or again.
	Applying HolderState = "Applying"
	// Applied means that the step was applied for the claims that hold it.
	Applied HolderState = "Applied"
	// Undoing means that the last claim is leaving and any part of the step may be reverted.
	Undoing HolderState = "Reverting"
)

// Holder is a step that several claims can hold together: the first applies it, the last reverts it. Its file has all that this takes, so that it can be
// reverted without the claims' records.
type Holder struct {
	// Key is the same for claims that share the step. It names the file.
	Key string `json:"key"`
	// GPUs are those whose locks are held for it.
	GPUs  []string    `json:"gpus"`
	State HolderState `json:"state"`
	// BootID is the kernel's of when the step was applied.
	BootID string `json:"bootID"`
	// Step is what is held, with what was found before it and what came of it.
	Step   Step          `json:"step"`
	Claims []HolderClaim `json:"claims"`

	unknown map[string]json.RawMessage
}

// HolderClaim is a claim that holds the step.
type HolderClaim struct {
	UID       types.UID `json:"uid"`
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`

	unknown map[string]json.RawMessage
}

func (c HolderClaim) String() string {
	return fmt.Sprintf("%s/%s (UID %s)", c.Namespace, c.Name, c.UID)
}

// Holds says whether the claim is among those that hold the step.
func (h Holder) Holds(uid types.UID) bool {
	return slices.ContainsFunc(h.Claims, func(c HolderClaim) bool { return c.UID == uid })
}

// Others are the claims besides one.
func (h Holder) Others(uid types.UID) []HolderClaim {
	return slices.DeleteFunc(slices.Clone(h.Claims), func(c HolderClaim) bool { return c.UID == uid })
}

type plainHolder Holder

var holderFields = fieldsOf[plainHolder]()

func (h *Holder) UnmarshalJSON(raw []byte) error {
	unknown, err := decodeKnown(raw, (*plainHolder)(h), holderFields)
	h.unknown = unknown
	return err
}

func (h Holder) MarshalJSON() ([]byte, error) { return encodeWith(plainHolder(h), h.unknown) }

type plainHolderClaim HolderClaim

var holderClaimFields = fieldsOf[plainHolderClaim]()

func (c *HolderClaim) UnmarshalJSON(raw []byte) error {
	unknown, err := decodeKnown(raw, (*plainHolderClaim)(c), holderClaimFields)
	c.unknown = unknown
	return err
}

func (c HolderClaim) MarshalJSON() ([]byte, error) {
	return encodeWith(plainHolderClaim(c), c.unknown)
}

func (s *Store) holderFile(key string) (string, error) {
	if key == "" || strings.HasPrefix(key, ".") || strings.ContainsAny(key, "/\x00") || len(key)+len(suffix) > maxName {
		return "", fmt.Errorf("key %q cannot name a holder's file", key)
	}
	return filepath.Join(s.holders, key+suffix), nil
}

// SaveHolder makes the holder durable.
func (s *Store) SaveHolder(h Holder) error {
	path, err := s.holderFile(h.Key)
	if err != nil {
		return err
	}
	raw, err := encode("holder "+h.Key, h)
	if err != nil {
		return err
	}
	return durable.Replace(s.disk, path, raw)
}

// Holder finds a holder. An error that is an [*UnreadableError] or a [*FutureError] says that there is one, and what is wrong with it.
func (s *Store) Holder(key string) (h Holder, found bool, err error) {
	path, err := s.holderFile(key)
	if err != nil {
		return Holder{}, false, err
	}
	found, err = s.read(path, &h)
	if err != nil || !found {
		return Holder{}, found, err
	}
	if h.Key != key {
		return Holder{}, true, &UnreadableError{Path: path, Reason: "it is about " + h.Key}
	}
	return h, true, nil
}

// Holders lists the keys of all holders.
func (s *Store) Holders() ([]string, error) {
	names, err := s.disk.ReadDir(s.holders)
	if err != nil {
		return nil, fmt.Errorf("list what claims share: %w", err)
	}
	var keys []string
	for _, name := range names {
		if key, ok := strings.CutSuffix(name, suffix); ok && !strings.HasPrefix(key, ".") {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys, nil
}

// UnfinishedHolders lists the keys of the holders of which an interrupted [Store.SaveHolder] left a temporary file: of those that are there, and of others.
func (s *Store) UnfinishedHolders() ([]string, error) {
	names, err := s.disk.ReadDir(s.holders)
	if err != nil {
		return nil, fmt.Errorf("list unfinished files of what claims share: %w", err)
	}
	var keys []string
	for _, name := range names {
		if base, unfinished := durable.Unfinished(name); unfinished {
			keys = append(keys, strings.TrimSuffix(base, suffix))
		}
	}
	return keys, nil
}

// RemoveHolder deletes a holder, and what an interrupted [Store.SaveHolder] has left of it. One that is not there is removed already.
func (s *Store) RemoveHolder(key string) error {
	path, err := s.holderFile(key)
	if err != nil {
		return err
	}
	names, err := s.disk.ReadDir(s.holders)
	if err != nil {
		return fmt.Errorf("remove holder %s: %w", key, err)
	}
	for _, name := range names {
		base, unfinished := durable.Unfinished(name)
		if !unfinished || !strings.HasPrefix(filepath.Base(path), base) {
			continue
		}
		if err := s.disk.Remove(filepath.Join(s.holders, name)); err != nil {
			return fmt.Errorf("remove what an interrupted write of holder %s left: %w", key, err)
		}
	}
	return durable.Remove(s.disk, path)
}

// QuarantineHolder sets an unreadable holder aside. It returns the new place.
func (s *Store) QuarantineHolder(key string, now time.Time) (string, error) {
	path, err := s.holderFile(key)
	if err != nil {
		return "", err
	}
	to := filepath.Join(s.quarantine, fmt.Sprintf("holder-%s-%d%s", key, now.UnixNano(), suffix))
	if err := s.disk.Rename(path, to); err != nil {
		return "", fmt.Errorf("set holder %s aside: %w", key, err)
	}
	for _, dir := range []string{s.quarantine, s.holders} {
		if err := s.disk.SyncDir(dir); err != nil {
			return to, fmt.Errorf("set holder %s aside: %w", key, err)
		}
	}
	return to, nil
}
