package toolchain

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/cgroup"
)

// buildah runs the program buildah, which builds images. Each value has image storage of its own,
// which is removed after the build.
type buildah struct {
	program, libraries, storage, policy, runc string
}

func (c *Cache) runBuildah(ctx context.Context, wanted Dockerfile, runc, out string, progress *Progress) error {
	root, err := c.unpackDebian(ctx, progress, "buildah")
	if err != nil {
		return err
	}
	storage, err := os.MkdirTemp(c.Dir, ".partial-dockerfile-storage-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(storage) }()
	if err := clearBuildCgroups(ctx); err != nil {
		return err
	}
	defer func() { _ = clearBuildCgroups(context.WithoutCancel(ctx)) }() // if this fails, the next build tries again
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
	if err := builder.importBase(ctx); err != nil {
		return err
	}
	arguments, err := builder.budArguments(ctx, wanted)
	if err != nil {
		return err
	}
	if err := builder.bud(ctx, progress, arguments); err != nil {
		return err
	}
	_, err = builder.run(
		ctx,
		"push",
		"--signature-policy",
		builder.policy,
		wanted.Tag,
		"docker-archive:"+filepath.Join(out, "image.tar")+":"+wanted.Tag,
	)
	return err
}

// budArguments returns the arguments of "buildah bud". The build's steps run with the cluster's own
// runc, and use the host's network to download missing Go modules.
func (b buildah) budArguments(ctx context.Context, wanted Dockerfile) ([]string, error) {
	settings, err := goSettings(ctx, filepath.Dir(wanted.Path))
	if err != nil {
		return nil, err
	}
	arguments := []string{
		"bud", "--signature-policy", b.policy, "--pull-never", "--isolation", "oci", "--runtime", b.runc, "--cgroup-parent", "/" + buildCgroup,
		"--network", "host", "--timestamp", "0",
		"--format", "docker", "--file", wanted.Path, "--tag", wanted.Tag,
		"--build-arg", "BUILDER=" + BuilderBase,
		"--build-arg", "GOPROXY=" + settings["GOPROXY"], "--build-arg", "GOMODCACHE=" + settings["GOMODCACHE"], "--build-arg", "GOCACHE=" +
			settings["GOCACHE"],
	}
	for _, name := range slices.Sorted(maps.Keys(wanted.Arguments)) {
		arguments = append(arguments, "--build-arg", name+"="+wanted.Arguments[name])
	}
	volumes := []string{
		settings["GOROOT"] + ":/usr/local/go:ro",
		settings["GOMODCACHE"] + ":" + settings["GOMODCACHE"],
		settings["GOCACHE"] + ":" + settings["GOCACHE"],
	}
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
var toolchainDirs = []string{
	"/usr/bin",
	"/usr/include",
	"/usr/lib",
	"/usr/lib32",
	"/usr/lib64",
	"/usr/libexec",
	"/usr/share/ca-certificates",
	"/etc/ssl",
	"/etc/alternatives",
}

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

// importBase puts an almost empty image into the builder's storage, under the name that the build
// argument BUILDER gives for the base image.
func (b buildah) importBase(ctx context.Context) error {
	archive := filepath.Join(b.storage, filepath.Base(BuilderBase)+".tar")
	if err := writeImage(baseLayout(), archive, BuilderBase+":latest"); err != nil {
		return err
	}
	id, err := b.run(ctx, "pull", "--quiet", "--signature-policy", b.policy, "oci-archive:"+archive)
	if err != nil {
		return err
	}
	_, err = b.run(ctx, "tag", strings.TrimSpace(id), BuilderBase)
	return err
}

// run runs buildah and returns its standard output.
func (b buildah) run(ctx context.Context, arguments ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	err := b.runTo(ctx, &stdout, &stderr, arguments)
	if err != nil {
		return "", fmt.Errorf("%w\n%s", err, stderr.String())
	}
	return stdout.String(), nil
}

// bud runs "buildah bud" and prints each step as it begins. On failure the error has buildah's
// output without its warnings.
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
	_ = writer.Close()
	if text := <-said; err != nil {
		return fmt.Errorf("%w\n%s", err, text)
	}
	return nil
}

// buildCgroup is the cgroup in which the RUN instructions of a Dockerfile run. Only one Dockerfile
// builds at a time, so one name is enough.
const buildCgroup = "gpu-dra-driver-build"

// clearBuildCgroups removes the cgroups of this build, or those that a killed build left.
func clearBuildCgroups(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, cleanupTimeout)
	defer cancel()
	hierarchies, err := filepath.Glob(filepath.Join(cgroup.Root, "*", buildCgroup))
	if err != nil {
		return err
	}
	return cgroup.Destroy(ctx, append(hierarchies, filepath.Join(cgroup.Root, buildCgroup)))
}

// cleanupTimeout bounds the removal of a build's leftovers.
const cleanupTimeout = 30 * time.Second

func (b buildah) runTo(ctx context.Context, stdout, stderr io.Writer, arguments []string) error {
	global := []string{"--root", filepath.Join(b.storage, "root"), "--runroot", filepath.Join(b.storage, "run"), "--storage-driver", "vfs"}
	// In its own PID namespace, buildah and its children die when unshare is killed. In its own mount
	// namespace, its mounts vanish with it. Otherwise a later removal of the storage could delete the
	// mounted host files.
	isolated := []string{"--mount", "--pid", "--fork", "--kill-child", "--mount-proc", b.program}
	cmd := exec.CommandContext(ctx, "unshare", slices.Concat(isolated, global, arguments)...)
	// The kernel sends Pdeathsig when the thread that started the child ends. LockOSThread keeps that
	// thread alive until the child has ended.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+b.libraries, "TMPDIR="+b.storage)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("buildah %s: %w", arguments[0], err)
	}
	return nil
}
