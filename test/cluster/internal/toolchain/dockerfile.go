package toolchain

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/image"
)

// Dockerfile is an image to be built from a Dockerfile whose base images are the build arguments BUILDER and BASE.
//
// Both are local stand-ins, so that no registry is needed. BUILDER has this host's Go, C compiler and libraries, and its module and build
// caches, mounted while the build runs, so that nothing is compiled twice. BASE has the host's glibc and nothing else.
type Dockerfile struct {
	// Path is the Dockerfile; its folder is the build context.
	Path string
	// Tag is the full name of the image.
	Tag string
	// Arguments are further build arguments.
	Arguments map[string]string
}

const (
	builderBase = "localhost/builder-base"
	glibcBase   = "localhost/glibc-base"
)

// BuildDockerfile builds the image unless it has been built from the same inputs, and returns its docker archive. runc runs the
// steps of the build.
func (c *Cache) BuildDockerfile(ctx context.Context, wanted Dockerfile, runc string, progress *Progress) (string, error) {
	dir := filepath.Dir(wanted.Path)
	identity, err := goIdentity(ctx, dir)
	if err != nil {
		return "", err
	}
	inputs, err := contextFiles(wanted.Path)
	if err != nil {
		return "", err
	}
	digest, err := hashRelative(dir, append(inputs, wanted.Path)...)
	if err != nil {
		return "", err
	}
	libraries, err := glibcFiles()
	if err != nil {
		return "", err
	}
	libraryIdentity, err := identify(libraries)
	if err != nil {
		return "", err
	}
	parts := []string{identity, digest, libraryIdentity, wanted.Tag}
	for _, name := range slices.Sorted(maps.Keys(wanted.Arguments)) {
		parts = append(parts, name+"="+wanted.Arguments[name])
	}
	built, err := c.Ensure(ctx, "dockerfile", Key(parts...), func(out string) error {
		start := time.Now()
		progress.Printf("building image %s from %s", wanted.Tag, wanted.Path)
		if err := c.runBuildah(ctx, wanted, runc, libraries, out, progress); err != nil {
			return err
		}
		progress.Printf("built image %s in %s", wanted.Tag, time.Since(start).Round(time.Second/10))
		return nil
	})
	return filepath.Join(built, "image.tar"), err
}

// contextFiles lists the files that a Dockerfile copies from its context.
func contextFiles(dockerfile string) ([]string, error) {
	content, err := os.ReadFile(dockerfile)
	if err != nil {
		return nil, fmt.Errorf("read the Dockerfile: %w", err)
	}
	var files []string
	for _, source := range copiedSources(string(content)) {
		matches, err := filepath.Glob(filepath.Join(filepath.Dir(dockerfile), source))
		if err != nil || len(matches) == 0 {
			return nil, fmt.Errorf("%s copies %q, which the context does not have", dockerfile, source)
		}
		for _, match := range matches {
			err := filepath.WalkDir(match, func(path string, entry fs.DirEntry, err error) error {
				if err == nil && entry.Type().IsRegular() {
					files = append(files, path)
				}
				return err
			})
			if err != nil {
				return nil, fmt.Errorf("list what %s copies: %w", dockerfile, err)
			}
		}
	}
	return files, nil
}

// copiedSources returns the sources of COPY and ADD instructions that are not copied from another stage.
func copiedSources(dockerfile string) []string {
	var sources []string
	for _, line := range strings.Split(strings.ReplaceAll(dockerfile, "\\\n", " "), "\n") {
		fields := strings.Fields(line)
		if len(fields) < 3 || (!strings.EqualFold(fields[0], "COPY") && !strings.EqualFold(fields[0], "ADD")) {
			continue
		}
		fields = fields[1:]
		otherStage := false
		for len(fields) > 0 && strings.HasPrefix(fields[0], "--") {
			otherStage = otherStage || strings.HasPrefix(fields[0], "--from=")
			fields = fields[1:]
		}
		if !otherStage && len(fields) > 1 {
			sources = append(sources, fields[:len(fields)-1]...)
		}
	}
	return sources
}

// buildah is one use of the image builder with a storage of its own, which goes when the build is over.
type buildah struct {
	program, libraries, storage, policy, runc string
}

func (c *Cache) runBuildah(ctx context.Context, wanted Dockerfile, runc string, libraries []library, out string, progress *Progress) error {
	root, err := c.unpackDebian(ctx, progress, "buildah")
	if err != nil {
		return err
	}
	storage, err := os.MkdirTemp(c.Dir, ".partial-dockerfile-storage-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(storage)
	libraryDirs, err := filepath.Glob(filepath.Join(root, "usr/lib/*-linux-gnu*"))
	if err != nil {
		return err
	}
	builder := buildah{
		program: filepath.Join(root, "usr/bin/buildah"), libraries: strings.Join(libraryDirs, ":"), storage: storage,
		policy: filepath.Join(storage, "policy.json"), runc: runc,
	}
	if err := os.WriteFile(builder.policy, []byte(`{"default":[{"type":"insecureAcceptAnything"}]}`), 0o600); err != nil {
		return err
	}
	if err := builder.importBases(ctx, libraries); err != nil {
		return err
	}
	arguments, err := builder.budArguments(ctx, wanted)
	if err != nil {
		return err
	}
	if err := builder.bud(ctx, progress, arguments); err != nil {
		return err
	}
	_, err = builder.run(ctx, "push", "--signature-policy", builder.policy, wanted.Tag, "docker-archive:"+filepath.Join(out, "image.tar")+":"+wanted.Tag)
	return err
}

// budArguments runs the build's steps with the cluster's own runc, and with the host's network, for Go modules that are not there yet.
func (b buildah) budArguments(ctx context.Context, wanted Dockerfile) ([]string, error) {
	settings, err := goSettings(ctx, filepath.Dir(wanted.Path))
	if err != nil {
		return nil, err
	}
	arguments := []string{
		"bud", "--signature-policy", b.policy, "--pull-never", "--isolation", "oci", "--runtime", b.runc, "--network", "host", "--timestamp", "0",
		"--format", "docker", "--file", wanted.Path, "--tag", wanted.Tag,
		"--build-arg", "BUILDER=" + builderBase, "--build-arg", "BASE=" + glibcBase,
		"--build-arg", "GOPROXY=" + settings["GOPROXY"], "--build-arg", "GOMODCACHE=" + settings["GOMODCACHE"], "--build-arg", "GOCACHE=" + settings["GOCACHE"],
	}
	for _, name := range slices.Sorted(maps.Keys(wanted.Arguments)) {
		arguments = append(arguments, "--build-arg", name+"="+wanted.Arguments[name])
	}
	volumes := []string{settings["GOROOT"] + ":/usr/local/go:ro", settings["GOMODCACHE"] + ":" + settings["GOMODCACHE"], settings["GOCACHE"] + ":" + settings["GOCACHE"]}
	for _, dir := range toolchainDirs {
		if info, err := os.Lstat(dir); err == nil && info.IsDir() {
			volumes = append(volumes, dir+":"+dir+":ro")
		}
	}
	for _, volume := range volumes {
		arguments = append(arguments, "--volume", volume)
	}
	return append(arguments, filepath.Dir(wanted.Path)), nil
}

// toolchainDirs are the host's folders that hold its C compiler, libraries and certificates.
var toolchainDirs = []string{"/usr/bin", "/usr/include", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/share/ca-certificates", "/etc/ssl", "/etc/alternatives"}

func goSettings(ctx context.Context, dir string) (map[string]string, error) {
	cmd := exec.CommandContext(ctx, "go", "env", "-json", "GOROOT", "GOMODCACHE", "GOCACHE", "GOPROXY")
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("ask Go for its folders: %w", err)
	}
	settings := map[string]string{}
	if err := json.Unmarshal(out, &settings); err != nil {
		return nil, fmt.Errorf("ask Go for its folders: %w", err)
	}
	for _, name := range []string{"GOMODCACHE", "GOCACHE"} {
		if err := os.MkdirAll(settings[name], 0o755); err != nil {
			return nil, err
		}
	}
	return settings, nil
}

// importBases puts the stand-ins for base images into the builder's storage.
func (b buildah) importBases(ctx context.Context, libraries []library) error {
	builder := baseLayout()
	base := baseLayout()
	for _, library := range libraries {
		base.File(library.image, library.host)
	}
	for name, content := range map[string]*image.Image{builderBase: builder, glibcBase: base} {
		archive := filepath.Join(b.storage, filepath.Base(name)+".tar")
		if err := writeImage(content, archive, name+":latest"); err != nil {
			return err
		}
		id, err := b.run(ctx, "pull", "--quiet", "--signature-policy", b.policy, "oci-archive:"+archive)
		if err != nil {
			return err
		}
		if _, err := b.run(ctx, "tag", strings.TrimSpace(id), name); err != nil {
			return err
		}
	}
	return nil
}

// run returns what buildah printed to standard output.
func (b buildah) run(ctx context.Context, arguments ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	err := b.runTo(ctx, &stdout, &stderr, arguments)
	if err != nil {
		return "", fmt.Errorf("%w\n%s", err, stderr.String())
	}
	return stdout.String(), nil
}

// bud builds, prints the steps as they begin, and returns an error with what was said, less the warnings that are of no consequence.
func (b buildah) bud(ctx context.Context, progress *Progress, arguments []string) error {
	reader, writer := io.Pipe()
	said := make(chan string, 1)
	go func() {
		var text strings.Builder
		lines := bufio.NewScanner(reader)
		for lines.Scan() {
			line := lines.Text()
			if strings.Contains(line, "STEP ") {
				progress.Printf("%s", line)
			}
			if !strings.Contains(line, "level=warning") {
				text.WriteString(line + "\n")
			}
		}
		_, _ = io.Copy(io.Discard, reader) // a line too long for the scanner must not stop the builder
		said <- text.String()
	}()
	err := b.runTo(ctx, writer, writer, arguments)
	writer.Close()
	if text := <-said; err != nil {
		return fmt.Errorf("%w\n%s", err, text)
	}
	return nil
}

func (b buildah) runTo(ctx context.Context, stdout, stderr io.Writer, arguments []string) error {
	global := []string{"--root", filepath.Join(b.storage, "root"), "--runroot", filepath.Join(b.storage, "run"), "--storage-driver", "vfs"}
	cmd := exec.CommandContext(ctx, b.program, append(global, arguments...)...)
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+b.libraries, "TMPDIR="+b.storage)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("buildah %s: %w", arguments[0], err)
	}
	return nil
}
