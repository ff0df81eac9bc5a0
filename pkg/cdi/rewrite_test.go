package cdi

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"
)

func TestRewriteBaseCreatesNewFileWithSameContent(t *testing.T) {
	root := t.TempDir()
	s := NewStore(root)
	edits := specs.ContainerEdits{Env: []string{"A=b"}, DeviceNodes: []*specs.DeviceNode{{Path: "/dev/null"}}}
	path := filepath.Join(root, baseFile)
	look := func() (os.FileInfo, string) {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return info, string(raw)
	}
	if err := s.WriteBase(edits); err != nil {
		t.Fatal(err)
	}
	first, content := look()
	if err := s.WriteBase(edits); err != nil {
		t.Fatal(err)
	}
	if same, _ := look(); !os.SameFile(first, same) {
		t.Error("an unchanged spec was rewritten")
	}
	if err := s.RewriteBase(edits); err != nil {
		t.Fatal(err)
	}
	if again, now := look(); os.SameFile(first, again) || now != content {
		t.Error("the spec was not rewritten, or its content changed")
	}
}

// Another instance of the plugin may have written the base spec. Prepare needs one that works.
func TestEnsureBaseKeepsAUsableSpec(t *testing.T) {
	other := commonEdits()
	other.Env = []string{"VERSION=other"}
	newer := commonEdits()
	newer.Mounts[0].HostPath = "/usr/lib/libcuda.so.2"
	written := func(edits specs.ContainerEdits) func(t *testing.T, s *Store) {
		return func(t *testing.T, s *Store) {
			t.Helper()
			must(t, s.WriteBase(edits))
		}
	}
	text := func(content string) func(t *testing.T, s *Store) {
		return func(t *testing.T, s *Store) {
			t.Helper()
			must(t, errors.Join(os.MkdirAll(s.root, 0o755), os.WriteFile(filepath.Join(s.root, baseFile), []byte(content), 0o600)))
		}
	}
	const empty = `{"cdiVersion":"0.3.0","kind":"k8s.gpu.nvidia.com/base",` +
		`"devices":[{"name":"driver","containerEdits":{"env":["NVIDIA_VISIBLE_DEVICES=void"]}}],"containerEdits":{}}`
	for name, c := range map[string]struct {
		before func(t *testing.T, s *Store)
		usable error
		kept   bool
	}{
		"missing":               {func(*testing.T, *Store) {}, nil, false},
		"the same":              {written(commonEdits()), errors.New("not asked"), true},
		"of another version":    {written(other), nil, true},
		"its files are missing": {written(other), errors.New("no such file"), false},
		"of another driver":     {written(newer), nil, false},
		"empty":                 {text(empty), nil, false},
		"no spec":               {text("{}"), nil, false},
		"no JSON":               {text("damaged"), nil, false},
		"of another kind":       {text(strings.Replace(empty, "com/base", "com/other", 1)), nil, false},
		"without its device":    {text(strings.Replace(empty, `"driver"`, `"other"`, 1)), nil, false},
	} {
		s := newStore(t)
		c.before(t, s)
		path := filepath.Join(s.root, baseFile)
		before, _ := os.ReadFile(path)
		must(t, s.EnsureBase(commonEdits(), func(specs.ContainerEdits) error { return c.usable }))
		after, err := os.ReadFile(path)
		must(t, err)
		if kept := bytes.Equal(before, after); kept != c.kept || !kept && !strings.Contains(string(after), "libcuda.so.1") {
			t.Errorf("%s: kept %t, want %t: %s", name, kept, c.kept, after)
		}
		if missing := s.Missing(nil); len(missing) > 0 {
			t.Errorf("%s: missing %v", name, missing)
		}
	}
}

func TestEmptyEditsNeverReplaceTheBaseSpec(t *testing.T) {
	s := newStore(t)
	must(t, s.WriteBase(commonEdits()))
	before, err := os.ReadFile(filepath.Join(s.root, baseFile))
	must(t, err)
	for name, write := range map[string]func(specs.ContainerEdits) error{
		"write": s.WriteBase, "rewrite": s.RewriteBase,
		"ensure": func(e specs.ContainerEdits) error {
			return s.EnsureBase(e, func(specs.ContainerEdits) error { return errors.New("unusable") })
		},
	} {
		if err := write(specs.ContainerEdits{}); err == nil || !strings.Contains(err.Error(), "driver") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if after, err := os.ReadFile(filepath.Join(s.root, baseFile)); err != nil || !bytes.Equal(before, after) {
		t.Errorf("%s, %v", after, err)
	}
}
