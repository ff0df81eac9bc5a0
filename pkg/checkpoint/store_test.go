package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

const (
	uid    = types.UID("11111111-2222-3333-4444-555555555555")
	gpu0   = "gpu-0000-1b-00-0"
	gpu1   = "gpu-0000-1c-00-0"
	claims = "/state/claims"
)

func open(t *testing.T, disk *durabletest.Disk) *Store {
	t.Helper()
	s, err := Open("/state", disk)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func newRecord(gpus ...string) Record {
	r := Record{ClaimUID: uid, Namespace: "default", Name: "one-gpu", State: Prepared, BootID: "boot-1",
		Steps: []Step{{Kind: "claim-spec", Params: json.RawMessage(`{"a":1}`)}}}
	for i, g := range gpus {
		r.Devices = append(r.Devices, Device{Request: fmt.Sprintf("r%d", i), Pool: "node", Device: g, GPU: g, GPUUUID: "GPU-" + g})
	}
	return r
}

func save(t *testing.T, s *Store, r Record) string {
	t.Helper()
	if err := s.Save(r); err != nil {
		t.Fatal(err)
	}
	return fileOf(t, s, r)
}

// fileOf returns the path of a record.
func fileOf(t *testing.T, s *Store, r Record) string {
	t.Helper()
	entries, err := s.List()
	for _, e := range entries {
		if e.ClaimUID == r.ClaimUID && (e.Inexact || slices.Equal(e.Devices, r.OccupiedDevices())) {
			return filepath.Join(claims, e.file)
		}
	}
	t.Fatalf("no file of the record: %v, %v", entries, err)
	return ""
}

// sealed returns the content of a file in this format with the payload v.
func sealed(t *testing.T, format statefile.Format, v any) []byte {
	t.Helper()
	raw, ok := seal(format, v)
	if !ok {
		t.Fatalf("cannot be encoded: %v", v)
	}
	return raw
}

func TestRecordRoundTrip(t *testing.T) {
	s := open(t, durabletest.New())
	want := newRecord(gpu0, gpu1)
	want.Devices[0].ShareID = ptr.To(types.UID("share"))
	want.Devices[1].AdminAccess = true
	want.Devices[1].MIGUUID = "MIG-1"
	save(t, s, want)
	got, found, err := s.Load(uid)
	if err != nil || !found {
		t.Fatal(found, err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if _, found, err := s.Load("another"); found || err != nil {
		t.Error(found, err)
	}
}

func holds(e Entry, device string) bool {
	return e.Inexact || slices.Contains(e.Devices, device)
}

// The record lists the devices if there are too many for its file name.
func TestListKnowsDevices(t *testing.T) {
	many := make([]string, 13)
	for i := range many {
		many[i] = fmt.Sprintf("gpu-0000-%02x-00-0", i)
	}
	admin := newRecord(gpu0)
	admin.Devices[0].AdminAccess = true
	partitioned := newRecord(gpu0, gpu1)
	partitioned.Devices[0].Device += "-mig-19-4"
	for _, c := range []struct {
		name   string
		record Record
		holds  []string
		free   []string
		many   bool
	}{
		{"one GPU", newRecord(gpu0), []string{gpu0}, []string{gpu1}, false},
		{"one GPU for two requests", newRecord(gpu0, gpu0), []string{gpu0}, []string{gpu1}, false},
		{"admin access", admin, nil, []string{gpu0}, false},
		{"a partition and a GPU", partitioned, []string{gpu0 + "-mig-19-4", gpu1}, []string{gpu0, gpu0 + "-mig-19-3"}, false},
		{"more GPUs than fit", newRecord(many...), many, []string{gpu1}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			disk := durabletest.New()
			s := open(t, disk)
			path := save(t, s, c.record)
			if len(filepath.Base(path)) > 255 {
				t.Errorf("%s is too long", path)
			}
			list := func(inexact bool) Entry {
				t.Helper()
				entries, err := s.List()
				if err != nil || len(entries) != 1 || entries[0].ClaimUID != uid || entries[0].Inexact != inexact {
					t.Fatalf("%+v, %v", entries, err)
				}
				return entries[0]
			}
			e := list(false)
			for _, g := range c.holds {
				if !holds(e, g) {
					t.Errorf("%s is not occupied", g)
				}
			}
			for _, g := range c.free {
				if holds(e, g) {
					t.Errorf("%s is occupied", g)
				}
			}
			disk.Put(path, []byte("{"))
			list(c.many)
		})
	}
}

func TestBadRecordAffectsNoOther(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func([]byte) []byte
	}{
		{"empty", func([]byte) []byte { return nil }},
		{"white space", func([]byte) []byte { return []byte("\n\n") }},
		{"truncated", func(b []byte) []byte { return b[:len(b)/2] }},
		{"one bit flipped in the payload", func(b []byte) []byte {
			b = slices.Clone(b)
			b[strings.Index(string(b), "one-gpu")] ^= 1
			return b
		}},
		{"trailing data", func(b []byte) []byte { return append(slices.Clone(b), b...) }},
		{"no minReader", func([]byte) []byte { return []byte(`{}`) }},
		{"no payload", func([]byte) []byte { return []byte(`{"kind":"ClaimRecord","version":1,"minReader":1}`) }},
		{"the file of a mark", func([]byte) []byte { return sealed(t, markFormat, mark{"boot-1"}) }},
		{"a payload of the wrong type", func([]byte) []byte {
			return sealed(t, recordFormat, []string{})
		}},
		{"the record of another claim", func([]byte) []byte {
			other := newRecord(gpu0)
			other.ClaimUID = "other"
			return sealed(t, recordFormat, other)
		}},
		{"devices of the wrong type", func([]byte) []byte {
			return sealed(t, recordFormat, map[string]any{"claimUID": uid, "devices": []int{7}})
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			disk := durabletest.New()
			s := open(t, disk)
			path := save(t, s, newRecord(gpu0))
			raw, _ := disk.ReadFile(path)
			disk.Put(path, c.spoil(raw))
			good := newRecord(gpu1)
			good.ClaimUID = "good"
			save(t, s, good)

			_, found, err := s.Load(uid)
			var unreadable *statefile.UnreadableError
			if !found || !errors.As(err, &unreadable) || !strings.Contains(err.Error(), path) {
				t.Fatalf("found %v: %v", found, err)
			}
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("more than one line: %q", err)
			}
			if _, found, err := s.Load("good"); !found || err != nil {
				t.Errorf("the other record: %v, %v", found, err)
			}
			entries, err := s.List()
			if err != nil || !slices.ContainsFunc(entries, func(e Entry) bool { return e.ClaimUID == uid && holds(e, gpu0) }) {
				t.Errorf("it no longer blocks its GPU: %v, %v", entries, err)
			}

			places, err := s.Quarantine(uid, time.Unix(1, 0))
			if err != nil || len(places) != 1 {
				t.Fatal(places, err)
			}
			disk.PowerCut()
			if kept, err := disk.ReadFile(places[0]); err != nil || string(kept) != string(c.spoil(raw)) {
				t.Errorf("the evidence is gone: %q, %v", kept, err)
			}
			if _, found, err := s.Load(uid); found || err != nil {
				t.Errorf("still there: %v, %v", found, err)
			}
		})
	}
}

func TestOnlyAnIOErrorThatLastsMeansUnreadable(t *testing.T) {
	for failure, lost := range map[error]bool{syscall.EMFILE: false, syscall.EACCES: false, syscall.EIO: true} {
		synctest.Test(t, func(t *testing.T) {
			disk := durabletest.New()
			s := open(t, disk)
			path := save(t, s, newRecord(gpu0))
			fails := func(unreadable bool) {
				t.Helper()
				disk.FailReads(path, failure)
				var u *statefile.UnreadableError
				if _, found, err := s.Load(uid); !found || err == nil || errors.As(err, &u) != unreadable {
					t.Errorf("%v: %v, %v", failure, found, err)
				}
			}
			fails(false)
			<-time.After(lostAfter - 1)
			fails(false)
			disk.FailReads(path, nil)
			if _, _, err := s.Load(uid); err != nil {
				t.Error(err)
			}
			fails(false) // the read between has succeeded
			<-time.After(lostAfter)
			fails(lost)
		})
	}
}

func TestTwoRecordsOfOneClaimAreUnreadable(t *testing.T) {
	disk := durabletest.New()
	s := open(t, disk)
	save(t, s, newRecord(gpu0))
	save(t, s, newRecord(gpu1))
	_, _, err := s.Load(uid)
	var unreadable *statefile.UnreadableError
	if !errors.As(err, &unreadable) {
		t.Fatal(err)
	}
	if places, err := s.Quarantine(uid, time.Unix(1, 0)); err != nil || len(places) != 2 || places[0] == places[1] {
		t.Error(places, err)
	}
}

// A record that only a later version can use must not be quarantined. So it is the error of its
// claim, whatever the claim's other record is, and whichever comes first.
func TestNewerRecordWinsOverAnotherRecordOfItsClaim(t *testing.T) {
	for name, content := range map[string]string{
		"readable": "", "damaged": "{", "newer too": `{"minReader":9}`,
	} {
		for i, gpus := range [][2]string{{gpu0, gpu1}, {gpu1, gpu0}} {
			disk := durabletest.New()
			s := open(t, disk)
			newer, other := save(t, s, newRecord(gpus[0])), save(t, s, newRecord(gpus[1]))
			disk.Put(newer, []byte(`{"minReader":8}`))
			if content != "" {
				disk.Put(other, []byte(content))
			}
			_, found, err := s.Load(uid)
			var refused *statefile.NewerError
			if !found || !errors.As(err, &refused) || refused.Path != newer && content != `{"minReader":9}` {
				t.Errorf("%s, order %d: %v, %v", name, i, found, err)
			}
		}
	}
}

// While one of a claim's two records cannot be read, it may be one of a later version.
func TestTwoRecordsAreNotUnreadableWhileReadsFail(t *testing.T) {
	disk := durabletest.New()
	s := open(t, disk)
	for _, gpu := range []string{gpu0, gpu1} {
		disk.FailReads(save(t, s, newRecord(gpu)), syscall.EMFILE)
	}
	_, found, err := s.Load(uid)
	var unreadable *statefile.UnreadableError
	if !found || !errors.Is(err, syscall.EMFILE) || errors.As(err, &unreadable) {
		t.Errorf("%v, %v", found, err)
	}
}

func TestRemoveDeletesAllRecordsOfAClaim(t *testing.T) {
	disk := durabletest.New()
	s := open(t, disk)
	save(t, s, newRecord(gpu0))
	for range 2 {
		if err := s.Remove(uid); err != nil {
			t.Fatal(err)
		}
	}
	if names := disk.Names(claims); len(names) != 0 {
		t.Errorf("left %q", names)
	}
}

func TestUnfinishedWritesAreDiscarded(t *testing.T) {
	disk := durabletest.New()
	s := open(t, disk)
	disk.StopAt(2)
	if err := s.Save(newRecord(gpu0)); err == nil {
		t.Fatal("succeeded")
	}
	disk.Restart()
	if entries, err := s.List(); err != nil || len(entries) != 0 {
		t.Errorf("taken for a record: %v, %v", entries, err)
	}
	if uids, err := s.Unfinished(); err != nil || !slices.Equal(uids, []types.UID{uid}) {
		t.Errorf("%v, %v", uids, err)
	}
	if err := errors.Join(s.DiscardUnfinished("another"), s.DiscardUnfinished(uid)); err != nil {
		t.Fatal(err)
	}
	if names := disk.Names(claims); len(names) != 0 {
		t.Errorf("left %q", names)
	}
}

func TestForeignFilesAreLeftAlone(t *testing.T) {
	disk := durabletest.New()
	s := open(t, disk)
	for _, name := range []string{"README", ".json", "_x.json", "notes.txt"} {
		disk.Put(filepath.Join(claims, name), nil)
	}
	if entries, err := s.List(); err != nil || len(entries) != 0 {
		t.Error(entries, err)
	}
}

func TestInvalidUIDIsRefused(t *testing.T) {
	s := open(t, durabletest.New())
	for _, bad := range []types.UID{"", "../x", "a_b", "a/b"} {
		r := newRecord(gpu0)
		r.ClaimUID = bad
		if err := s.Save(r); err == nil {
			t.Errorf("%q accepted", bad)
		}
	}
}

func TestFailingDiskCallsNameTheClaim(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(*Store) error
	}{
		{"save", func(s *Store) error { return s.Save(newRecord(gpu0)) }},
		{"remove", func(s *Store) error { return s.Remove(uid) }},
		{"quarantine", func(s *Store) error { _, err := s.Quarantine(uid, time.Unix(1, 0)); return err }},
	} {
		t.Run(c.name, func(t *testing.T) {
			for n := 1; ; n++ {
				disk := durabletest.New()
				s := open(t, disk)
				save(t, s, newRecord(gpu0))
				disk.FailAt(n, syscall.EROFS)
				err := c.do(s)
				if disk.Writes() < n {
					if err != nil {
						t.Error(err)
					}
					return
				}
				if !errors.Is(err, syscall.EROFS) || !strings.Contains(err.Error(), string(uid)) {
					t.Errorf("write %d: %v", n, err)
				}
			}
		})
	}
}

func TestMissingDirectoryIsAnError(t *testing.T) {
	s := &Store{disk: durabletest.New(), claims: claims, quarantine: "/state/quarantine"}
	_, listErr := s.List()
	_, _, loadErr := s.Load(uid)
	_, quarantineErr := s.Quarantine(uid, time.Unix(1, 0))
	_, unfinishedErr := s.Unfinished()
	for i, err := range []error{listErr, loadErr, quarantineErr, unfinishedErr, s.Remove(uid), s.DiscardUnfinished(uid)} {
		if err == nil {
			t.Errorf("call %d succeeded", i)
		}
	}
	disk := durabletest.New()
	disk.FailAt(1, syscall.EROFS)
	if _, err := Open("/state", disk); !errors.Is(err, syscall.EROFS) {
		t.Error(err)
	}
}
