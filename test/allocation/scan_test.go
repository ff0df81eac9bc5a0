package allocation

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/scan"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// newNode returns a simulated node with two GPUs of the model.
func newNode(t *testing.T, key string, m *model.GPU) *model.Node {
	t.Helper()
	file := filepath.Join(t.TempDir(), "node.yaml")
	text := "driverVersion: \"580.65.06\"\ncudaVersion: \"13.0\"\ngpus:\n"
	for i := range 2 {
		text += fmt.Sprintf("- {model: %s, pci: \"0000:%02x:00.0\", pciRoot: \"pci0000:15\", mig: {enabled: %v}}\n",
			key, 0x20+i, m.MIG.NeedsReset.Value)
	}
	must(t, "describe the node", os.WriteFile(file, []byte(text), 0o600))
	node, err := model.ReadNode(file, "allocation")
	must(t, "describe the node", err)
	return node
}

// scannedGPUs creates the files of the simulated node, and returns the GPUs that the plugin's scan
// reports for it.
func scannedGPUs(t *testing.T, library string, node *model.Node, models map[string]*model.GPU) []device.GPU {
	t.Helper()
	root := t.TempDir()
	must(t, "lay the node out", os.MkdirAll(filepath.Join(root, "machine", "dev"), 0o750))
	_, err := layout.Up(layout.Options{
		Root: root, Models: models, Seed: "allocation", Sources: layout.Sources{Library: library},
		Config: layout.Config{Kind: layout.Container, Node: node, Dev: filepath.Join(root, "machine", "dev")},
	})
	must(t, "lay the node out", err)
	self, err := os.Executable()
	must(t, "find the test binary", err)
	paths := nvidia.Paths{
		DriverRoot: filepath.Join(root, "driver"), HostDriverRoot: "/run/nvidia/driver",
		Sysfs: filepath.Join(root, "sys"), Proc: filepath.Join(root, "proc"),
	}
	found, err := scan.Isolated(paths, "env", "NVMLSIM_DEV="+filepath.Join(root, "driver", "dev"), role+"=scan", self)(t.Context())
	if err != nil || len(found.GPUs) != len(node.GPUs) {
		t.Fatalf("found %d GPUs: %v, %v", len(found.GPUs), found.Problems, err)
	}
	var gpus []device.GPU
	for _, g := range found.GPUs {
		gpus = append(gpus, g.GPU)
	}
	return gpus
}

func must(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}
