package nvidiactk

import (
	"cmp"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hostharness"
)

// toolkit is nvidia-ctk of one version in a folder with the libraries that it needs, so that it
// runs where a driver root is /. Such a root has no C library, and its /lib may be a link.
type toolkit struct {
	folder string
	loader string // the name of the dynamic linker
}

// lddLine matches a line of ldd with the path of a library or of the dynamic linker.
var lddLine = regexp.MustCompile(`(?m)(/\S+) \(0x`)

func newToolkit(t *testing.T, program string) toolkit {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "ldd", program).Output()
	if err != nil {
		t.Fatalf("ldd %s: %v", program, err)
	}
	k := toolkit{folder: t.TempDir()}
	files := map[string]string{"nvidia-ctk": program}
	for _, found := range lddLine.FindAllStringSubmatch(string(out), -1) {
		name := filepath.Base(found[1])
		files[name] = found[1]
		if strings.HasPrefix(name, "ld-linux") {
			k.loader = name
		}
	}
	if k.loader == "" {
		t.Fatalf("ldd %s names no dynamic linker:\n%s", program, out)
	}
	for name, from := range files {
		content, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(k.folder, name), content, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return k
}

// install links the toolkit's files into a folder of the host and returns the folder's path there.
func (k toolkit) install(host string) (string, error) {
	files, err := os.ReadDir(k.folder)
	if err != nil {
		return "", err
	}
	folder, err := os.MkdirTemp(host, "ctk-")
	if err != nil {
		return "", err
	}
	for _, f := range files {
		err = errors.Join(err, os.Link(filepath.Join(k.folder, f.Name()), filepath.Join(folder, f.Name())))
	}
	return "/" + filepath.Base(folder), err
}

// specOf returns what nvidia-ctk generates on the host, where it has Dir as its root directory.
func (k toolkit) specOf(t *testing.T, h hostharness.Host) (spec specs.Spec) {
	t.Helper()
	folder, err := k.install(h.Dir)
	if err != nil {
		t.Fatal(err)
	}
	args := []string{
		"--library-path", folder, folder + "/nvidia-ctk", "cdi", "generate", "--mode=nvml", "--format=json", "--no-all-device",
		"--device-name-strategy=uuid", "--driver-root=" + h.Root.DriverRoot, "--dev-root=" + h.Root.DeviceRoot("/"),
		"--nvidia-cdi-hook-path=" + hookPath,
	}
	for _, dir := range slices.Compact([]string{h.Root.Libraries, cmp.Or(h.Root.Platforms, h.Root.Libraries)}) {
		args = append(args, "--library-search-path="+filepath.Join(h.Root.DriverRoot, dir))
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(folder, k.loader), args...)
	cmd.Dir, cmd.SysProcAttr = "/", &syscall.SysProcAttr{Chroot: h.Dir}
	if err := json.Unmarshal(h.Run(cmd, "/"), &spec); err != nil {
		t.Fatal(err)
	}
	return spec
}
