// Package workflows tests the project's workflows for GitHub: they call the targets of the Makefile
// and nothing else. So a developer can run everything that they run.
package workflows

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

const root = "../.."

// workflow is the part of a workflow file that names what runs.
type workflow struct {
	Jobs map[string]struct {
		Strategy struct{ Matrix map[string][]string }
		Steps    []struct{ Uses, Run string }
	}
}

// call is a step's command: make with one target, or with the targets of the job's matrix.
var call = regexp.MustCompile(`^sudo env "PATH=\$PATH" make (\S+|\$\{\{ matrix\.target \}\})( [A-Z0-9]+=\$\{\{ matrix\.\w+ \}\})*$`)

// pinned is an action of a certain commit, with its version as a comment.
var pinned = regexp.MustCompile(`(?m)uses: [\w/-]+@[0-9a-f]{40} # v[0-9.]+$`)

// read reads a workflow file.
func read(t *testing.T, file string) (w workflow, content []byte) {
	t.Helper()
	content, err := os.ReadFile(file)
	if err == nil {
		err = yaml.Unmarshal(content, &w)
	}
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return w, content
}

// The version matrix runs on each tested line of Kubernetes and containerd.
func TestMatrixHasEachTestedVersion(t *testing.T) {
	w, _ := read(t, root+"/.github/workflows/matrix.yaml")
	tested := map[string][]string{"containerd": lines(cluster.ContainerdVersions())}
	var kubernetes []string
	for _, release := range cluster.Releases() {
		kubernetes = append(kubernetes, release.Version)
	}
	tested["kubernetes"] = lines(kubernetes)
	for program, want := range tested {
		if got := w.Jobs["make"].Strategy.Matrix[program]; !slices.Equal(got, want) {
			t.Errorf("matrix.yaml runs on %s %v, want %v", program, got, want)
		}
	}
}

// lines returns the lines of these versions: 1.37 for v1.37.0.
func lines(versions []string) (all []string) {
	for _, v := range versions {
		all = append(all, strings.TrimPrefix(v[:strings.LastIndex(v, ".")], "v"))
	}
	return all
}

func TestWorkflowsCallMakeTargetsOnly(t *testing.T) {
	makefile, err := os.ReadFile(root + "/Makefile")
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(root + "/.github/workflows/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no workflows: %v", err)
	}
	for _, file := range files {
		w, content := read(t, file)
		if actions := strings.Count(string(content), "uses: "); actions != len(pinned.FindAll(content, -1)) {
			t.Errorf("%s uses an action that no commit pins", file)
		}
		targets := 0
		for _, job := range w.Jobs {
			for _, step := range job.Steps {
				if step.Run == "" {
					continue
				}
				match := call.FindStringSubmatch(step.Run)
				if match == nil {
					t.Errorf("%s runs more than a make target: %s", file, step.Run)
					continue
				}
				called := []string{match[1]}
				if strings.Contains(match[1], "matrix.target") {
					called = job.Strategy.Matrix["target"]
				}
				for _, target := range called {
					targets++
					if !strings.Contains(string(makefile), "\n"+target+": ") {
						t.Errorf("%s calls make %s, which the Makefile lacks", file, target)
					}
				}
			}
		}
		if targets == 0 {
			t.Errorf("%s calls no make target", file)
		}
	}
}
