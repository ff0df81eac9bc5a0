package chart

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// Artifact Hub shows the chart's annotations. Its links must lead to files of this repository.
func TestChartMetadata(t *testing.T) {
	var chart struct {
		Version, AppVersion, KubeVersion, Home string
		Annotations                            map[string]string
	}
	content, err := os.ReadFile(filepath.Join(chartDir, "Chart.yaml"))
	if err == nil {
		err = yaml.Unmarshal(content, &chart)
	}
	if err != nil {
		t.Fatal(err)
	}
	if chart.Version != chart.AppVersion {
		t.Errorf("version %s and appVersion %s: chart and image are released together", chart.Version, chart.AppVersion)
	}
	if oldest := cluster.Releases()[0].Version; chart.KubeVersion != ">="+oldest[1:strings.LastIndex(oldest, ".")]+".0-0" {
		t.Errorf("kubeVersion is %s, the oldest tested version %s", chart.KubeVersion, oldest)
	}
	var links []struct{ Name, URL string }
	if err := yaml.UnmarshalStrict([]byte(chart.Annotations["artifacthub.io/links"]), &links); err != nil || len(links) == 0 {
		t.Fatalf("%d links, %v", len(links), err)
	}
	for _, link := range links {
		path, in := strings.CutPrefix(link.URL, chart.Home+"/")
		_, path, _ = strings.Cut(path, "/main/") // after "tree" or "blob"
		if _, err := os.Stat(filepath.Join("..", "..", path)); !in || path == "" || err != nil {
			t.Errorf("%s leads to %s: %v", link.Name, link.URL, err)
		}
	}
}
