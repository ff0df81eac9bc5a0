package checkpoint

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

var update = flag.Bool("update", false, "write the files of testdata: those of a released version never change")

// golden is the state directory of a node as version 0.1 writes it. A later form of the files gets
// a directory of its own, and this one stays to be read.
const golden = "testdata/v0.1"

// goldenRecords and goldenHolders are what the files of golden contain.
var (
	goldenRecords = []Record{{
		ClaimUID: "11111111-0000-4000-8000-000000000001", Namespace: "default", Name: "whole", State: Prepared, BootID: "boot-1",
		Devices: []Device{
			{
				Request: "a", Pool: "node", Device: gpu0, GPU: gpu0, GPUUUID: "GPU-0",
				Model: "NVIDIA H100 80GB HBM3, 85520809984 bytes, MIG profiles 0123456789abcdef",
			},
			{Request: "b", Pool: "node", Device: gpu1, AdminAccess: true, GPU: gpu1, GPUUUID: "GPU-1"},
		},
		Steps: []Step{{Kind: "claim-spec", Params: json.RawMessage(`{"devices":null}`)}},
	}, {
		ClaimUID: "11111111-0000-4000-8000-000000000002", Namespace: "default", Name: "partition", State: Preparing, BootID: "boot-1",
		Devices: []Device{{Request: "a", Pool: "node", Device: gpu0 + "-mig-19-4", GPU: gpu0, GPUUUID: "GPU-0", MIGUUID: "MIG-1"}},
		Steps: []Step{
			{Kind: "mig-instance", Params: json.RawMessage(`{"device":"` + gpu0 + `-mig-19-4"}`)},
			{Kind: "claim-spec", Params: json.RawMessage(`{"devices":null}`)},
		},
	}, {
		ClaimUID: "11111111-0000-4000-8000-000000000003", Namespace: "default", Name: "share", State: Reverting, BootID: "boot-1",
		Devices: []Device{{
			Request: "a", Pool: "node", Device: gpu0 + "-share", ShareID: ptr.To(types.UID("share-1")), GPU: gpu0, GPUUUID: "GPU-0",
			Fraction: true, ConsumedCapacity: map[string]resource.Quantity{"cores": resource.MustParse("25"), "memory": resource.MustParse("10Gi")},
		}},
		Steps: []Step{{Kind: "shared", Params: json.RawMessage(`{"key":"` + gpu0 + `-share_mps-daemon"}`)}},
	}}
	goldenHolders = []Holder{
		newHolder(gpu0 + "_time-slice"),
		{Key: "u-0_mps-daemon", GPUs: []string{gpu0, gpu1}, State: Undoing, BootID: "boot-1",
			Step: Step{Kind: "mps-daemon", Params: json.RawMessage(`{"id":"u-0"}`)}},
	}
)

// writeGolden writes the files of golden with this version into an empty state directory.
func writeGolden(t *testing.T) (*Store, *durabletest.Disk) {
	t.Helper()
	disk := durabletest.New()
	s := open(t, disk)
	errs := []error{s.Mark(gpu0, "boot-1")}
	for _, r := range goldenRecords {
		errs = append(errs, s.Save(r))
	}
	for _, h := range goldenHolders {
		errs = append(errs, s.SaveHolder(h))
	}
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return s, disk
}

// goldenFiles returns the names of the files in dir, relative to it.
func goldenFiles(t *testing.T, dir string) (names []string) {
	t.Helper()
	if err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		names = append(names, name)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return names
}

func TestFilesAreWrittenAsInVersion01(t *testing.T) {
	_, disk := writeGolden(t)
	written := 0
	for _, dir := range []string{"claims", "holders", "mig"} {
		for _, name := range disk.Names(filepath.Join("/state", dir)) {
			written++
			raw, err := disk.ReadFile(filepath.Join("/state", dir, name))
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join(golden, dir, name)
			if *update {
				if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, raw, 0o644)); err != nil {
					t.Fatal(err)
				}
			}
			if want, err := os.ReadFile(file); err != nil || !bytes.Equal(raw, want) {
				t.Errorf("%s: %v\n%s\n%s", file, err, raw, want)
			}
		}
	}
	if files := goldenFiles(t, golden); len(files) != written {
		t.Errorf("wrote %d files, want %q", written, files)
	}
}

func TestFilesOfVersion01AreRead(t *testing.T) {
	s := openForm(t, golden)
	for _, want := range goldenRecords {
		if got, found, err := s.Load(want.ClaimUID); err != nil || !found || cmp.Diff(want, got) != "" {
			t.Errorf("%v, %v, %s", found, err, cmp.Diff(want, got))
		}
	}
	for _, want := range goldenHolders {
		if got, found, err := s.Holder(want.Key); err != nil || !found || cmp.Diff(want, got) != "" {
			t.Errorf("%v, %v, %s", found, err, cmp.Diff(want, got))
		}
	}
	if boot, marked, err := s.Marked(gpu0); err != nil || !marked || boot != "boot-1" {
		t.Error(boot, marked, err)
	}
}

// The files of the form of 2026-11-27 differ from those of version 0.1 in fields that were added or
// removed since. Its holder files list the claims.
func TestFilesOfEarlierFormAreRead(t *testing.T) {
	s := openForm(t, "testdata/2026-11-27")
	for _, want := range goldenRecords {
		got, found, err := s.Load(want.ClaimUID)
		if err != nil || !found || got.Name != want.Name || got.State != want.State || len(got.Steps) != len(want.Steps) ||
			!slices.Equal(got.OccupiedDevices(), want.OccupiedDevices()) {
			t.Errorf("%v, %v, %+v", found, err, got)
		}
	}
	for _, want := range goldenHolders {
		got, found, err := s.Holder(want.Key)
		if err != nil || !found || got.State != want.State || !slices.Equal(got.GPUs, want.GPUs) || cmp.Diff(got.Step, want.Step) != "" {
			t.Errorf("%v, %v, %+v", found, err, got)
		}
	}
	if boot, marked, err := s.Marked(gpu0); err != nil || !marked || boot != "boot-1" {
		t.Error(boot, marked, err)
	}
}

// openForm opens a store with the files of the directory dir.
func openForm(t *testing.T, dir string) *Store {
	t.Helper()
	disk := durabletest.New()
	s := open(t, disk)
	for _, name := range goldenFiles(t, dir) {
		raw, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		disk.Put(filepath.Join("/state", name), raw)
	}
	return s
}

// A file that only a later version can use is refused by name. It stays as it is, and a record
// keeps blocking its devices.
func TestFilesForNewerReaderAreRefusedAndKept(t *testing.T) {
	s, disk := writeGolden(t)
	r, h := goldenRecords[0], goldenHolders[0]
	mark := func() error { return s.Mark(gpu0, "boot-2") }
	for file, c := range map[string]struct {
		version int
		calls   []func() error
	}{
		fileOf(t, s, r): {recordFormat.Version, []func() error{
			func() error { _, _, err := s.Load(r.ClaimUID); return err },
			func() error { return s.Save(r) },
		}},
		filepath.Join(s.holders, h.Key+suffix): {holderFormat.Version, []func() error{
			func() error { _, _, err := s.Holder(h.Key); return err },
			func() error { return s.SaveHolder(h) },
		}},
		filepath.Join(s.marks, gpu0): {markFormat.Version, []func() error{
			func() error { _, _, err := s.Marked(gpu0); return err },
			mark, func() error { return s.Unmark(gpu0) },
		}},
	} {
		newer := fmt.Appendf(nil, `{"minReader":%d,"digest":"of another kind","body":{}}`, c.version+1)
		disk.Put(file, newer)
		for i, call := range c.calls {
			err := call()
			var refused *statefile.NewerError
			if !errors.As(err, &refused) || refused.Path != file {
				t.Errorf("%s: call %d: %v", file, i, err)
			}
			needs, reads := fmt.Sprintf("version %d", c.version+1), fmt.Sprintf("up to %d", c.version)
			for _, want := range []string{file, needs, reads, "install the later driver again"} {
				if err != nil && !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
		}
		if got, err := disk.ReadFile(file); err != nil || !bytes.Equal(got, newer) {
			t.Errorf("%s was changed: %s, %v", file, got, err)
		}
	}
	entries, err := s.List()
	if err != nil || !holds(entries[0], gpu0) {
		t.Errorf("it no longer blocks its GPU: %v, %v", entries, err)
	}
}

// A later version may add fields without raising minReader. This version reads such a file, and
// drops the fields when it writes it.
func TestFieldsOfALaterVersionAreIgnored(t *testing.T) {
	disk := durabletest.New()
	s := open(t, disk)
	path := save(t, s, newRecord(gpu0))
	disk.Put(path, sealed(t, statefile.Format{Kind: "ClaimRecord", Version: 7, MinReader: 1}, map[string]any{
		"claimUID": uid, "epoch": 7, "devices": []any{map[string]any{"device": gpu0, "gpu": gpu0, "slot": 3}},
		"steps": []any{map[string]any{"kind": "claim-spec", "params": map[string]any{"later": 1}, "order": 2}},
	}))
	r, found, err := s.Load(uid)
	if err != nil || !found || r.Devices[0].GPU != gpu0 || string(r.Steps[0].Params) != `{"later":1}` {
		t.Fatalf("%+v, %v, %v", r, found, err)
	}
	save(t, s, r)
	if again, _, err := s.Load(uid); err != nil || cmp.Diff(r, again) != "" {
		t.Error(err, cmp.Diff(r, again))
	}
}

func TestStoredFieldsAreThoseOfThePresentForm(t *testing.T) {
	durabletest.CheckFields(t, filepath.Dir(golden), filepath.Base(golden), map[string]any{
		recordFormat.Kind: Record{}, holderFormat.Kind: Holder{}, markFormat.Kind: mark{},
	})
}
