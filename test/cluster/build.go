package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/machine"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/toolchain"
)

// TestImage is the full name of a container image that Up loads on every node. It has a shell with
// the usual commands, and glibc.
const TestImage = toolchain.TestImage

// EmptyImage is the base image that [BuildImage] offers to a Dockerfile. In the finished image it
// has folders and no files.
const EmptyImage = toolchain.BuilderBase

// Programs are the built programs that a cluster runs. The cluster stores their paths on disk when
// it starts. So a running cluster keeps its programs, even if the checkout changes.
type Programs struct {
	CacheDir string             `json:"cacheDir"`
	Paths    toolchain.Programs `json:"paths"`
	Machine  string             `json:"machine"`
	Images   []string           `json:"images"`
}

// Build builds everything that a cluster needs and that is not in the cache yet; with a warm cache
// it takes well under a second. Only the versions of the options matter. The working directory must
// be in a checkout of this project.
func Build(ctx context.Context, options Options, output io.Writer) (*Programs, error) {
	versions, err := options.versions()
	if err != nil {
		return nil, err
	}
	source, cache, err := findBuild()
	if err != nil {
		return nil, err
	}
	progress := toolchain.NewProgress(output)
	built := &Programs{CacheDir: cache.Dir}
	if built.Paths, err = cache.BuildTools(ctx, source, versions, progress); err != nil {
		return nil, err
	}
	if built.Machine, err = cache.BuildMachine(ctx, source, progress); err != nil {
		return nil, err
	}
	if built.Images, err = cache.BuildImages(ctx, source, progress); err != nil {
		return nil, err
	}
	return built, nil
}

// BuildProgram builds the named program, and the others that come from the same build, and returns
// the program's path. A test that needs helm but no cluster calls it, for example. Only the
// versions of the options matter.
func BuildProgram(ctx context.Context, program string, options Options, output io.Writer) (string, error) {
	versions, err := options.versions()
	if err != nil {
		return "", err
	}
	return buildProgram(ctx, program, versions, output)
}

// BuildNvidiaCTK builds nvidia-ctk of the NVIDIA Container Toolkit, which no cluster runs, in this
// version. Empty means the version that tools/nvidia-ctk/go.mod pins.
func BuildNvidiaCTK(ctx context.Context, version string, output io.Writer) (string, error) {
	return buildProgram(ctx, "nvidia-ctk", toolchain.Versions{ContainerToolkit: version}, output)
}

func buildProgram(ctx context.Context, program string, versions toolchain.Versions, output io.Writer) (string, error) {
	source, cache, err := findBuild()
	if err != nil {
		return "", err
	}
	paths, err := cache.BuildTools(ctx, source, versions, toolchain.NewProgress(output), program)
	if err != nil {
		return "", err
	}
	return (&Programs{Paths: paths}).Path(program)
}

// Path returns the path of a program on the host. program is kubectl, helm, ctr, runc, etcd,
// kubelet, containerd, ….
func (p *Programs) Path(program string) (string, error) {
	if path, ok := p.Paths[program]; ok {
		return path, nil
	}
	return "", fmt.Errorf("a cluster has no program called %q; it has %s", program, strings.Join(slices.Sorted(maps.Keys(p.Paths)), ", "))
}

// inMachine returns the path under which the cluster's machines see the program. A machine is a
// process tree with its own namespaces (see package internal/machine).
func (p *Programs) inMachine(program string) (string, error) {
	path, err := p.Path(program)
	if err != nil {
		return "", err
	}
	return machine.ToolsDir + strings.TrimPrefix(path, p.CacheDir), nil
}

func findBuild() (source string, cache *toolchain.Cache, err error) {
	if source, err = findSource(); err != nil {
		return "", nil, err
	}
	cache, err = toolchain.DefaultCache()
	return source, cache, err
}

// findSource returns the folder test/cluster of the checkout around the working directory.
func findSource() (string, error) {
	start, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		content, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && bytes.HasPrefix(content, []byte("module github.com/gpu-dra-driver/gpu-dra-driver\n")) {
			return filepath.Join(dir, "test", "cluster"), nil
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("find the checkout: %w", err)
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("find the checkout of gpu-dra-driver: %s is not inside one; run this from there", start)
		}
	}
}

// ImageBuild is an image build from a Dockerfile whose base image is the build argument BUILDER:
// this host's Go and C toolchain with its caches.
type ImageBuild struct {
	// Dockerfile is the path of the Dockerfile. The folder that holds it is the build context.
	Dockerfile string
	// Tag is the full name of the image, say localhost/gpu-dra-driver:dev.
	Tag string
	// Arguments are the build arguments in addition to BUILDER, by name.
	Arguments map[string]string
}

// BuildImage builds the image without a registry or a container engine, and returns the path of the
// image archive, for LoadImage or Options.Images. If the same inputs were built before, it returns
// that archive.
func BuildImage(ctx context.Context, build ImageBuild, output io.Writer) (archive string, err error) {
	runc, err := BuildProgram(ctx, "runc", Options{}, output)
	if err != nil {
		return "", err
	}
	cache, err := toolchain.DefaultCache()
	if err != nil {
		return "", err
	}
	dockerfile, err := filepath.Abs(build.Dockerfile)
	if err != nil {
		return "", err
	}
	wanted := toolchain.Dockerfile{Path: dockerfile, Tag: build.Tag, Arguments: build.Arguments}
	return cache.BuildDockerfile(ctx, wanted, runc, toolchain.NewProgress(output))
}
