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

// releases matches those versions of a module that are releases, not pre-releases.
var releases = regexp.MustCompile(`^v[0-9]+\.[0-9]+\.[0-9]+$`)

// release returns the folder of a Go module in the cache, which builds the tool's programs in the
// given version. The module's dependencies are those of the tool's own go.mod. source is the folder
// of the tool module with the pinned versions.
func (c *Cache) release(ctx context.Context, source string, tool tool, version string, progress *Progress) (dir string, err error) {
	if !releases.MatchString(version) {
		return "", fmt.Errorf("%s version %q: want one like v1.37.0", tool.name, version)
	}
	files, err := tool.sources(source)
	if err != nil {
		return "", err
	}
	return c.Ensure(ctx, "release-"+tool.name, Key(version, fmt.Sprint(files)), func(dir string) error {
		progress.Printf("downloading %s %s", tool.name, version)
		original, err := downloadModule(ctx, source, tool.module+"@"+version)
		if err != nil {
			return err
		}
		module, err := os.ReadFile(filepath.Join(original, "go.mod"))
		if err != nil {
			return err
		}
		if module, err = releaseModule(module, tool.module, version); err != nil {
			return err
		}
		sums, err := os.ReadFile(filepath.Join(original, "go.sum"))
		if err != nil {
			return err
		}
		files["go.mod"], files["go.sum"] = string(module), string(sums)
		for file, content := range files {
			path := filepath.Join(dir, file)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				return err
			}
			if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
				return err
			}
		}
		return addSums(ctx, dir, tool.packages)
	})
}

// sources returns the sources of the tool's programs that are in the tool module itself. source is
// the module's folder.
func (t tool) sources(source string) (map[string]string, error) {
	files := map[string]string{}
	if t.module == kubernetesModule {
		const program = "kubernetes/main.go"
		main, err := os.ReadFile(filepath.Join(source, program))
		if err != nil {
			return nil, err
		}
		files[program] = string(main)
	}
	return files, nil
}

// releaseModule returns the go.mod of a module that builds the programs of the module path in this
// version. original is its own go.mod.
//
// Kubernetes' go.mod replaces some modules by folders of its repository. The result replaces them
// by the published modules, whose v0.37.0 belongs to Kubernetes v1.37.0.
func releaseModule(original []byte, path, version string) ([]byte, error) {
	file, err := modfile.Parse("go.mod", original, nil)
	if err != nil {
		return nil, fmt.Errorf("read go.mod of %s %s: %w", path, version, err)
	}
	var folders []string
	for _, replace := range file.Replace {
		if replace.New.Version == "" {
			folders = append(folders, replace.Old.Path)
		}
	}
	for _, folder := range folders {
		if err := file.AddReplace(folder, "", folder, "v0"+strings.TrimPrefix(version, "v1")); err != nil {
			return nil, err
		}
	}
	if err := file.AddModuleStmt("cluster.test/release"); err != nil {
		return nil, err
	}
	if err := file.AddRequire(path, version); err != nil {
		return nil, err
	}
	file.Cleanup()
	return file.Format()
}

// addSums downloads the dependencies of these packages of the module in dir, and adds the checksums
// that the module's go.sum lacks.
func addSums(ctx context.Context, dir string, packages []string) error {
	cmd := exec.CommandContext(ctx, "go", append([]string{"list", "-mod=mod", "-deps"}, packages...)...)
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
