package prometheus

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const (
	files = "../../deployments/helm/gpu-dra-driver/files"
	job   = "gpu-dra-driver-kubelet-plugin"
)

// alertsFile writes the chart's alerts as the template does, and returns the file's path.
func alertsFile(t *testing.T) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(files, "alerts.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "alerts.yaml")
	text := strings.NewReplacer("PLUGIN", job, "RUNBOOKS", "https://example.com/runbooks").Replace(string(content))
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// panel is one panel of a dashboard. query is its query as Grafana sends it.
type panel struct{ dashboard, title, query string }

func panels(t *testing.T, node string) (all []panel) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(files, "dashboards", "*.json"))
	if err != nil || len(paths) != 2 {
		t.Fatalf("%v, %v: want two dashboards", paths, err)
	}
	for _, path := range paths {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var dashboard struct {
			Panels []struct {
				Title   string
				Targets []struct{ Expr string }
			}
		}
		if err := json.Unmarshal(content, &dashboard); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		for _, p := range dashboard.Panels {
			for _, target := range p.Targets {
				query := strings.NewReplacer("$node", node, "$__rate_interval", "20s").Replace(target.Expr)
				all = append(all, panel{filepath.Base(path), p.Title, query})
			}
		}
	}
	return all
}
