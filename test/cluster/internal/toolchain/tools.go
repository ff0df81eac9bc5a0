package toolchain

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/modfile"
)

// tool is an artifact in the cache: programs that are built from the tool module or from this
// repository's module.
type tool struct {
	name     string
	programs []string // names of the programs that the tool provides
	packages []string
	module   string // Go module whose version is the tool's version
	own      string // folder of a tool module of its own, in that of the others, or empty
	tags     string
	ldflags  func(version string) string // nil means stripped
	links    []string                    // names of links to the binary, if one serves as all programs
	seccomp  bool                        // whether its C code needs libseccomp
	cgo      bool                        // whether it has C code
	extra    bool                        // whether no cluster runs it
}

const stripped = "-s -w"

const toolkitModule = "github.com/NVIDIA/nvidia-container-toolkit"

// tools are built in this order. Kubernetes, the longest compilation, comes first, because the
// others use many of the same packages.
var tools = []tool{
	{
		name: "kubernetes", programs: []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl"},
		packages: []string{"./kubernetes"}, module: kubernetesModule, ldflags: kubernetesVersionFlags,
		links: []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl"},
	},
	containerdTool("github.com/containerd/containerd/v2"),
	{
		name:     "etcd",
		programs: []string{"etcd"},
		packages: []string{"go.etcd.io/etcd/server/v3"},
		module:   "go.etcd.io/etcd/server/v3",
		links:    []string{"etcd"},
	},
	{
		name: "cni", programs: []string{"bridge", "host-local", "loopback"},
		packages: []string{
			"github.com/containernetworking/plugins/plugins/main/bridge",
			"github.com/containernetworking/plugins/plugins/ipam/host-local",
			"github.com/containernetworking/plugins/plugins/main/loopback",
		},
		module: "github.com/containernetworking/plugins",
	},
	{
		name: "runc", programs: []string{"runc"}, packages: []string{"github.com/opencontainers/runc"}, module: "github.com/opencontainers/runc",
		tags: "seccomp netgo osusergo", ldflags: func(string) string { return stripped + " -extldflags -static" }, seccomp: true,
	},
	{name: "helm", programs: []string{"helm"}, packages: []string{"helm.sh/helm/v4/cmd/helm"}, module: "helm.sh/helm/v4"},
	{
		name: "nvidia-ctk", programs: []string{"nvidia-ctk"}, packages: []string{toolkitModule + "/cmd/nvidia-ctk"}, module: toolkitModule,
		own: "nvidia-ctk", cgo: true, extra: true,
	},
}

// containerdTool builds containerd from this Go module, whose path has its major version. Its tool
// module is its own, because containerd 2.3 does not compile with Kubernetes 1.37's cri-api.
func containerdTool(module string) tool {
	programs := []string{"containerd", "containerd-shim-runc-v2", "ctr"}
	t := tool{name: "containerd", programs: programs, module: module, own: "containerd"}
	for _, program := range programs {
		t.packages = append(t.packages, module+"/cmd/"+program)
	}
	t.ldflags = func(version string) string { return stripped + " -X " + module + "/version.Version=" + version }
	return t
}

func kubernetesVersionFlags(version string) string {
	major, rest, _ := strings.Cut(strings.TrimPrefix(version, "v"), ".")
	minor, _, _ := strings.Cut(rest, ".")
	flags := stripped
	for _, pkg := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		flags += fmt.Sprintf(
			" -X %[1]s.gitVersion=%[2]s -X %[1]s.gitMajor=%[3]s -X %[1]s.gitMinor=%[4]s -X %[1]s.gitTreeState=clean",
			pkg,
			version,
			major,
			minor,
		)
	}
	return flags
}

// PinnedKubernetes and PinnedContainerd are the versions that the tool modules pin.
const (
	PinnedKubernetes = "v1.37.2"
	PinnedContainerd = "v2.3.7"
)

// Versions select the versions of Kubernetes', containerd's and the NVIDIA Container Toolkit's
// programs, like v1.37.2. Empty means the version that a tool module pins.
type Versions struct{ Kubernetes, Containerd, ContainerToolkit string }

// of returns the wanted version of a tool's programs. Empty means the pinned one.
func (v Versions) of(tool tool) string {
	switch tool.name {
	case "kubernetes":
		return v.Kubernetes
	case "containerd":
		return v.Containerd
	case "nvidia-ctk":
		return v.ContainerToolkit
	}
	return ""
}

// Programs maps the names of built programs to their paths.
type Programs map[string]string

// BuildTools builds the tools that provide the named programs and are not in the cache. Without
// names it builds all tools of a cluster. source is the folder of this repository's test/cluster.
func (c *Cache) BuildTools(
	ctx context.Context, source string, versions Versions, progress *Progress, names ...string,
) (Programs, error) {
	pinned := filepath.Join(source, "tools")
	identity, err := goIdentity(ctx, pinned)
	if err != nil {
		return nil, err
	}
	built := Programs{}
	for _, tool := range tools {
		if !tool.wanted(names) {
			continue
		}
		wanted := versions.of(tool)
		if tool.name == "containerd" && strings.HasPrefix(wanted, "v1.") {
			tool = containerdTool("github.com/containerd/containerd")
		}
		module, err := c.moduleOf(ctx, tool, filepath.Join(pinned, tool.own), wanted, progress)
		if err != nil {
			return nil, err
		}
		key, err := tool.key(identity, module)
		if err != nil {
			return nil, err
		}
		dir, err := c.Ensure(ctx, tool.name, key, func(dir string) error { return c.buildTool(ctx, tool, module, dir, progress) })
		if err != nil {
			return nil, err
		}
		for _, program := range tool.programs {
			built[program] = filepath.Join(dir, program)
		}
	}
	return built, nil
}

// moduleOf returns the folder of the module that a tool is built from. That is the folder pinned,
// or a module in the cache if another version is wanted. An empty version means the pinned one.
func (c *Cache) moduleOf(ctx context.Context, tool tool, pinned, version string, progress *Progress) (string, error) {
	if version == "" {
		return pinned, nil
	}
	if has, err := moduleVersion(pinned, tool.module); err == nil && has == version {
		return pinned, nil
	}
	return c.release(ctx, pinned, tool, version, progress)
}

// wanted reports whether the tool provides one of the named programs. If names is empty, it is true
// for every tool of a cluster.
func (t tool) wanted(names []string) bool {
	return len(names) == 0 && !t.extra || slices.ContainsFunc(t.programs, func(program string) bool { return slices.Contains(names, program) })
}

// key returns the tool's cache key over all inputs of its build. identity names the Go toolchain,
// and module is the folder of the module to build from.
func (t tool) key(identity, module string) (string, error) {
	inputs, err := goSources(module)
	if err != nil {
		return "", err
	}
	digest, err := hashRelative(module, append(inputs, filepath.Join(module, "go.mod"), filepath.Join(module, "go.sum"))...)
	if err != nil {
		return "", err
	}
	return Key(identity, digest, t.tags, strings.Join(t.packages, " "), strings.Join(t.links, " "), t.flags("key")), nil
}

func (t tool) flags(version string) string {
	if t.ldflags == nil {
		return stripped
	}
	return t.ldflags(version)
}

func (c *Cache) buildTool(ctx context.Context, tool tool, module, dir string, progress *Progress) error {
	start := time.Now()
	version, err := moduleVersion(module, tool.module)
	if err != nil {
		return err
	}
	progress.Printf("building %s %s", tool.name, version)
	build := goBuild{
		name:     tool.name,
		dir:      module,
		packages: tool.packages,
		tags:     tool.tags,
		ldflags:  tool.flags(version),
		output:   dir + "/",
		env:      []string{"CGO_ENABLED=0"},
	}
	if tool.cgo {
		build.env = []string{"CGO_ENABLED=1"}
	}
	if tool.seccomp {
		if build.env, err = c.seccompEnvironment(ctx, progress); err != nil {
			return err
		}
	}
	if len(tool.links) > 0 {
		build.output = filepath.Join(dir, tool.name+".bin")
	}
	if err := build.run(ctx, progress); err != nil {
		return err
	}
	for _, link := range tool.links {
		if err := os.Symlink(tool.name+".bin", filepath.Join(dir, link)); err != nil {
			return err
		}
	}
	progress.Printf("built %s in %s", tool.name, time.Since(start).Round(time.Second/10))
	return nil
}

// moduleVersion returns the version of module that go.mod in dir requires.
func moduleVersion(dir, module string) (string, error) {
	path := filepath.Join(dir, "go.mod")
	content, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	file, err := modfile.Parse(path, content, nil)
	if err != nil {
		return "", err
	}
	for _, require := range file.Require {
		if require.Mod.Path == module {
			return require.Mod.Version, nil
		}
	}
	return "", fmt.Errorf("%s does not require %s", path, module)
}

// seccompEnvironment returns environment variables with which the C part of runc finds libseccomp
// in the unpacked package. They name a script to call in place of pkg-config. The real pkg-config
// may be missing, and would search the host's own folders.
func (c *Cache) seccompEnvironment(ctx context.Context, progress *Progress) ([]string, error) {
	root, err := c.unpackDebian(ctx, progress, "libseccomp-dev")
	if err != nil {
		return nil, err
	}
	archives, err := filepath.Glob(filepath.Join(root, "usr/lib/*/libseccomp.a"))
	if err != nil || len(archives) != 1 {
		return nil, fmt.Errorf("package libseccomp-dev holds %d static libraries below %s/usr/lib, want one", len(archives), root)
	}
	script := fmt.Sprintf(
		"#!/bin/sh\ncase \" $* \" in\n*' --cflags '*) echo '-I%s/usr/include' ;;\n*) echo '-L%s -lseccomp' ;;\nesac\n",
		root,
		filepath.Dir(archives[0]),
	)
	answering := filepath.Join(c.Dir, "pkg-config-libseccomp")
	if err := os.WriteFile(answering, []byte(script), 0o755); err != nil {
		return nil, fmt.Errorf("write the stand-in for pkg-config: %w", err)
	}
	return []string{"CGO_ENABLED=1", "PKG_CONFIG=" + answering}, nil
}

// hashRelative returns a digest over the files' contents and their paths relative to dir. So equal
// checkouts in different folders have equal digests.
func hashRelative(dir string, paths ...string) (string, error) {
	parts := make([]string, 0, 2*len(paths))
	for _, path := range paths {
		relative, err := filepath.Rel(dir, path)
		if err != nil {
			return "", err
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return "", fmt.Errorf("read build input: %w", err)
		}
		parts = append(parts, relative, string(content))
	}
	return Key(parts...), nil
}

// BuildMachine builds cmd/machine, the starter and first process of a cluster's machines. source is
// the folder of this repository's test/cluster.
func (c *Cache) BuildMachine(ctx context.Context, source string, progress *Progress) (string, error) {
	module := filepath.Dir(filepath.Dir(source))
	identity, err := goIdentity(ctx, module)
	if err != nil {
		return "", err
	}
	var inputs []string
	for _, dir := range []string{"cmd/machine", "internal/machine", "internal/cgroup"} {
		files, err := goSources(filepath.Join(source, dir))
		if err != nil {
			return "", err
		}
		inputs = append(inputs, files...)
	}
	digest, err := hashRelative(module, append(inputs, filepath.Join(module, "go.mod"), filepath.Join(module, "go.sum"))...)
	if err != nil {
		return "", err
	}
	dir, err := c.Ensure(ctx, "machine", Key(identity, digest), func(dir string) error {
		build := goBuild{
			name:     "machine",
			dir:      module,
			packages: []string{"./test/cluster/cmd/machine"},
			ldflags:  stripped,
			output:   dir + "/",
			env:      []string{"CGO_ENABLED=0"},
		}
		return build.run(ctx, progress)
	})
	return filepath.Join(dir, "machine"), err
}
