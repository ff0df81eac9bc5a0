package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2/content"
)

// binfmtInNamespaces is the first version of Linux with binfmt_misc in user namespaces.
var binfmtInNamespaces = [2]int{6, 7}

// emulate runs a program in a root folder, and emulates arm64 for it and for its children. The
// kernel starts the emulator in a user namespace of the call's own, so the machine stays as it is.
const emulate = `
mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
printf %s ':arm64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:` +
	`\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:'"$QEMU:F" >/proc/sys/fs/binfmt_misc/register
mkdir -p "$1/proc"
mount -t proc proc "$1/proc"
exec chroot "$@"`

// inEmulator returns a command that runs a program for arm64 in a root folder. It skips the test
// where that is not possible.
func inEmulator(t *testing.T, root string, words ...string) *exec.Cmd {
	t.Helper()
	raw, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	if !kernelIsAtLeast(string(raw), binfmtInNamespaces) {
		t.Skipf("SKIPPED: binfmt_misc in a user namespace needs Linux 6.7 or later, and this is %s", strings.TrimSpace(string(raw)))
	}
	args := append([]string{"--user", "--map-root-user", "--mount", "--pid", "--fork", "sh", "-ec", emulate, "emulate", root}, words...)
	cmd := exec.CommandContext(t.Context(), "unshare", args...)
	cmd.Env = append(os.Environ(), "QEMU=/usr/bin/qemu-aarch64-static")
	return cmd
}

// A user unpacks the archive of kubectl-gpu and runs it. The environment names the release that
// "make test-release" has built.
func TestArchiveInstallsKubectlPlugin(t *testing.T) {
	release := os.Getenv("RELEASE")
	if release == "" {
		t.Skip("SKIPPED: RELEASE is not set (make test-release sets it)")
	}
	f, err := openFolder(t.Context(), release)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range clientPlatforms {
		t.Run(p.OS+"/"+p.Architecture, func(t *testing.T) {
			raw, err := os.ReadFile(filepath.Join(release, archiveName(f.image.tag, p)))
			if err != nil {
				t.Fatal(err)
			}
			dir := t.TempDir()
			unpackLayer(t, raw, dir)
			program := filepath.Join(dir, client)
			info, err := buildinfo.ReadFile(program)
			if err != nil {
				t.Fatal(err)
			}
			for key, want := range map[string]string{"GOOS": p.OS, "GOARCH": p.Architecture, "CGO_ENABLED": "0"} {
				if !slices.Contains(info.Settings, debug.BuildSetting{Key: key, Value: want}) {
					t.Errorf("the program was built with %v, want %s=%s", info.Settings, key, want)
				}
			}
			var cmd *exec.Cmd
			switch {
			case p.OS == runtime.GOOS && p.Architecture == runtime.GOARCH:
				cmd = exec.CommandContext(t.Context(), program, "--version")
			case p.OS == "linux" && p.Architecture == "arm64":
				cmd = inEmulator(t, dir, "/"+client, "--version")
			default:
				t.Skipf("SKIPPED: no emulator for %s/%s", p.OS, p.Architecture)
			}
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.Contains(string(out), f.image.tag) {
				t.Errorf("%v, want output with %q:\n%s", err, f.image.tag, out)
			}
		})
	}
}

// The programs of the released arm64 image run, with the C library in the image. The environment
// names what "make test-release" has built.
func TestArm64ImageRuns(t *testing.T) {
	release, simulator := os.Getenv("RELEASE"), os.Getenv("SIMULATOR")
	if release == "" || simulator == "" {
		t.Skip("SKIPPED: RELEASE and SIMULATOR are not set (make test-release sets them)")
	}
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: device nodes of simulated GPUs need root")
	}
	f, err := openFolder(t.Context(), release)
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	unpackPlatform(t, f.image, "arm64", root)
	source := filepath.Join("..", "..", "test", "nvmlsim")
	sim := filepath.Join(root, "sim")
	up := exec.CommandContext(t.Context(), filepath.Join(simulator, "nvmlsim"), "layout", "up", "--root", sim, "--kind", "container",
		"--libdir", "usr/lib/aarch64-linux-gnu", "--node", filepath.Join(source, "nodes", "l40s-x2.yaml"),
		"--models", filepath.Join(source, "models"), "--lib", filepath.Join(simulator+"-arm64", "libnvidia-ml.so.1"),
		"--dev", filepath.Join(sim, "driver", "dev"))
	if out, err := up.CombinedOutput(); err != nil {
		t.Fatalf("simulate GPUs: %v: %s", err, out)
	}
	for command, want := range map[string]string{
		"gpu-kubelet-plugin version": f.image.tag,
		"gpu-mps version":            f.image.tag,
		"nvidia-cdi-hook --version":  "NVIDIA CDI Hook",
		"gpu-kubelet-plugin inventory --driver-root=/run/nvidia/driver --driver-root-mount=/sim/driver --sysfs-root=/sim/sys " +
			"--proc-root=/sim/proc --dev-root=/sim/driver": "NVIDIA L40S",
	} {
		t.Run(command, func(t *testing.T) {
			words := strings.Fields("/usr/bin/" + command)
			out, err := inEmulator(t, root, words...).CombinedOutput()
			if err != nil || !strings.Contains(string(out), want) {
				t.Errorf("%v, want output with %q:\n%s", err, want, out)
			}
		})
	}
}

// kernelIsAtLeast compares the release of a kernel, like "6.1.0-40-amd64", with a version.
func kernelIsAtLeast(release string, version [2]int) bool {
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return false
	}
	return major > version[0] || major == version[0] && minor >= version[1]
}

func TestKernelIsAtLeast(t *testing.T) {
	for release, want := range map[string]bool{
		"6.7.0": true, "6.12.48+deb13-amd64\n": true, "7.0.1": true, "6.1.0-40-amd64": false, "5.15.0": false, "6.6.99": false, "": false,
	} {
		if got := kernelIsAtLeast(release, binfmtInNamespaces); got != want {
			t.Errorf("%q: %v, want %v", release, got, want)
		}
	}
}

// unpackPlatform unpacks the image of one architecture.
func unpackPlatform(t *testing.T, image artifact, arch, dir string) {
	t.Helper()
	platforms, err := image.platforms(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, platform := range platforms {
		if platform.Platform.Architecture != arch {
			continue
		}
		var manifest ocispec.Manifest
		if err := image.read(t.Context(), platform, &manifest); err != nil {
			t.Fatal(err)
		}
		for _, layer := range manifest.Layers {
			raw, err := content.FetchAll(t.Context(), image.store, layer)
			if err != nil {
				t.Fatal(err)
			}
			unpackLayer(t, raw, dir)
		}
		return
	}
	t.Fatalf("the image has no platform %s", arch)
}

func unpackLayer(t *testing.T, layer []byte, dir string) {
	t.Helper()
	unzipped, err := gzip.NewReader(bytes.NewReader(layer))
	if err != nil {
		t.Fatal(err)
	}
	for files := tar.NewReader(unzipped); ; {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, header.Name)
		if header.Typeflag == tar.TypeDir {
			if err := os.MkdirAll(path, 0o755); err != nil {
				t.Fatal(err)
			}
			continue
		}
		raw, err := io.ReadAll(files)
		if err != nil {
			t.Fatal(err)
		}
		write(t, path, raw)
	}
}
