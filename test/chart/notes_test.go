package chart

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// notes returns the chart's NOTES.txt as rendered for a cluster of this version. For that it
// renders a copy of the chart in which NOTES.txt is part of an object, because helm renders real
// notes only for the version of a real cluster.
func notes(t *testing.T, version string, args ...string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "chart")
	if err := os.CopyFS(dir, os.DirFS(chartDir)); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, "templates", "NOTES.txt"), filepath.Join(dir, "notes.txt")); err != nil {
		t.Fatal(err)
	}
	object := `notes: {{ tpl (.Files.Get "notes.txt") . | quote }}`
	if err := os.WriteFile(filepath.Join(dir, "templates", "notes.yaml"), []byte(object), 0o600); err != nil {
		t.Fatal(err)
	}
	args = append([]string{"template", release, dir, "--show-only", "templates/notes.yaml", "--kube-version", version}, args...)
	out, err := exec.Command(helm(t), args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out)
}

func TestNotesExplainResourceLimits(t *testing.T) {
	const may, notYet = `nvidia.com/gpu\": \"1\"`, "Not yet in this cluster"
	for name, c := range map[string]struct {
		version      string
		args         []string
		says, warned bool
	}{
		"a cluster that drops the field":    {version: "1.35.4", says: true, warned: true},
		"the same with a provider's suffix": {version: "1.35.4-gke.1000", says: true, warned: true},
		"a cluster that keeps it":           {version: "1.36.0", says: true},
		"a pre-release that keeps it":       {version: "1.36.0-rc.1", says: true},
		"another class has the resource": {
			version: "1.35.4", args: []string{"--set-json",
				`deviceClasses.migProfiles=[{"profile":"1g.10gb","extendedResourceName":"nvidia.com/gpu"}]`},
		},
		"no class has it": {version: "1.35.4", args: []string{"--set", "deviceClasses.gpu.extendedResourceName="}},
		"no class at all": {version: "1.35.4", args: []string{"--set", "deviceClasses.gpu.enabled=false"}},
	} {
		t.Run(name, func(t *testing.T) {
			got := notes(t, c.version, c.args...)
			if says, warned := strings.Contains(got, may), strings.Contains(got, notYet); says != c.says || warned != c.warned {
				t.Errorf("the notes explain limits: %t, want %t; warn of an old cluster: %t, want %t\n%s", says, c.says, warned, c.warned, got)
			}
		})
	}
}

func TestNotesSayHowToBuildUnreleasedImage(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		says string
	}{
		"the checkout's chart": {says: "make image IMAGE=REGISTRY/gpu-dra-driver:0.1.0 VERSION=0.1.0"},
		"another tag":          {args: []string{"--set", "image.tag=v7"}, says: "make image IMAGE=REGISTRY/gpu-dra-driver:v7 VERSION=v7"},
		"an own repository":    {args: []string{"--set", "image.repository=registry.example.com/gpu-dra-driver"}},
		"a released chart":     {args: []string{"--set", "image.digest=sha256:" + strings.Repeat("0", 64)}},
	} {
		t.Run(name, func(t *testing.T) {
			got := notes(t, "1.36.3", c.args...)
			if !strings.Contains(got, c.says) || (c.says == "" && strings.Contains(got, "make image")) {
				t.Errorf("want %q in the notes:\n%s", c.says, got)
			}
		})
	}
}

func TestNotesWarnAboutSlowScheduler(t *testing.T) {
	const warning = "number of nodes that publish counters"
	for name, c := range map[string]struct {
		version string
		args    []string
		warned  bool
	}{
		"a default install":  {version: "1.36.6"},
		"dynamic":            {version: "1.36.6", args: []string{"--set", "mig.policy=dynamic"}, warned: true},
		"dynamic, no shares": {version: "1.36.6", args: []string{"--set", "mig.policy=dynamic,shares=null"}, warned: true},
		"dynamic with a list, one GPU": {version: "1.35.4", args: []string{"--set-json",
			`mig.rules=[{"gpus":"0000:db:00.0","policy":"dynamic","profiles":["1g.10gb"]}]`}, warned: true},
		"adopt, with a provider's suffix": {version: "1.36.2-gke.1000", args: []string{"--set", "mig.policy=adopt"}, warned: true},
		"static":                          {version: "1.36.6", args: []string{"--set", "mig.policy=static"}},
		"shares":                          {version: "1.36.6", args: []string{"--set-json", fourShares}, warned: true},
		"fractions of one model": {version: "1.36.6", args: []string{"--set-json",
			`shares=[{"gpus":"NVIDIA A100*","kind":"fractions"}]`}, warned: true},
		"dynamic, a fast scheduler":    {version: "1.37.0", args: []string{"--set", "mig.policy=dynamic"}},
		"dynamic, a pre-release of it": {version: "1.37.0-rc.1", args: []string{"--set", "mig.policy=dynamic"}},
		"shares, a fast scheduler":     {version: "1.37.0", args: []string{"--set-json", inFractions}},
		"dynamic, a later scheduler":   {version: "1.38.1", args: []string{"--set", "mig.policy=dynamic"}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := notes(t, c.version, c.args...); strings.Contains(got, warning) != c.warned {
				t.Errorf("the notes warn: %t, want %t\n%s", !c.warned, c.warned, got)
			}
		})
	}
}
