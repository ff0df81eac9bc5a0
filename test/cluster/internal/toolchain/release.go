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

// kubernetesModule is the module that Kubernetes' components are built from.
const kubernetesModule = "k8s.io/kubernetes"

// releases are the versions of kubernetesModule that are a release.
var releases = regexp.MustCompile(`^v1\.[0-9]+\.[0-9]+$`)

// release returns a module in the cache from which the kubernetes tool of the given version is
// built. Its dependencies are those of Kubernetes' own go.mod. source is the pinned tool module.
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

// releaseModule turns Kubernetes' own go.mod into that of a module that builds its components.
// Folders of Kubernetes' repository become the modules that are published from them, whose
// version v0.37.0 belongs to v1.37.0.
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

// addSums downloads what the module in dir needs, and adds the checksums that its go.sum lacks.
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

// downloadModule returns the folder of a module, given as PATH@VERSION, in Go's module cache.
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
