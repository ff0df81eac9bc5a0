package nvidia

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"
)

func TestDeviceNodesAreLinkedByNumber(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes")
	}
	dev, links := t.TempDir(), t.TempDir()
	node := filepath.Join(dev, "nvidia0")
	if err := unix.Mknod(node, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))); err != nil { // a harmless number
		t.Fatal(err)
	}
	n := Node{GPUs: []GPU{{Edits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidia0", HostPath: node}}}}}}
	link := filepath.Join(links, "1:3")
	leadsToNode := func(when string) {
		t.Helper()
		if err := (Paths{CharDir: links}).LinkDeviceNodes(n); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		if target, err := os.Readlink(link); err != nil || target != node {
			t.Errorf("%s the link leads to %q (%v), want %s", when, target, err, node)
		}
	}
	leadsToNode("at first")
	leadsToNode("a second time")
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/run/old-driver/dev/nvidia0", link); err != nil {
		t.Fatal(err)
	}
	leadsToNode("instead of a broken link")

	// A link that leads to a path which only the host has must stay as it is.
	before, err := os.Lstat(link)
	if err != nil {
		t.Fatal(err)
	}
	if err := (Paths{CharDir: links}).LinkDeviceNode(node, node); err != nil {
		t.Fatal(err)
	}
	if after, err := os.Lstat(link); err != nil || !os.SameFile(before, after) {
		t.Errorf("a right link was replaced (%v)", err)
	}

	if err := (Paths{}).LinkDeviceNodes(n); err != nil {
		t.Errorf("without a directory: %v", err)
	}
	n.GPUs[0].Edits.DeviceNodes[0].HostPath = filepath.Join(dev, "nvidia1")
	if err := (Paths{CharDir: links}).LinkDeviceNodes(n); err == nil {
		t.Error("a missing device node is no error")
	}
}
