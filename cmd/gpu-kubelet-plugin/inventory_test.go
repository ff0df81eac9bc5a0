package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// TestMain lets the test binary be the child that looks at the hardware, as the plugin's binary is, or the plugin itself.
func TestMain(m *testing.M) {
	if os.Getenv(asPlugin) != "" {
		main()
	}
	if len(os.Args) == 2 && os.Args[1] == driver.ScanCommand {
		os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)) //nolint:forbidigo // this process is the child of a test
	}
	m.Run()
}

// inventoryOf runs the command against the files under root.
func inventoryOf(t *testing.T, root string, args ...string) (out, errOut string, code int) {
	t.Helper()
	var o, e strings.Builder
	args = append([]string{
		"inventory", "--driver-root=/run/nvidia/driver", "--driver-root-mount=" + filepath.Join(root, "driver"),
		"--sysfs-root=" + filepath.Join(root, "sys"), "--proc-root=" + filepath.Join(root, "proc"), "--dev-root=" + filepath.Join(root, "driver"),
	}, args...)
	code = run(t.Context(), args, &o, &e)
	return o.String(), e.String(), code
}

func pciDevice(t *testing.T, root, address, vendor, class string) {
	t.Helper()
	dir := filepath.Join(root, "sys/bus/pci/devices", address)
	err := errors.Join(os.MkdirAll(dir, 0o750), os.WriteFile(filepath.Join(dir, "vendor"), []byte(vendor+"\n"), 0o600),
		os.WriteFile(filepath.Join(dir, "class"), []byte(class+"\n"), 0o600))
	if err != nil {
		t.Fatal(err)
	}
}

func TestInventoryOfANodeWithoutAGPUIsNoFailure(t *testing.T) {
	root := t.TempDir()
	pciDevice(t, root, "0000:00:02.0", "0x8086", "0x030000")
	out, errOut, code := inventoryOf(t, root)
	if code != 0 || !strings.Contains(out, "no NVIDIA GPU on this node's PCI bus") {
		t.Errorf("%d: %s%s", code, out, errOut)
	}
}

func TestInventoryOfANodeWithoutADriverFailsAndSaysWhatToDo(t *testing.T) {
	root := t.TempDir()
	pciDevice(t, root, "0000:1b:00.0", "0x10de", "0x030200")
	_, errOut, code := inventoryOf(t, root)
	if code != exitFailed || !strings.Contains(errOut, "offers none of them") || !strings.Contains(errOut, "install the NVIDIA driver") {
		t.Errorf("%d: %s", code, errOut)
	}
}

func TestInventoryRefusesAnUnknownFormat(t *testing.T) {
	if _, errOut, code := inventoryOf(t, t.TempDir(), "-o", "xml"); code != exitUsage || !strings.Contains(errOut, "neither table nor yaml") {
		t.Errorf("%d: %s", code, errOut)
	}
	if _, errOut, code := inventoryOf(t, t.TempDir(), "--nonsense"); code != exitUsage {
		t.Errorf("%d: %s", code, errOut)
	}
}

func TestInventoryShowsWhatTheNodeOffers(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes with the driver's numbers")
	}
	const simulator = "../../test/nvmlsim"
	if out, err := exec.Command("make", "-s", "-C", simulator, "library").CombinedOutput(); err != nil {
		t.Fatalf("build the simulated library: %v\n%s", err, out)
	}
	models, err := model.ReadGPUs(filepath.Join(simulator, "models"))
	if err != nil {
		t.Fatal(err)
	}
	node, err := model.ReadNode(filepath.Join(simulator, "nodes/l40s-x2.yaml"), "inventory")
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	if _, err := layout.Up(layout.Options{
		Root: root, Models: models, Seed: "inventory", Config: layout.Config{Kind: layout.Container, Node: node},
		Sources: layout.Sources{Library: "../../build/nvmlsim/libnvidia-ml.so.1"},
	}); err != nil {
		t.Fatal(err)
	}
	t.Setenv("NVMLSIM_DEV", filepath.Join(root, "driver/dev"))

	out, errOut, code := inventoryOf(t, root)
	if code != 0 || strings.Count(out, "NVIDIA L40S") != 2 || !strings.Contains(out, node.GPUs[1].UUID) {
		t.Errorf("%d: %s%s", code, out, errOut)
	}
	out, errOut, code = inventoryOf(t, root, "-o", "yaml", "--node-name", "node-1")
	var slice resourceapi.ResourceSlice
	if err := yaml.UnmarshalStrict([]byte(strings.TrimPrefix(out, "---\n")), &slice); err != nil || code != 0 {
		t.Fatalf("%d: %v %s%s", code, err, out, errOut)
	}
	if len(slice.Spec.Devices) != 2 || *slice.Spec.NodeName != "node-1" {
		t.Errorf("%+v", slice.Spec)
	}
}
