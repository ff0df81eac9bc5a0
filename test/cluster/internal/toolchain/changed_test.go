package toolchain

import (
	"os"
	"path/filepath"
	"testing"
)

func TestTextIsTakenOutOfAFileThatHasItOnce(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file.go")
	for content, want := range map[string]string{
		"if a || b {":          "if a {",
		"if a {":               "", // another version of the module
		"if a || b { a || b }": "",
	} {
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(file, 0o400); err != nil { // as in a copy of Go's module cache
			t.Fatal(err)
		}
		err := takeOut(file, " || b")
		got, readErr := os.ReadFile(file)
		switch {
		case readErr != nil:
			t.Fatal(readErr)
		case want == "" && (err == nil || string(got) != content):
			t.Errorf("%q became %q: %v, want an error", content, got, err)
		case want != "" && (err != nil || string(got) != want):
			t.Errorf("%q became %q: %v", content, got, err)
		}
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
}
