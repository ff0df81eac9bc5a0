package toolchain

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// moduleChange is a module of which a tool is built with some text taken out: how a bug costs is seen by what is built without it.
type moduleChange struct {
	module string
	// files each have the text exactly once; another version of the module, in which they do not, is an error and not a tool with nothing changed.
	files []string
	text  string
}

// eachNodesOwnCounters makes kube-scheduler 1.36 gather only what lies on the node that it looks at, as 1.37 does: 1.36 also takes the counters of all other
// nodes there, finds that their pools lack the devices, and looks for these among all slices of the cluster
// (https://github.com/kubernetes/kubernetes/pull/138917).
var eachNodesOwnCounters = moduleChange{
	module: "k8s.io/dynamic-resource-allocation",
	files:  []string{"structured/internal/incubating/allocator_incubating.go", "structured/internal/experimental/allocator_experimental.go"},
	text:   " || len(slice.Spec.SharedCounters) > 0",
}

// key stands for the change among the inputs of an artifact.
func (m *moduleChange) key() string {
	if m == nil {
		return ""
	}
	return strings.Join(append([]string{m.module, m.text}, m.files...), " ")
}

// copyChanged puts a changed copy of the module into dir, and the go.mod and go.sum beside it with which main is built from that copy. It returns that go.mod.
func (m *moduleChange) copyChanged(ctx context.Context, main, dir string) (modfile string, err error) {
	original, err := moduleDir(ctx, main, m.module)
	if err != nil {
		return "", err
	}
	changed := filepath.Join(dir, "module")
	if err := os.CopyFS(changed, os.DirFS(original)); err != nil {
		return "", fmt.Errorf("copy module %s: %w", m.module, err)
	}
	for _, file := range m.files {
		if err := takeOut(filepath.Join(changed, file), m.text); err != nil {
			return "", fmt.Errorf("change module %s: %w", m.module, err)
		}
	}
	for _, file := range []string{"go.mod", "go.sum"} {
		content, err := os.ReadFile(filepath.Join(main, file))
		if err != nil {
			return "", err
		}
		if err := os.WriteFile(filepath.Join(dir, file), content, 0o600); err != nil {
			return "", err
		}
	}
	modfile = filepath.Join(dir, "go.mod")
	edit := exec.CommandContext(ctx, "go", "mod", "edit", "-replace="+m.module+"="+changed, modfile)
	if output, err := edit.CombinedOutput(); err != nil {
		return "", fmt.Errorf("replace module %s in %s: %w: %s", m.module, modfile, err, output)
	}
	return modfile, nil
}

// takeOut removes text from a file that has it once. Files of Go's module cache are read-only, and so are their copies.
func takeOut(path, text string) error {
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if n := strings.Count(string(content), text); n != 1 {
		return fmt.Errorf("%s has %q %d times, want once: is this version still in need of the change?", path, text, n)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(strings.Replace(string(content), text, "", 1)), 0o600)
}

// moduleDir downloads a module, if need be, and says where its files are.
func moduleDir(ctx context.Context, main, module string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", module)
	cmd.Dir, cmd.Env = main, append(os.Environ(), "GOWORK=off", "GOFLAGS=")
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("download module %s: %w", module, err)
	}
	var found struct{ Dir string }
	if err := json.Unmarshal(out, &found); err != nil {
		return "", fmt.Errorf("download module %s: %w", module, err)
	}
	return found.Dir, nil
}
