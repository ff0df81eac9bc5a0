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

// golden are the files of nodes on which claims share, as versions of the driver have left them.
const golden = "testdata/sharing"

// What an earlier version has left is read, joined and left by this one.
func TestWhatVersionsHaveLeftOnTheDiskIsReadJoinedAndLeft(t *testing.T) {
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
					w, h, _, found := disturbed(t, s)
					files := putGolden(t, w, filepath.Join(golden, version.Name(), sceneDir(s)), later)
					p := w.plugin(t)
					if err := p.Recover(t.Context()); err != nil {
						t.Fatal(err)
					}
					if err := p.Reconcile(t.Context()); err != nil {
						t.Fatal(err)
					}
					shares(t, w, h, p, found)
					if len(s.claims) > 1 {
						third := s.claims[0].DeepCopy()
						third.Name, third.UID = "third", "uid-third"
						mustPrepare(t, p, third)
						if later {
							keepsUnknown(t, w, files)
						}
						shares(t, w, h, p, found)
						mustUnprepare(t, p, third.UID)
					}
					for _, c := range s.claims {
						mustPrepare(t, p, c)
					}
					if later {
						keepsUnknown(t, w, files)
					}
					for _, c := range s.claims {
						mustUnprepare(t, p, c.UID)
						shares(t, w, h, p, found)
					}
					clean(t, w)
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

// writeGolden has this version leave files, for later ones to read.
func writeGolden(t *testing.T, dir string) {
	t.Helper()
	for _, s := range sharingScenes() {
		if !strings.HasSuffix(s.name, "last leaves") && !strings.HasSuffix(s.name, "first leaves") {
			continue
		}
		w, _, _, _ := disturbed(t, s)
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

// putGolden puts the files on the node's disk, in the place of its own. A later version has fields that this one does not know: it says how many are in each.
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
				raw = withUnknown(t, raw)
			}
			file := filepath.Join(state, sub, e.Name())
			names = append(names, e.Name())
			files[file] = strings.Count(string(raw), unknownField)
			w.disk.Put(file, raw)
		}
		own := w.disk.Names(filepath.Join(state, sub))
		slices.Sort(own)
		if !slices.Equal(own, names) {
			t.Fatalf("the node has %q, and the files are %q", own, names)
		}
	}
	return files
}

// unknownField is a field of a later version's.
const unknownField = "ofALaterVersion"

// withUnknown adds a field to every object in a file.
func withUnknown(t *testing.T, raw []byte) []byte {
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
				if name != "perDevice" && name != "consumedCapacity" { // in which every name is a device, or a capacity
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
	return sealed(payload)
}

func sealed(payload []byte) []byte {
	return fmt.Appendf(nil, `{"formatVersion":1,"checksum":"sha256:%x","payload":%s}`, sha256.Sum256(payload), payload)
}

// keepsUnknown makes sure that every file has as many unknown fields as it had.
func keepsUnknown(t *testing.T, w *world, files map[string]int) {
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
