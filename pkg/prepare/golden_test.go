package prepare_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

var update = flag.Bool("update", false, "write the files of testdata anew: those of a version that was released are never changed")

// golden is a directory with files that earlier versions wrote for claims that share devices: the
// claims' records, and the files that list which claims share a setting.
const golden = "testdata/sharing"

// This version must be able to prepare and unprepare claims with the files of shared settings that
// earlier versions wrote.
func TestSharedStateOfEarlierVersionsIsUsable(t *testing.T) {
	versions, err := os.ReadDir(golden)
	if err != nil || len(versions) == 0 {
		t.Fatal("no files to be read: ", err)
	}
	for _, version := range versions {
		for _, s := range sharingScenes() {
			if !strings.HasSuffix(s.name, "last leaves") && !strings.HasSuffix(s.name, "first leaves") {
				continue
			}
			for _, later := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %s, of a later version %v", version.Name(), s.name, later), func(t *testing.T) {
					w, h, _, found := interruptedScene(t, s)
					putGolden(t, w, filepath.Join(golden, version.Name(), sceneDir(s)), later)
					p := w.plugin(t)
					if err := p.Recover(t.Context()); err != nil {
						t.Fatal(err)
					}
					if err := p.Reconcile(t.Context()); err != nil {
						t.Fatal(err)
					}
					checkSharedState(t, w, h, p, found)
					if len(s.claims) > 1 {
						third := s.claims[0].DeepCopy()
						third.Name, third.UID = "third", "uid-third"
						mustPrepare(t, p, third)
						checkSharedState(t, w, h, p, found)
						mustUnprepare(t, p, third.UID)
					}
					for _, c := range s.claims {
						mustPrepare(t, p, c)
					}
					for _, c := range s.claims {
						mustUnprepare(t, p, c.UID)
						checkSharedState(t, w, h, p, found)
					}
					checkClean(t, w)
					if left := w.holders(); len(left) != 0 {
						t.Errorf("left: %q", left)
					}
				})
			}
		}
	}
}

func sceneDir(s sharingScene) string {
	return strings.NewReplacer(" ", "-", ":", "").Replace(s.name)
}

// Version 0.1 wrote these files. This version must write the same bytes for the same claims, until
// it has a format of its own.
func TestSharedStateIsWrittenAsInVersion01(t *testing.T) {
	for _, s := range sharingScenes() {
		if !strings.HasSuffix(s.name, "last leaves") && !strings.HasSuffix(s.name, "first leaves") {
			continue
		}
		w, _, _, _ := interruptedScene(t, s)
		for _, sub := range []string{"claims", "holders"} {
			dir := filepath.Join(golden, "v0.1", sceneDir(s), sub)
			for _, name := range w.disk.Names(filepath.Join(state, sub)) {
				raw, err := w.disk.ReadFile(filepath.Join(state, sub, name))
				if err == nil && *update {
					err = errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, name), raw, 0o644))
				}
				if err != nil {
					t.Fatal(err)
				}
				if want, err := os.ReadFile(filepath.Join(dir, name)); err != nil || !bytes.Equal(raw, want) {
					t.Errorf("%s: %v\n%s\n%s", name, err, raw, want)
				}
			}
		}
	}
}

// putGolden copies the files in dir to the fake disk. If later is true, it adds unknown fields, as
// a later version would.
func putGolden(t *testing.T, w *world, dir string, later bool) {
	t.Helper()
	for _, sub := range []string{"claims", "holders"} {
		entries, err := os.ReadDir(filepath.Join(dir, sub))
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, e := range entries {
			raw, err := os.ReadFile(filepath.Join(dir, sub, e.Name()))
			if err != nil {
				t.Fatal(err)
			}
			if later {
				raw = addUnknownFields(t, raw)
			}
			names = append(names, e.Name())
			w.disk.Put(filepath.Join(state, sub, e.Name()), raw)
		}
		own := w.disk.Names(filepath.Join(state, sub))
		slices.Sort(own)
		if !slices.Equal(own, names) {
			t.Fatalf("the node has %q, but the files are %q", own, names)
		}
	}
}

// addUnknownFields adds a field of a later version to every object in the JSON of a file.
func addUnknownFields(t *testing.T, raw []byte) []byte {
	t.Helper()
	var e struct {
		Kind    string
		Payload any
	}
	if err := json.Unmarshal(raw, &e); err != nil {
		t.Fatal(err)
	}
	var add func(v any)
	add = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			for name, inner := range v {
				// The names in these two objects are not field names but devices or capacities.
				if name != "perDevice" && name != "consumedCapacity" {
					add(inner)
				}
			}
			v["ofALaterVersion"] = "x"
		case []any:
			for _, inner := range v {
				add(inner)
			}
		}
	}
	add(e.Payload)
	changed, err := statefile.Format{Kind: e.Kind, Version: 1, MinReader: 1}.Encode(e.Payload)
	if err != nil {
		t.Fatal(err)
	}
	return changed
}

// After a rollback an earlier version serves the node. If it changes no field that it knows, it
// must not rewrite the claims' records and the files of shared settings.
func TestRecordWithOnlyUnknownFieldsIsNotRewritten(t *testing.T) {
	for _, s := range sharingScenes() {
		if !strings.HasSuffix(s.name, "first leaves") && !strings.HasSuffix(s.name, "last leaves") {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			w, _, _, _ := interruptedScene(t, s)
			before := map[string][]byte{}
			for _, sub := range []string{"claims", "holders"} {
				for _, name := range w.disk.Names(filepath.Join(state, sub)) {
					file := filepath.Join(state, sub, name)
					raw, err := w.disk.ReadFile(file)
					if err != nil {
						t.Fatal(err)
					}
					before[file] = addUnknownFields(t, raw)
					w.disk.Put(file, before[file])
				}
			}
			p := w.plugin(t)
			for _, do := range []func() error{
				func() error { return p.Recover(t.Context()) },
				func() error { return p.Reconcile(t.Context()) },
				func() error { return p.RepairAllSpecs(t.Context()) },
			} {
				if err := do(); err != nil {
					t.Fatal(err)
				}
			}
			for _, c := range s.claims {
				mustPrepare(t, p, c)
			}
			for file, want := range before {
				if got, err := w.disk.ReadFile(file); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%s was written: %v\n%s\n%s", file, err, want, got)
				}
			}
		})
	}
}
