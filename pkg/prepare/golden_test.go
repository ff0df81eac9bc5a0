package prepare

import (
	"crypto/sha256"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the files of testdata anew: those of a version that was released are never changed")

// golden is a directory with files that earlier versions wrote for claims that share devices: the
// claims' records, and the files that list which claims share a setting.
const golden = "testdata/sharing"

// This version must be able to prepare and unprepare claims with the files of shared settings that
// earlier versions wrote.
func TestSharedStateOfEarlierVersionsIsUsable(t *testing.T) {
	if *update {
		writeGolden(t, filepath.Join(golden, "v1"))
	}
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
					files := putGolden(t, w, filepath.Join(golden, version.Name(), sceneDir(s)), later)
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
						if later {
							checkUnknownFieldsKept(t, w, files)
						}
						checkSharedState(t, w, h, p, found)
						mustUnprepare(t, p, third.UID)
					}
					for _, c := range s.claims {
						mustPrepare(t, p, c)
					}
					if later {
						checkUnknownFieldsKept(t, w, files)
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

// writeGolden writes the files of this version into dir. Later versions test with them.
func writeGolden(t *testing.T, dir string) {
	t.Helper()
	for _, s := range sharingScenes() {
		if !strings.HasSuffix(s.name, "last leaves") && !strings.HasSuffix(s.name, "first leaves") {
			continue
		}
		w, _, _, _ := interruptedScene(t, s)
		for _, sub := range []string{"claims", "holders"} {
			to := filepath.Join(dir, sceneDir(s), sub)
			if err := os.MkdirAll(to, 0o755); err != nil {
				t.Fatal(err)
			}
			for _, name := range w.disk.Names(filepath.Join(state, sub)) {
				raw, err := w.disk.ReadFile(filepath.Join(state, sub, name))
				if err == nil {
					err = os.WriteFile(filepath.Join(to, name), raw, 0o644)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// putGolden copies the files in dir to the fake disk. If later is true, it adds unknown fields, as
// a later version would. It returns how many it added to each file.
func putGolden(t *testing.T, w *world, dir string, later bool) map[string]int {
	t.Helper()
	files := map[string]int{}
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
			file := filepath.Join(state, sub, e.Name())
			names = append(names, e.Name())
			files[file] = strings.Count(string(raw), unknownField)
			w.disk.Put(file, raw)
		}
		own := w.disk.Names(filepath.Join(state, sub))
		slices.Sort(own)
		if !slices.Equal(own, names) {
			t.Fatalf("the node has %q, but the files are %q", own, names)
		}
	}
	return files
}

// unknownField is the name of a field that only a later version knows.
const unknownField = "ofALaterVersion"

// addUnknownFields adds unknownField to every object in the JSON of a file.
func addUnknownFields(t *testing.T, raw []byte) []byte {
	t.Helper()
	var e struct{ Payload any }
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
			v[unknownField] = "kept"
		case []any:
			for _, inner := range v {
				add(inner)
			}
		}
	}
	add(e.Payload)
	payload, err := json.Marshal(e.Payload)
	if err != nil {
		t.Fatal(err)
	}
	return sealPayload(payload)
}

func sealPayload(payload []byte) []byte {
	return fmt.Appendf(nil, `{"formatVersion":1,"checksum":"sha256:%x","payload":%s}`, sha256.Sum256(payload), payload)
}

// checkUnknownFieldsKept fails the test unless each file has as many unknown fields as files says.
func checkUnknownFieldsKept(t *testing.T, w *world, files map[string]int) {
	t.Helper()
	for file, want := range files {
		raw, err := w.disk.ReadFile(file)
		if err != nil {
			t.Error(err)
			continue
		}
		if got := strings.Count(string(raw), unknownField); got != want {
			t.Errorf("%s has %d fields of a later version, not %d: %s", file, got, want, raw)
		}
	}
}
