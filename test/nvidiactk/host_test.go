package nvidiactk

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/driverzoo"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

const (
	repository = "../.."
	// seed is what the simulator derives the UUIDs from.
	seed = "nvidia-ctk"
	// hookPath is the path of nvidia-cdi-hook in all specs.
	hookPath = "/var/lib/kubelet/plugins/gpu.nvidia.com/nvidia-cdi-hook"
)

// host is a simulated host. dir stands for its root directory, in which sim has the simulator's
// files.
type host struct {
	t    *testing.T
	dir  string
	root driverzoo.Root
}

// newHost lays out a host whose driver root is like root, with the GPUs of the node.
func newHost(t *testing.T, root driverzoo.Root, node *model.Node, models map[string]*model.GPU, library string) host {
	t.Helper()
	h := host{t, filepath.Join(t.TempDir(), "host"), root}
	standIn := func(name string) string {
		base, _, _ := strings.Cut(name, ".so.")
		if base == "libnvidia-ml" {
			return library
		}
		file := filepath.Join(filepath.Dir(library), "standin", base+".so.1")
		if _, err := os.Stat(file); err != nil {
			return ""
		}
		return file
	}
	h.must(errors.Join(os.MkdirAll(filepath.Join(h.dir, "dev"), 0o755), os.Mkdir(filepath.Join(h.dir, "tmp"), 0o777)))
	h.must(root.Install(h.dir, standIn))
	dev := filepath.Join(root.DeviceRoot(h.dir), "dev")
	h.must(os.MkdirAll(dev, 0o755))
	node.DRMNodes = root.Devices.DRMMode != ""
	_, err := layout.Up(layout.Options{
		Root: filepath.Join(h.dir, "sim"), Models: models, Seed: seed, Config: layout.Config{Kind: layout.Host, Node: node, Dev: dev},
		Sources: layout.Sources{Library: library},
	})
	h.must(err)
	h.must(errors.Join(os.Symlink("sim/proc", filepath.Join(h.dir, "proc")), os.Symlink("sim/sys", filepath.Join(h.dir, "sys"))))
	h.must(unix.Mknod(filepath.Join(h.dir, "dev/null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	if made := filepath.Join(h.dir, "dev"); made != dev && node.DRMNodes {
		h.must(os.Rename(filepath.Join(dev, "dri"), filepath.Join(made, "dri"))) // the kernel makes them in the host's /dev
	}
	h.must(h.addMore(dev, node.DriverVersion))
	h.must(h.protect(dev))
	h.listen("/run/nvidia-persistenced/socket")
	h.listen("/run/nvidia-fabricmanager/socket")
	return h
}

func (h host) must(err error) {
	h.t.Helper()
	if err != nil {
		h.t.Fatal(err)
	}
}

// addMore adds what a driver of this version may also have, and no root of test/driverzoo has.
func (h host) addMore(dev, version string) error {
	var failed []error
	root := filepath.Join(h.dir, h.root.DriverRoot)
	for _, file := range []string{
		h.root.Programs + "/nvidia-imex", h.root.Programs + "/nvidia-imex-ctl", h.root.Programs + "/nvidia-xconfig",
		h.root.Libraries + "/libnvidia-nvvm70.so.4", h.root.Libraries + "/libnvidia-vulkan-producer.so." + version,
		h.root.Libraries + "/xorg/modules/extensions/libglxserver_nvidia.so." + version,
		h.root.Libraries + "/vdpau/libvdpau_nvidia.so." + version,
		"/etc/vulkan/icd.d/nvidia_layers.json", "/usr/share/X11/xorg.conf.d/10-nvidia.conf",
		"/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
		"/usr/share/nvidia/nvidia-application-profiles-" + version + "-rc",
	} {
		if full := filepath.Join(root, file); !exists(full) {
			failed = append(failed, os.MkdirAll(filepath.Dir(full), 0o755), os.WriteFile(full, nil, 0o755))
		}
	}
	for minor, name := range []string{"nvidia-nvswitchctl", "nvidia-nvswitch0", "nvidia-fs0", "gdrdrv", "nvidia-caps-imex-channels/channel0"} {
		full := filepath.Join(dev, name)
		number := int(unix.Mkdev(511, uint32(100+minor)))
		failed = append(failed, os.MkdirAll(filepath.Dir(full), 0o755), unix.Mknod(full, unix.S_IFCHR|0o666, number))
	}
	return errors.Join(failed...)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// protect gives the driver's device nodes the modes and groups that this kind of host has.
func (h host) protect(dev string) error {
	mode, err := strconv.ParseUint(h.root.Devices.GPUMode, 8, 12)
	if err != nil {
		return err
	}
	nodes, err := filepath.Glob(filepath.Join(dev, "nvidia*"))
	for _, node := range slices.DeleteFunc(nodes, func(path string) bool { return strings.HasPrefix(filepath.Base(path), "nvidia-caps") }) {
		err = errors.Join(err, os.Chmod(node, fs.FileMode(mode)), os.Chown(node, 0, driverzoo.Groups[h.root.Devices.GPUGroup]))
	}
	return err
}

// listen creates the socket of a daemon of the driver. A relative path is short enough for one.
func (h host) listen(path string) {
	h.t.Helper()
	full := filepath.Join(h.dir, h.root.DriverRoot, path)
	h.must(os.MkdirAll(filepath.Dir(full), 0o755))
	dir, err := os.Open(filepath.Dir(full))
	h.must(err)
	defer func() { _ = dir.Close() }()
	socket, err := net.Listen("unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(full)))
	h.must(err)
	socket.(*net.UnixListener).SetUnlinkOnClose(false)
	h.must(socket.Close())
}

// ours returns what the plugin's command inventory prints: the base spec and that of a claim to
// which all devices are allocated. Its process sees the host as the plugin's container does, with
// the host's device nodes in /dev.
func (h host) ours(program string) (base, claim specs.Spec) {
	h.t.Helper()
	cmd := exec.CommandContext(h.t.Context(), "/bin/sh", "-c", `mount --bind "$0" /dev && exec "$@"`, filepath.Join(h.dir, "dev"),
		program, "inventory", "--node-name=node-1", "-o", "cdi", "--driver-root="+h.root.DriverRoot,
		"--driver-root-mount="+filepath.Join(h.dir, h.root.DriverRoot), "--sysfs-root="+filepath.Join(h.dir, "sys"),
		"--proc-root="+filepath.Join(h.dir, "proc"), "--plugin-dir="+filepath.Join(h.dir, "plugin"), "--hook-path="+hookPath)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	out := h.run(cmd, h.dir)
	decoder := json.NewDecoder(bytes.NewReader(out))
	h.must(decoder.Decode(&base))
	h.must(decoder.Decode(&claim))
	return base, claim
}

// theirs returns what nvidia-ctk generates on the host, where it has dir as its root directory.
func (h host) theirs(k toolkit) (spec specs.Spec) {
	h.t.Helper()
	folder, err := k.install(h.dir)
	h.must(err)
	args := []string{
		"--library-path", folder, folder + "/nvidia-ctk", "cdi", "generate", "--mode=nvml", "--format=json", "--no-all-device",
		"--device-name-strategy=uuid", "--driver-root=" + h.root.DriverRoot, "--dev-root=" + h.root.DeviceRoot("/"),
		"--nvidia-cdi-hook-path=" + hookPath,
	}
	for _, dir := range slices.Compact([]string{h.root.Libraries, cmp.Or(h.root.Platforms, h.root.Libraries)}) {
		args = append(args, "--library-search-path="+filepath.Join(h.root.DriverRoot, dir))
	}
	cmd := exec.CommandContext(h.t.Context(), filepath.Join(folder, k.loader), args...)
	cmd.Dir, cmd.SysProcAttr = "/", &syscall.SysProcAttr{Chroot: h.dir}
	h.must(json.Unmarshal(h.run(cmd, "/"), &spec))
	return spec
}

// run returns the program's standard output. at is where the program sees the host's root
// directory.
func (h host) run(cmd *exec.Cmd, at string) []byte {
	h.t.Helper()
	cmd.Env = append(os.Environ(), "NVMLSIM_STATE="+filepath.Join(at, "sim", layout.StateFile),
		"NVMLSIM_DEV="+filepath.Join(at, h.root.DeviceRoot("/"), "dev"))
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		h.t.Fatalf("%s: %v\n%s", strings.Join(cmd.Args, " "), err, errOut.String())
	}
	return out.Bytes()
}

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
