package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// guide has the steps of one section of docs/migration.md. The test runs the commands of these
// steps as they are written there.
type guide struct {
	*world
	t         *testing.T
	dir       string
	titles    []string
	steps     map[string]string
	variables string
	done      []string
}

var stepTitle = regexp.MustCompile(`^\d+\. \*\*(.+?)\.?\*\*`)

// guide reads the steps below a heading of docs/migration.md. The first step sets the variables
// that the other steps use.
func (w *world) guide(t *testing.T, heading string) *guide {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(w.root, "docs", "migration.md"))
	if err != nil {
		t.Fatal(err)
	}
	g := &guide{world: w, t: t, dir: w.workplace(t), steps: map[string]string{}}
	here, title := false, ""
	for line := range strings.Lines(string(page)) {
		if text, is := strings.CutPrefix(line, "#"); is {
			here, title = strings.TrimLeft(strings.TrimSpace(text), "# ") == heading, ""
		}
		if m := stepTitle.FindStringSubmatch(line); here && m != nil {
			title = m[1]
			g.titles = append(g.titles, title)
		}
		if code, is := strings.CutPrefix(line, "       "); here && title != "" && is {
			g.steps[title] += code
		}
	}
	if len(g.titles) < 2 {
		t.Fatalf("docs/migration.md has no steps below %q", heading)
	}
	g.variables = g.steps[g.titles[0]]
	g.done = slices.Clone(g.titles[:1])
	return g
}

// workplace returns a directory with everything that the commands of docs/migration.md name: the
// chart, a values.yaml, and fakes of NVIDIA's charts. helm prefers a directory to a repository of
// that name.
func (w *world) workplace(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	neighbours := filepath.Join(w.root, "test", "e2e", "testdata", "neighbours")
	for link, target := range map[string]string{
		"deployments":                  filepath.Join(w.root, "deployments"),
		"nvidia/dra-driver-nvidia-gpu": filepath.Join(neighbours, "dra-driver-nvidia-gpu"),
		"nvidia/gpu-operator":          filepath.Join(neighbours, "gpu-operator"),
		"nvdp/nvidia-device-plugin":    filepath.Join(neighbours, "nvidia-device-plugin"),
	} {
		link = filepath.Join(dir, link)
		if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(target, link); err != nil {
			t.Fatal(err)
		}
	}
	values := map[string]any{}
	content, err := os.ReadFile(clusterharness.Values(w.root))
	if err == nil {
		err = yaml.Unmarshal(content, &values)
	}
	if err != nil {
		t.Fatal(err)
	}
	delete(values, "mig") // use the chart's default, unlike the other suites
	if content, err = yaml.Marshal(values); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "values.yaml"), content, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// do runs the commands of the step with this title.
func (g *guide) do(title string) {
	g.t.Helper()
	if !slices.Contains(g.titles, title) {
		g.t.Fatalf("the guide has no step %q; its steps are %q", title, g.titles)
	}
	g.done = append(g.done, title)
	g.shell(g.dir, g.variables+g.steps[title])
}

// complete fails the test unless it has run every step of the guide, in the guide's order.
func (g *guide) complete() {
	g.t.Helper()
	if done := slices.Compact(g.done); !slices.Equal(done, g.titles) {
		g.t.Errorf("the test ran the steps %q, the guide has %q", done, g.titles)
	}
}

// shell runs a script in dir with the cluster's helm and kubectl, as an administrator would type
// it.
func (g *guide) shell(dir, script string) {
	g.t.Helper()
	bin := g.t.TempDir()
	for _, program := range []string{"helm", "kubectl"} {
		path, err := g.Programs().Path(program)
		if err == nil {
			err = os.Symlink(path, filepath.Join(bin, program))
		}
		if err != nil {
			g.t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(g.t.Context(), "bash", "-euo", "pipefail", "-c", script)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "KUBECONFIG="+g.Kubeconfig(), "PATH="+bin+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	if err != nil {
		g.t.Fatalf("%v\n%s\n%s\nplugins:\n%s", err, script, out, g.pluginLogs(g.t))
	}
}
