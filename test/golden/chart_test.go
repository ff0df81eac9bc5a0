package golden

import (
	"bytes"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// For each of several sets of values, the chart must render the objects recorded in testdata. The
// sets are the defaults, the values of the test cluster, and more that together enable every
// template and option.
func TestChart(t *testing.T) {
	golden := newFiles(t, "chart")
	program := helm(t)
	for name, values := range map[string][]string{
		"default":  nil,
		"e2e":      {filepath.Join(repository(), "test", "e2e", "values.yaml")},
		"sharing":  {valuesFile("sharing")},
		"metrics":  {valuesFile("metrics")},
		"hardened": {valuesFile("hardened")},
		"minimal":  {valuesFile("minimal")},
		"places":   {valuesFile("places")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			args := []string{"template", "gpus", filepath.Join(repository(), "deployments", "helm", "gpu-dra-driver"),
				"--namespace", "gpu-system", "--kube-version", "1.37.0"}
			for _, v := range values {
				args = append(args, "--values", v)
			}
			cmd := exec.CommandContext(t.Context(), program, args...)
			var out, errOut bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &errOut
			if err := cmd.Run(); err != nil {
				t.Fatalf("%v\n%s", err, errOut.String())
			}
			golden.check(t, name+".yaml", out.Bytes())
		})
	}
}

func valuesFile(name string) string {
	return filepath.Join(repository(), "test", "golden", "testdata", "values", name+".yaml")
}

// helm returns the path of the helm program. If there is none, it skips the test.
func helm(t *testing.T) string {
	t.Helper()
	path, found := clusterharness.FindHelm()
	if !found {
		t.Skip("no helm in $HELM, PATH or the test cluster's cache: run `make golden`, which builds one")
	}
	return path
}
