package nvidiatest

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

func (h Host) Pipe(path string) {
	h.t.Helper()
	h.parent(path)
	h.Must(unix.Mkfifo(filepath.Join(h.Root, path), 0o600))
	h.t.Cleanup(func() { // unblocks a reader that waits for a writer
		if f, err := os.OpenFile(filepath.Join(h.Root, path), os.O_RDWR|unix.O_NONBLOCK, 0); err == nil {
			_ = f.Close()
		}
	})
}

func (h Host) Must(err error) {
	h.t.Helper()
	if err != nil {
		h.t.Fatal(err)
	}
}

// Host is a temporary directory with the files that a scan reads: a driver root with its own
// dev, sysfs and proc.
type Host struct {
	t    *testing.T
	Root string
}

// EmptyHost returns a fake host without files.
func EmptyHost(t *testing.T) Host {
	t.Helper()
	h := Host{t, t.TempDir()}
	h.Must(os.Mkdir(filepath.Join(h.Root, "state"), 0o700))
	return h
}

// NewHost returns a fake host with a driver and two GPUs, those of [TwoCards].
func NewHost(t *testing.T) Host {
	t.Helper()
	h := EmptyHost(t)
	for _, lib := range []string{"libnvidia-ml.so.1", "libnvidia-ml.so." + Version, "libcuda.so." + Version} {
		h.File("driver/usr/lib64/"+lib, "no ELF")
	}
	for _, node := range []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidia1"} {
		h.Node("driver/dev/" + node)
	}
	h.File("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  "+Version+"\n")
	h.GPUOnBus("0000:1b:00.0", "pci0000:15", "0")
	h.GPUOnBus("0000:c3:00.0", "pci0000:bd", "-1")
	h.File("sys/devices/pci0000:15/0000:07:00.0/vendor", "0x10de\n")
	h.File("sys/devices/pci0000:15/0000:07:00.0/class", "0x068000\n") // an NVSwitch
	h.Link("../../../devices/pci0000:15/0000:07:00.0", "sys/bus/pci/devices/0000:07:00.0")
	return h
}

func (h Host) Paths() nvidia.Paths {
	return nvidia.Paths{
		DriverRoot: filepath.Join(h.Root, "driver"), HostDriverRoot: "/run/nvidia/driver",
		Sysfs: filepath.Join(h.Root, "sys"), Proc: filepath.Join(h.Root, "proc"), HookPath: "/opt/hook/nvidia-cdi-hook",
		State: filepath.Join(h.Root, "state"),
	}
}

func (h Host) GPUOnBus(address, root, numa string) {
	dir := "sys/devices/" + root + "/" + root[3:] + ":01.0/" + address
	h.File(dir+"/vendor", "0x10de\n")
	h.File(dir+"/class", "0x030200\n")
	h.File(dir+"/numa_node", numa+"\n")
	h.Link("../../../"+dir[len("sys/"):], "sys/bus/pci/devices/"+address)
}

// Node creates a character device with the number 0:0, because any user may create this one.
func (h Host) Node(path string) {
	h.t.Helper()
	h.parent(path)
	if err := unix.Mknod(filepath.Join(h.Root, path), unix.S_IFCHR|0o666, 0); err != nil {
		h.t.Fatal(err)
	}
}

func (h Host) File(path, content string) {
	h.t.Helper()
	h.parent(path)
	if err := os.WriteFile(filepath.Join(h.Root, path), []byte(content), 0o600); err != nil {
		h.t.Fatal(err)
	}
}

func (h Host) Link(target, path string) {
	h.t.Helper()
	h.parent(path)
	if err := os.Symlink(target, filepath.Join(h.Root, path)); err != nil {
		h.t.Fatal(err)
	}
}

func (h Host) parent(path string) {
	h.t.Helper()
	if err := os.MkdirAll(filepath.Dir(filepath.Join(h.Root, path)), 0o750); err != nil {
		h.t.Fatal(err)
	}
}

func (h Host) Remove(path string) {
	h.t.Helper()
	if err := os.RemoveAll(filepath.Join(h.Root, path)); err != nil {
		h.t.Fatal(err)
	}
}
