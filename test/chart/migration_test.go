package chart

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// docs/migration.md has two example values files, one for each MIG strategy of NVIDIA's device
// plugin. With these values, the chart must render the DeviceClasses that the page promises.
func TestDocumentedMIGStrategyValues(t *testing.T) {
	page, err := os.ReadFile("../../docs/migration.md")
	if err != nil {
		t.Fatal(err)
	}
	var values []string
	open := false
	for line := range strings.Lines(string(page)) {
		code, is := strings.CutPrefix(line, "    ")
		if is && code == "deviceClasses:\n" {
			values, open = append(values, ""), true
		}
		open = open && is
		if open {
			values[len(values)-1] += code
		}
	}
	want := []map[string]string{
		{
			"gpu.nvidia.com": "nvidia.com/gpu", "mig.nvidia.com": "",
			"mig-1g.10gb.nvidia.com": "nvidia.com/mig-1g.10gb", "mig-1g.10gb.me.nvidia.com": "nvidia.com/mig-1g.10gb.me",
		},
		{"gpu.nvidia.com": "", "mig.nvidia.com": "", "mig-1g.10gb.nvidia.com": "nvidia.com/gpu"},
	}
	var got []map[string]string
	for _, v := range values {
		file := filepath.Join(t.TempDir(), "values.yaml")
		if err := os.WriteFile(file, []byte(v), 0o600); err != nil {
			t.Fatal(err)
		}
		got = append(got, resources(t, "--values", file))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
