// Package workflows tests the project's workflows for GitHub: they call the targets of the Makefile
// and nothing else. So a developer can run everything that they run.
package workflows

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
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
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var w workflow
		if err := yaml.Unmarshal(content, &w); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
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
