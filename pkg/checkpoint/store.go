// Package checkpoint keeps one durable record per claim that is held on the node.
//
// A record is a JSON file: a format version, a checksum over the bytes of the payload, and the payload. It is replaced atomically and is on the disk
// before a call returns. The file's name says which claim it is and which devices the claim holds for itself: who holds a device is answered by one look
// at the directory, and a record that cannot be read still holds its devices. Fields of later versions are kept.
//
// Beside the records there is a mark per GPU, see [Store.Mark], and a file for each thing that several claims can hold together; see [Holder].
//
// The package does not lock: callers hold the claim's lock, and the lock of each GPU whose holders or mark they ask for.
package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

const (
	suffix    = ".json"
	separator = "_"
	// allDevices stands in a file name that would be too long with every device in it.
	allDevices = "all"
	maxName    = 255
)

// Store is the records of a node.
type Store struct {
	disk       durable.FS
	claims     string
	quarantine string
	marks      string
	holders    string
}

// Open makes the store's directories.
func Open(dir string, disk durable.FS) (*Store, error) {
	s := &Store{disk: durable.NewTogether(disk), claims: filepath.Join(dir, "claims"), quarantine: filepath.Join(dir, "quarantine"), marks: filepath.Join(dir, "mig"), holders: filepath.Join(dir, "holders")}
	for _, d := range []string{dir, s.claims, s.quarantine, s.marks, s.holders} {
		if err := durable.MakeDir(disk, d); err != nil {
			return nil, fmt.Errorf("open the store of records: %w", err)
		}
	}
	return s, nil
}

// Entry is what a record's file name tells.
type Entry struct {
	ClaimUID types.UID
	Devices  []string
	every    bool
	file     string
}

// Inexact says that the devices did not fit into the name: they may be any, and the record knows which they are.
func (e Entry) Inexact() bool { return e.every }

// List reads the directory, and no record. Files that are not records are left alone.
func (s *Store) List() ([]Entry, error) {
	return s.list(func(string) bool { return true })
}

// ListAbout is List for the records whose claims may hold one of these cards, or a part of one.
func (s *Store) ListAbout(gpus ...string) ([]Entry, error) {
	return s.list(func(name string) bool {
		return strings.HasSuffix(name, separator+allDevices+suffix) ||
			slices.ContainsFunc(gpus, func(gpu string) bool { return strings.Contains(name, separator+gpu) })
	})
}

func (s *Store) list(wanted func(name string) bool) ([]Entry, error) {
	names, err := s.disk.ReadDir(s.claims)
	if err != nil {
		return nil, fmt.Errorf("list the records: %w", err)
	}
	var entries []Entry
	for _, name := range names {
		if !wanted(name) {
			continue // not taken apart: there may be hundreds, and this is asked in calls of the kubelet
		}
		if e, ok := parse(name); ok {
			entries = append(entries, e)
		}
	}
	slices.SortFunc(entries, func(a, b Entry) int { return strings.Compare(a.file, b.file) })
	return entries, nil
}

func parse(name string) (Entry, bool) {
	stem, ok := strings.CutSuffix(name, suffix)
	if _, unfinished := durable.Unfinished(name); !ok || unfinished {
		return Entry{}, false
	}
	parts := strings.Split(stem, separator)
	if parts[0] == "" {
		return Entry{}, false
	}
	e := Entry{ClaimUID: types.UID(parts[0]), Devices: parts[1:], file: name}
	if slices.Equal(e.Devices, []string{allDevices}) {
		e.Devices, e.every = nil, true
	}
	return e, true
}

func fileName(r Record) (string, error) {
	uid := string(r.ClaimUID)
	if uid == "" || strings.ContainsAny(uid, separator+"/.") {
		return "", fmt.Errorf("claim %s/%s: UID %q cannot name a file", r.Namespace, r.Name, uid)
	}
	name := strings.Join(append([]string{uid}, r.Holds()...), separator) + suffix
	if len(name) > maxName {
		name = uid + separator + allDevices + suffix
	}
	return name, nil
}

// Save makes the record durable. A claim whose devices have changed must be removed first.
func (s *Store) Save(r Record) error {
	name, err := fileName(r)
	if err != nil {
		return err
	}
	raw, err := encode("claim "+string(r.ClaimUID), r)
	if err != nil {
		return err
	}
	return durable.Replace(s.disk, filepath.Join(s.claims, name), raw)
}

// Settle makes durable what is seen of records, and of holders if they matter: the process that wrote one, or removed it, may have been killed before the disk
// had the name. Nothing is written where it has.
func (s *Store) Settle(holders bool) error {
	dirs := []string{s.claims}
	if holders {
		dirs = []string{s.holders, s.claims}
	}
	for _, dir := range dirs {
		if err := s.disk.SyncDir(dir); err != nil {
			return fmt.Errorf("make sure that the disk has the records: %w", err)
		}
	}
	return nil
}

// Load finds a claim's record. An error that is an [*UnreadableError] or a [*FutureError] says that there is one, and what is wrong with it.
func (s *Store) Load(uid types.UID) (r Record, found bool, err error) {
	files, err := s.files(uid)
	if err != nil || len(files) == 0 {
		return Record{}, false, err
	}
	path := filepath.Join(s.claims, files[0])
	if len(files) > 1 {
		return Record{}, true, &UnreadableError{Path: path, Reason: fmt.Sprintf("the claim has %d records: %q", len(files), files)}
	}
	found, err = s.read(path, &r)
	if err != nil || !found {
		return Record{}, found, err
	}
	if r.ClaimUID != uid {
		return Record{}, true, &UnreadableError{Path: path, Reason: fmt.Sprintf("it is about claim %s", r.ClaimUID)}
	}
	return r, true, nil
}

// read is false for a file that is not there.
func (s *Store) read(path string, v any) (found bool, err error) {
	raw, err := s.disk.ReadFile(path)
	var untrusted *durable.UntrustedError
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case errors.Is(err, syscall.EIO):
		// A bad sector stays bad; anything else (no file handles left, say) says nothing about the record.
		return true, &UnreadableError{Path: path, Reason: err.Error()}
	case errors.As(err, &untrusted):
		// Whoever planted it must not say what this process does as root.
		return true, &UnreadableError{Path: path, Reason: untrusted.Reason}
	case err != nil:
		return true, fmt.Errorf("read the record %s: %w", path, err)
	}
	return true, decode(path, raw, v)
}

// files are those of one claim. Others' names are not taken apart: there may be hundreds, and this is asked in every call of the kubelet.
func (s *Store) files(uid types.UID) ([]string, error) {
	names, err := s.disk.ReadDir(s.claims)
	if err != nil {
		return nil, fmt.Errorf("list the records: %w", err)
	}
	var files []string
	for _, name := range names {
		if !strings.HasPrefix(name, string(uid)) {
			continue
		}
		if e, ok := parse(name); ok && e.ClaimUID == uid {
			files = append(files, e.file)
		}
	}
	slices.Sort(files)
	return files, nil
}

// Remove deletes a claim's record. One that is not there is removed already.
func (s *Store) Remove(uid types.UID) error {
	files, err := s.files(uid)
	if err != nil {
		return err
	}
	for _, f := range files {
		if err := durable.Remove(s.disk, filepath.Join(s.claims, f)); err != nil {
			return err
		}
	}
	if len(files) == 0 {
		// An earlier call may have been killed between the removal and its way to the disk.
		if err := s.disk.SyncDir(s.claims); err != nil {
			return fmt.Errorf("remove the record of claim %s: %w", uid, err)
		}
	}
	return nil
}

// Quarantine sets a claim's unreadable record aside, where it holds nothing any more and someone can still look at it. It returns the new places.
func (s *Store) Quarantine(uid types.UID, now time.Time) ([]string, error) {
	files, err := s.files(uid)
	if err != nil {
		return nil, err
	}
	var places []string
	for _, f := range files {
		// The claim alone names it: with every device and the time the name could get too long.
		to := filepath.Join(s.quarantine, fmt.Sprintf("%s-%d%s", uid, now.UnixNano(), suffix))
		if err := s.disk.Rename(filepath.Join(s.claims, f), to); err != nil {
			return places, fmt.Errorf("set the record of claim %s aside: %w", uid, err)
		}
		places = append(places, to)
		now = now.Add(1)
	}
	for _, dir := range []string{s.quarantine, s.claims} {
		if err := s.disk.SyncDir(dir); err != nil {
			return places, fmt.Errorf("set the record of claim %s aside: %w", uid, err)
		}
	}
	return places, nil
}

// Unfinished lists the claims of which an interrupted [Store.Save] left a temporary file.
func (s *Store) Unfinished() ([]types.UID, error) {
	names, err := s.disk.ReadDir(s.claims)
	if err != nil {
		return nil, fmt.Errorf("list unfinished records: %w", err)
	}
	var uids []types.UID
	for _, name := range names {
		if uid, ok := unfinishedOf(name); ok {
			uids = append(uids, uid)
		}
	}
	return uids, nil
}

// Discard removes what interrupted writes of the claim's record left. The caller holds the claim, so no write is under way.
func (s *Store) Discard(uid types.UID) error {
	names, err := s.disk.ReadDir(s.claims)
	if err != nil {
		return fmt.Errorf("discard unfinished records of claim %s: %w", uid, err)
	}
	for _, name := range names {
		if of, ok := unfinishedOf(name); ok && of == uid {
			if err := durable.Remove(s.disk, filepath.Join(s.claims, name)); err != nil {
				return err
			}
		}
	}
	return nil
}

func unfinishedOf(name string) (types.UID, bool) {
	base, ok := durable.Unfinished(name)
	if !ok {
		return "", false
	}
	uid, _, _ := strings.Cut(strings.TrimSuffix(base, suffix), separator)
	return types.UID(uid), true
}
