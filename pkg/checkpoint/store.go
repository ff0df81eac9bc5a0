// Package checkpoint keeps one durable record for each claim on the node.
//
// A record is a JSON file as package statefile writes it. It is replaced atomically, and is on disk
// before the call returns. The file's name contains the UID of the claim and the names of its
// devices. So one directory listing shows which claim uses a device, and a record that cannot be
// read still blocks its devices.
//
// Next to the records are two more kinds of files. One kind is a mark that the plugin enabled a
// GPU's MIG mode (see [Store.Mark]). The other is a GPU setting, an MPS daemon or a partition that
// claims share (see [Holder]).
//
// The package does not lock. Callers hold the lock of the claim. To use a GPU's marks or the files
// about what claims share on the GPU, they also hold the lock of that GPU.
package checkpoint

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// The formats of the files. A new field that must survive a rewrite by an older version, or a
// change after which an older version would do harm, raises Version and MinReader.
var (
	recordFormat = statefile.Format{Kind: "ClaimRecord", Version: 1, MinReader: 1}
	holderFormat = statefile.Format{Kind: "Holder", Version: 2, MinReader: 2} // version 1 lists the claims
	markFormat   = statefile.Format{Kind: "MIGMark", Version: 1, MinReader: 1}
)

const (
	suffix    = ".json"
	separator = "_"
	// allDevices replaces the list of devices in a file name that would be longer than maxName.
	allDevices = "all"
	maxName    = 255
	// lostAfter is how long the reads of a file must fail with I/O errors until its content counts as
	// lost. The path to a disk, for example over the network, may come back before.
	lostAfter = time.Minute
)

// Store reads, writes and deletes the checkpoint records of the claims on a node, and the files of
// settings that claims share.
type Store struct {
	disk       durable.FS
	claims     string
	quarantine string
	marks      string
	holders    string
	// failing has, by the path of a file, since when its reads fail with I/O errors.
	failing sync.Map
}

// At returns the store in dir for a caller that only reads. It creates no directories.
func At(dir string, disk durable.FS) *Store {
	return &Store{
		disk: disk, claims: filepath.Join(dir, "claims"),
		quarantine: filepath.Join(dir, "quarantine"), marks: filepath.Join(dir, "mig"), holders: filepath.Join(dir, "holders"),
	}
}

// Open creates the store's directories in dir, if they are missing.
func Open(dir string, disk durable.FS) (*Store, error) {
	s := At(dir, disk)
	for _, d := range []string{dir, s.claims, s.quarantine, s.marks, s.holders} {
		if err := durable.MakeDir(disk, d); err != nil {
			return nil, fmt.Errorf("open the store of records: %w", err)
		}
	}
	return s, nil
}

// Entry tells of a claim's record which claim it is for and which devices that claim has.
type Entry struct {
	ClaimUID types.UID
	Devices  []string
	// Inexact means that the claim's devices are unknown: their names were too long for the file name,
	// and the record cannot be read. Then Devices is empty, and the claim may have any device.
	Inexact bool
	file    string
}

// MayHave reports whether the claim has, or may have, the GPU with this name or a part of it.
func (e Entry) MayHave(gpu string) bool {
	return e.Inexact || slices.ContainsFunc(e.Devices, func(d string) bool { return d == gpu || strings.HasPrefix(d, gpu+"-") })
}

// read decodes the file at path into v, as [statefile.Format.Read] does. Once its reads have failed
// with I/O errors for lostAfter, it is unreadable ([statefile.UnreadableError]), as a bad sector
// stays bad.
func (s *Store) read(format statefile.Format, path string, v any) (found bool, err error) {
	found, err = format.Read(s.disk, path, v)
	if !errors.Is(err, syscall.EIO) {
		s.failing.Delete(path)
		return found, err
	}
	since, _ := s.failing.LoadOrStore(path, time.Now())
	if time.Since(since.(time.Time)) >= lostAfter {
		return true, &statefile.UnreadableError{Path: path, Reason: err.Error()}
	}
	return true, fmt.Errorf("%w: later calls read it again, and give it up if that fails for %s", err, lostAfter)
}

// list returns what parse finds in the names of the files in dir, sorted by these names. It skips
// names for which parse returns false. what describes the files in an error.
func list[T any](s *Store, dir, what string, parse func(name string) (T, bool)) ([]T, error) {
	names, err := s.disk.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", what, err)
	}
	slices.Sort(names)
	var all []T
	for _, name := range names {
		if parsed, ok := parse(name); ok {
			all = append(all, parsed)
		}
	}
	return all, nil
}

// List returns an entry for each record, sorted by file name. It reads only the records whose file
// names do not list their devices. It ignores files that are not records.
func (s *Store) List() ([]Entry, error) {
	entries, err := s.fileNames()
	listed := entries[:0]
	for _, e := range entries {
		if e.Inexact {
			var r Record
			found, err := s.read(recordFormat, filepath.Join(s.claims, e.file), &r)
			if err == nil && !found {
				continue // another call has just removed it
			}
			if err == nil && r.ClaimUID == e.ClaimUID {
				e.Devices, e.Inexact = r.OccupiedDevices(), false
			}
		}
		listed = append(listed, e)
	}
	return listed, err
}

// fileNames returns what the file names of the records say, sorted by them.
func (s *Store) fileNames() ([]Entry, error) { return list(s, s.claims, "the records", parseFileName) }

// listClaim lists the records of one claim, by their file names alone.
func (s *Store) listClaim(uid types.UID) ([]Entry, error) {
	entries, err := s.fileNames()
	return slices.DeleteFunc(entries, func(e Entry) bool { return e.ClaimUID != uid }), err
}

func parseFileName(name string) (Entry, bool) {
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
		e.Devices, e.Inexact = nil, true
	}
	return e, true
}

// Save writes the record durably. The file's name depends on the claim's devices, so the caller
// must remove the old record first if they changed.
func (s *Store) Save(r Record) error {
	uid := string(r.ClaimUID)
	if uid == "" || strings.ContainsAny(uid, separator+"/.") {
		return fmt.Errorf("claim %s/%s: UID %q cannot name a file", r.Namespace, r.Name, uid)
	}
	name := strings.Join(append([]string{uid}, r.OccupiedDevices()...), separator) + suffix
	if len(name) > maxName {
		name = uid + separator + allDevices + suffix
	}
	return recordFormat.Write(s.disk, filepath.Join(s.claims, name), r)
}

// SyncDirs makes sure that a power cut cannot undo earlier writes and removals of records, because
// a process may have been killed between a write and its sync. If "holders" is true, it does the
// same for the files of settings and daemons that claims share.
func (s *Store) SyncDirs(holders bool) error {
	dirs := []string{s.claims}
	if holders {
		dirs = []string{s.holders, s.claims}
	}
	for _, dir := range dirs {
		if err := s.disk.SyncDir(dir); err != nil {
			return fmt.Errorf("sync the directory of records: %w", err)
		}
	}
	return nil
}

// Readable returns all records that can be read, sorted by their file names.
func (s *Store) Readable() ([]Record, error) {
	entries, err := s.fileNames()
	if err != nil {
		return nil, err
	}
	var records []Record
	for _, e := range entries {
		var r Record
		if found, err := s.read(recordFormat, filepath.Join(s.claims, e.file), &r); err == nil && found && r.ClaimUID == e.ClaimUID {
			records = append(records, r)
		}
	}
	return records, nil
}

// Load reads a claim's record. If err is an [*statefile.UnreadableError] or a
// [*statefile.NewerError], the record exists but cannot be used.
//
// Two records of one claim are unreadable. But if one of them is a NewerError or cannot be read
// now, Load returns that error: only unreadable records may be quarantined.
func (s *Store) Load(uid types.UID) (r Record, found bool, err error) {
	entries, err := s.listClaim(uid)
	if err != nil {
		return Record{}, false, err
	}
	return s.load(uid, entries)
}

// load reads the record of a claim. entries are all those of the claim.
func (s *Store) load(uid types.UID, entries []Entry) (r Record, found bool, err error) {
	var path string
	var unreadable *statefile.UnreadableError
	for _, e := range entries {
		path, r = filepath.Join(s.claims, e.file), Record{}
		found, err = s.read(recordFormat, path, &r)
		if err != nil && !errors.As(err, &unreadable) {
			return Record{}, true, err
		}
	}
	switch {
	case len(entries) > 1:
		err = &statefile.UnreadableError{Path: path, Reason: "the claim has another record, " + entries[0].file}
		return Record{}, true, err
	case err != nil || !found:
		return Record{}, found, err
	case r.ClaimUID != uid:
		return Record{}, true, &statefile.UnreadableError{Path: path, Reason: fmt.Sprintf("it belongs to claim %s", r.ClaimUID)}
	}
	return r, true, nil
}

// LoadAll calls use with each record that among selects, as [Store.Load] returns it. It lists the
// directory once.
func (s *Store) LoadAll(among func(Entry) bool, use func(e Entry, r Record, found bool, err error)) error {
	entries, err := s.List()
	if err != nil {
		return err
	}
	of := map[types.UID][]Entry{}
	for _, e := range entries {
		of[e.ClaimUID] = append(of[e.ClaimUID], e)
	}
	for _, e := range entries {
		if among(e) {
			r, found, err := s.load(e.ClaimUID, of[e.ClaimUID])
			use(e, r, found, err)
		}
	}
	return nil
}

// Remove deletes a claim's record. It is no error if there is none.
func (s *Store) Remove(uid types.UID) error {
	entries, err := s.listClaim(uid)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := durable.Remove(s.disk, filepath.Join(s.claims, e.file)); err != nil {
			return err
		}
	}
	if len(entries) == 0 {
		// Sync the directory even without a file: an earlier call may have been killed after it removed
		// the file but before the removal was on disk.
		if err := s.disk.SyncDir(s.claims); err != nil {
			return fmt.Errorf("remove the record of claim %s: %w", uid, err)
		}
	}
	return nil
}

// Quarantine moves a claim's unreadable record to the quarantine directory. There it blocks no
// device, and an admin can inspect it. Quarantine returns the new path of each moved file.
func (s *Store) Quarantine(uid types.UID, now time.Time) (places []string, err error) {
	entries, err := s.listClaim(uid)
	if err != nil {
		return nil, err
	}
	for i, e := range entries {
		// The new name has only the claim's UID and the time. With the devices it could be too long.
		place, err := s.quarantineFile(filepath.Join(s.claims, e.file), fmt.Sprintf("%s-%d", uid, now.UnixNano()+int64(i)))
		if err != nil {
			return places, fmt.Errorf("quarantine the record of claim %s: %w", uid, err)
		}
		places = append(places, place)
	}
	return places, nil
}

// quarantineFile moves the file at path to the quarantine directory and returns its new path.
func (s *Store) quarantineFile(path, name string) (string, error) {
	to := filepath.Join(s.quarantine, name+suffix)
	if err := s.disk.Rename(path, to); err != nil {
		return "", err
	}
	s.failing.Delete(path) // the claim may get a new record of this name
	return to, errors.Join(s.disk.SyncDir(s.quarantine), s.disk.SyncDir(filepath.Dir(path)))
}

// Unfinished lists the claims for which an interrupted [Store.Save] left a temporary file.
func (s *Store) Unfinished() ([]types.UID, error) {
	return list(s, s.claims, "unfinished records", unfinishedOf)
}

// DiscardUnfinished removes the temporary files that interrupted calls of [Store.Save] left for a
// claim. The caller holds the claim's lock, so no Save is running.
func (s *Store) DiscardUnfinished(uid types.UID) error {
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
	marked, err := s.read(markFormat, filepath.Join(s.marks, gpu), &m)
	var unreadable *statefile.UnreadableError
	if errors.As(err, &unreadable) {
		return "", true, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("read the MIG mode mark of %s: %w", gpu, err)
	}
	return m.BootID, marked, nil
}
