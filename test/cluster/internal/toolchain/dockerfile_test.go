package toolchain

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestCopiedSources(t *testing.T) {
	for _, test := range []struct {
		name, dockerfile string
		want             []string
	}{
		{"several sources", "COPY go.mod go.sum ./", []string{"go.mod", "go.sum"}},
		{"a folder, in lower case", "copy pkg pkg", []string{"pkg"}},
		{"options", "COPY --chown=1:1 cmd /cmd", []string{"cmd"}},
		{"a continued line", "COPY a \\\n  b /x/", []string{"a", "b"}},
		{"another stage's files are no input", "COPY --from=build /out/x /usr/bin/", nil},
		{"words that only look alike", "RUN COPY a b\n# COPY c d", nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := copiedSources(test.dockerfile); !slices.Equal(got, test.want) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestMissingSourceIsNamed(t *testing.T) {
	dir := t.TempDir()
	dockerfile := filepath.Join(dir, "Dockerfile")
	if err := os.WriteFile(dockerfile, []byte("FROM x\nCOPY nowhere /\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := contextFiles(dockerfile); err == nil || !strings.Contains(err.Error(), `"nowhere"`) {
		t.Errorf("error is %v", err)
	}
}
