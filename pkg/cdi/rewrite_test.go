package cdi

import (
	"os"
	"path/filepath"
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
