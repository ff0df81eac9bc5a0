package toolchain

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/mod/modfile"
)

// kubernetesModule is the Go module from which the Kubernetes components are built.
const kubernetesModule = "k8s.io/kubernetes"

// releases matches those versions of kubernetesModule that are releases, not pre-releases.
var releases = regexp.MustCompile(`^v1\.[0-9]+\.[0-9]+$`)

// release returns the folder of a Go module in the cache, which builds Kubernetes' programs in the
// given version. The module's dependencies are those of Kubernetes' own go.mod. source is the
// folder of the tool module with the pinned versions.
func (c *Cache) release(ctx context.Context, source, version string, progress *Progress) (dir string, err error) {
	if !releases.MatchString(version) {
		return "", fmt.Errorf("kubernetes version %q: want one like v1.37.0", version)
	}
	const program = "kubernetes/main.go"
	main, err := os.ReadFile(filepath.Join(source, program))
	if err != nil {
		return "", err
	}
	return c.Ensure(ctx, "release", Key(version, string(main)), func(dir string) error {
		progress.Printf("downloading Kubernetes %s", version)
		original, err := downloadModule(ctx, source, kubernetesModule+"@"+version)
		if err != nil {
			return err
		}
		module, err := os.ReadFile(filepath.Join(original, "go.mod"))
		if err != nil {
			return err
		}
		if module, err = releaseModule(module, version); err != nil {
			return err
		}
		sums, err := os.ReadFile(filepath.Join(original, "go.sum"))
		if err != nil {
			return err
		}
		for file, content := range map[string][]byte{"go.mod": module, "go.sum": sums, program: main} {
			path := filepath.Join(dir, file)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				return err
			}
			if err := os.WriteFile(path, content, 0o600); err != nil {
				return err
			}
		}
		return addSums(ctx, dir)
	})
}

// releaseModule returns the go.mod of a module that builds Kubernetes' components. original is
// Kubernetes' own go.mod of that version.
//
// Kubernetes' go.mod replaces some modules by folders of its repository. The result replaces them
// by the published modules, whose v0.37.0 belongs to Kubernetes v1.37.0.
func releaseModule(original []byte, version string) ([]byte, error) {
	file, err := modfile.Parse("go.mod", original, nil)
	if err != nil {
		return nil, fmt.Errorf("read go.mod of Kubernetes %s: %w", version, err)
	}
	var folders []string
	for _, replace := range file.Replace {
		if replace.New.Version == "" {
			folders = append(folders, replace.Old.Path)
		}
	}
	for _, path := range folders {
		if err := file.AddReplace(path, "", path, "v0"+strings.TrimPrefix(version, "v1")); err != nil {
			return nil, err
		}
	}
	if err := file.AddModuleStmt("cluster.test/release"); err != nil {
		return nil, err
	}
	if err := file.AddRequire(kubernetesModule, version); err != nil {
		return nil, err
	}
	file.Cleanup()
	return file.Format()
}

// addSums downloads the dependencies of the module in dir, and adds the checksums that the module's
// go.sum lacks.
func addSums(ctx context.Context, dir string) error {
	cmd := exec.CommandContext(ctx, "go", "list", "-mod=mod", "-deps", "./...")
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOWORK=off", "GOFLAGS=")
	var complaints strings.Builder
	cmd.Stderr = &complaints
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("go %s in %s: %w\n%s", strings.Join(cmd.Args[1:], " "), dir, err, complaints.String())
	}
	return nil
}

// downloadModule downloads a module, given as PATH@VERSION, and returns its folder in Go's module
// cache.
func downloadModule(ctx context.Context, dir, module string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", module)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOWORK=off", "GOFLAGS=")
	out, err := cmd.Output()
	var found struct{ Dir, Error string }
	if failed := json.Unmarshal(out, &found); failed == nil && found.Error != "" {
		return "", fmt.Errorf("download module %s: %s", module, found.Error)
	}
	if err != nil {
		return "", fmt.Errorf("download module %s: %w", module, err)
	}
	return found.Dir, nil
}
