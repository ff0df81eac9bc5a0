package scan

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

func TestDeviceNodesAreLinkedByNumber(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes")
	}
	root, links := t.TempDir(), filepath.Join(t.TempDir(), "char")
	makeNode := func(name string, minor uint32) string { // harmless numbers
		path := filepath.Join(root, "dev", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, minor))); err != nil {
			t.Fatal(err)
		}
		return path
	}
	control, own, capability := makeNode("nvidiactl", 3), makeNode("nvidia0", 5), makeNode("nvidia-caps/nvidia-cap30", 7)
	g := nvidia.GPU{Edits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidia0", HostPath: own}}}}
	g.MIG = &device.MIG{Instances: []device.Instance{{Minor: 30, Compute: []device.ComputeInstance{{Minor: 31}}}}} // 31 has no node
	monitor := makeNode("nvidia-caps/nvidia-cap2", 8)
	proc := filepath.Join(root, "proc")
	monitorFile := filepath.Join(proc, "driver/nvidia/capabilities/mig/monitor")
	if err := os.MkdirAll(filepath.Dir(monitorFile), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(monitorFile, []byte("DeviceFileMinor: 2\nDeviceFileMode: 292\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	n := nvidia.Node{
		Common: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidiactl", HostPath: control}}}, GPUs: []nvidia.GPU{g},
	}
	p := nvidia.Paths{DriverRoot: root, Proc: proc}
	linked := func(when string) {
		t.Helper()
		if err := LinkDeviceNodes(p, n, links); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		for link, node := range map[string]string{"1:3": control, "1:5": own, "1:7": capability, "1:8": monitor} {
			if target, err := os.Readlink(filepath.Join(links, link)); err != nil || target != node {
				t.Errorf("%s the link %s leads to %q (%v), want %s", when, link, target, err, node)
			}
		}
	}
	linked("at first")
	before, err := os.Lstat(filepath.Join(links, "1:5"))
	if err != nil {
		t.Fatal(err)
	}
	linked("a second time")
	if after, err := os.Lstat(filepath.Join(links, "1:5")); err != nil || !os.SameFile(before, after) {
		t.Errorf("a right link was replaced (%v)", err)
	}
	if err := os.Remove(filepath.Join(links, "1:5")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/run/old-driver/dev/nvidia0", filepath.Join(links, "1:5")); err != nil {
		t.Fatal(err)
	}
	linked("instead of a broken link")
	if err := errors.Join(os.Remove(filepath.Join(links, "1:5")), os.Symlink(control, filepath.Join(links, "1:5"))); err != nil {
		t.Fatal(err)
	}
	linked("instead of a link to a device of another number")

	if err := os.Remove(own); err != nil {
		t.Fatal(err)
	}
	if err := LinkDeviceNodes(p, n, links); err == nil {
		t.Error("a missing device node is no error")
	}
}

// The plugin's container may not see the target of a link, which is a path on the host.
func TestLinkToPathOfHostStays(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes")
	}
	dir := t.TempDir()
	path, link, target := filepath.Join(dir, "nvidia0"), filepath.Join(dir, "1:3"), "/run/nvidia/driver/dev/nvidia0"
	if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))); err != nil {
		t.Fatal(err)
	}
	if err := linkDeviceNode(dir, path, target); err != nil {
		t.Fatal(err)
	}
	before, err := os.Lstat(link)
	if err != nil {
		t.Fatal(err)
	}
	if err := linkDeviceNode(dir, path, target); err != nil {
		t.Fatal(err)
	}
	if after, err := os.Lstat(link); err != nil || !os.SameFile(before, after) {
		t.Errorf("the link was replaced (%v)", err)
	}
}
