// Package hostharness simulates hosts: a driver root of test/driverzoo with a node of test/nvmlsim.
// The plugin's command inventory runs there as in its container and gives the CDI specs.
package hostharness

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
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
	// repository is where the tests find it, in folders below test.
	repository = "../.."
	// seed is what the simulator derives the UUIDs from.
	seed = "host"
)

// Simulator is what all hosts have in common: the programs, built from source, and the models of
// GPUs.
type Simulator struct {
	// plugin is the path of gpu-kubelet-plugin.
	plugin string
	nvml   string
	models map[string]*model.GPU
}

// NewSimulator builds the programs.
func NewSimulator(t *testing.T) Simulator {
	t.Helper()
	s := Simulator{plugin: filepath.Join(t.TempDir(), "gpu-kubelet-plugin")}
	build(t, "go", "build", "-o", s.plugin, "./cmd/gpu-kubelet-plugin")
	build(t, "make", "-s", "-C", "test/nvmlsim", "library")
	var err error
	if s.nvml, err = filepath.Abs(filepath.Join(repository, "build/nvmlsim/libnvidia-ml.so.1")); err != nil {
		t.Fatal(err)
	}
	if s.models, err = model.ReadGPUs(filepath.Join(repository, "test/nvmlsim/models")); err != nil {
		t.Fatal(err)
	}
	return s
}

// build runs a command in the repository.
func build(t *testing.T, name string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Dir = repository
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, out)
	}
}

// Host is a simulated host. Dir stands for its root directory, in which sim has the simulator's
// files.
type Host struct {
	t    *testing.T
	sim  Simulator
	Dir  string
	Root driverzoo.Root
}

// NewHost lays out a host in the new directory dir. Its driver root is like root, with the GPUs of
// the node. It needs root.
func (s Simulator) NewHost(t *testing.T, dir string, root driverzoo.Root, node *model.Node) Host {
	t.Helper()
	h := Host{t, s, dir, root}
	standIn := func(name string) string {
		base, _, _ := strings.Cut(name, ".so.")
		if base == "libnvidia-ml" {
			return s.nvml
		}
		file := filepath.Join(filepath.Dir(s.nvml), "standin", base+".so.1")
		if _, err := os.Stat(file); err != nil {
			return ""
		}
		return file
	}
	h.must(errors.Join(os.MkdirAll(filepath.Join(h.Dir, "dev"), 0o755), os.Mkdir(filepath.Join(h.Dir, "tmp"), 0o777)))
	h.must(root.Install(h.Dir, standIn))
	dev := filepath.Join(root.DeviceRoot(h.Dir), "dev")
	h.must(os.MkdirAll(dev, 0o755))
	node.DRMNodes = root.Devices.DRMMode != ""
	_, err := layout.Up(layout.Options{
		Root: filepath.Join(h.Dir, "sim"), Models: s.models, Seed: seed, Config: layout.Config{Kind: layout.Host, Node: node, Dev: dev},
		Sources: layout.Sources{Library: s.nvml},
	})
	h.must(err)
	h.must(errors.Join(os.Symlink("sim/proc", filepath.Join(h.Dir, "proc")), os.Symlink("sim/sys", filepath.Join(h.Dir, "sys"))))
	null := filepath.Join(h.Dir, "dev/null")
	h.must(errors.Join(unix.Mknod(null, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))), os.Chmod(null, 0o666)))
	if made := filepath.Join(h.Dir, "dev"); made != dev && node.DRMNodes {
		h.must(os.Rename(filepath.Join(dev, "dri"), filepath.Join(made, "dri"))) // the kernel makes them in the host's /dev
	}
	h.must(h.addMore(dev, node.DriverVersion))
	h.must(h.protect(dev))
	h.listen("/run/nvidia-persistenced/socket")
	h.listen("/run/nvidia-fabricmanager/socket")
	return h
}

func (h Host) must(err error) {
	h.t.Helper()
	if err != nil {
		h.t.Fatal(err)
	}
}

// addMore adds what a driver of this version may also have, and no root of test/driverzoo has.
func (h Host) addMore(dev, version string) error {
	var failed []error
	root := filepath.Join(h.Dir, h.Root.DriverRoot)
	for _, file := range []string{
		h.Root.Programs + "/nvidia-imex", h.Root.Programs + "/nvidia-imex-ctl", h.Root.Programs + "/nvidia-xconfig",
		h.Root.Libraries + "/libnvidia-nvvm70.so.4", h.Root.Libraries + "/libnvidia-vulkan-producer.so." + version,
		h.Root.Libraries + "/xorg/modules/extensions/libglxserver_nvidia.so." + version,
		h.Root.Libraries + "/vdpau/libvdpau_nvidia.so." + version,
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
func (h Host) protect(dev string) error {
	mode, err := strconv.ParseUint(h.Root.Devices.GPUMode, 8, 12)
	if err != nil {
		return err
	}
	nodes, err := filepath.Glob(filepath.Join(dev, "nvidia*"))
	for _, node := range slices.DeleteFunc(nodes, func(path string) bool { return strings.HasPrefix(filepath.Base(path), "nvidia-caps") }) {
		err = errors.Join(err, os.Chmod(node, fs.FileMode(mode)), os.Chown(node, 0, driverzoo.Groups[h.Root.Devices.GPUGroup]))
	}
	return err
}

// listen creates the socket of a daemon of the driver. A relative path is short enough for one.
func (h Host) listen(path string) {
	h.t.Helper()
	full := filepath.Join(h.Dir, h.Root.DriverRoot, path)
	h.must(os.MkdirAll(filepath.Dir(full), 0o755))
	dir, err := os.Open(filepath.Dir(full))
	h.must(err)
	defer func() { _ = dir.Close() }()
	socket, err := net.Listen("unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(full)))
	h.must(err)
	socket.(*net.UnixListener).SetUnlinkOnClose(false)
	h.must(socket.Close())
}

// CDI returns what the plugin's command inventory prints: the base spec and that of a claim that
// has all devices. Its process sees the host as the plugin's container does, with the host's device
// nodes in /dev. The specs name files below driverRoot, and hookPath.
func (h Host) CDI(driverRoot, hookPath string) (base, claim specs.Spec) {
	h.t.Helper()
	cmd := exec.CommandContext(h.t.Context(), "/bin/sh", "-c", `mount --bind "$0" /dev && exec "$@"`, filepath.Join(h.Dir, "dev"),
		h.sim.plugin, "inventory", "--node-name=node-1", "-o", "cdi", "--driver-root="+driverRoot,
		"--driver-root-mount="+filepath.Join(h.Dir, h.Root.DriverRoot), "--sysfs-root="+filepath.Join(h.Dir, "sys"),
		"--proc-root="+filepath.Join(h.Dir, "proc"), "--plugin-dir="+filepath.Join(h.Dir, "plugin"), "--hook-path="+hookPath)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	decoder := json.NewDecoder(bytes.NewReader(h.Run(cmd, h.Dir)))
	h.must(decoder.Decode(&base))
	h.must(decoder.Decode(&claim))
	return base, claim
}

// Run returns the program's standard output. at is where the program sees the host's root
// directory.
func (h Host) Run(cmd *exec.Cmd, at string) []byte {
	h.t.Helper()
	cmd.Env = append(os.Environ(), "NVMLSIM_STATE="+filepath.Join(at, "sim", layout.StateFile),
		"NVMLSIM_DEV="+filepath.Join(at, h.Root.DeviceRoot("/"), "dev"))
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		h.t.Fatalf("%s: %v\n%s", strings.Join(cmd.Args, " "), err, errOut.String())
	}
	return out.Bytes()
}

// NodeFiles returns the paths of the node files of test/nvmlsim, and of those in more directories
// before them.
func NodeFiles(t *testing.T, more ...string) (files []string) {
	t.Helper()
	for _, dir := range append(more, filepath.Join(repository, "test/nvmlsim/nodes")) {
		found, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
		if err != nil || len(found) == 0 {
			t.Fatal("no node files in", dir, err)
		}
		files = append(files, found...)
	}
	return files
}

// ReadNode reads a node file.
func ReadNode(t *testing.T, file string) *model.Node {
	t.Helper()
	node, err := model.ReadNode(file, seed)
	if err != nil {
		t.Fatal(err)
	}
	node.AttachCost.Duration = 0 // it only costs time
	node.Passthrough = false     // a sysfs of plain files
	return node
}
