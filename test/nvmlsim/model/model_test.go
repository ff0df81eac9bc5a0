package model

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func write(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const plainModel = `
productName: NVIDIA Plain
architecture: {value: Hopper, nvmlValue: 9}
brand: {value: Nvidia, nvmlValue: 14}
cudaComputeCapability: "9.0"
pciDeviceId: "0x233010DE"
pciSubsystemId: "0x16C110DE"
memoryTotalMiB: {value: 1024, status: verified}
mig: {supported: false, maxInstances: 0}
`

func TestFactMayBePlainOrWithSource(t *testing.T) {
	gpu, err := ReadGPU(write(t, "plain.yaml", plainModel))
	if err != nil {
		t.Fatal(err)
	}
	if gpu.Key != "plain" || gpu.ProductName.Value != "NVIDIA Plain" || gpu.MemoryTotalMiB.Value != 1024 || gpu.PowerLimitWatts.Known {
		t.Errorf("%+v", gpu)
	}
}

func TestInvalidModelFileIsNamed(t *testing.T) {
	for _, bad := range []struct{ from, to, want string }{
		{"productName: NVIDIA Plain", "", "productName"},
		{"value: 1024", "amount: 1024", "value"},
		{`"9.0"`, `"nine"`, "nine"},
		{"0x233010DE", "H100", "H100"},
		{"mig:", "addressingMode: Odd\nmig:", "Odd"},
		{"maxInstances: 0}", "maxInstances: 0, gpuInstanceProfiles: [{name: MIG 1g, nvmlProfile: 9_SLICE}]}", "9_SLICE"},
		{"maxInstances: 0}", "maxInstances: 0, gpuInstanceProfiles: [{name: MIG 1g, nvmlProfile: 1_SLICE}]}", "placements"},
	} {
		path := write(t, "bad.yaml", strings.Replace(plainModel, bad.from, bad.to, 1))
		if _, err := ReadGPU(path); err == nil || !strings.Contains(err.Error(), bad.want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%q: error %v does not name the file and %q", bad.to, err, bad.want)
		}
	}
}

func TestInvalidNodeFileIsNamed(t *testing.T) {
	const good = `{model: m, pci: "0000:1b:00.0", pciRoot: "pci0000:15", numaNode: 0, minor: 0}`
	for _, bad := range []struct{ cards, want string }{
		{`- {model: m, pci: "1b:00.0", pciRoot: "pci0000:15", numaNode: 0}`, "1b:00.0"},
		{`- {model: m, pci: "0000:1b:00.1", pciRoot: "pci0000:15", numaNode: 0}`, "function 0"},
		{`- {model: m, pci: "0000:1b:00.0", pciRoot: "15", numaNode: 0}`, "PCI root"},
		{"- " + good + "\n- " + good, "two GPUs"},
		{"- " + good + "\n- " + strings.Replace(good, "1b", "1c", 1), "minor 0"},
		{"- " + strings.Replace(good, "minor: 0", "minr: 0", 1), "minr"},
		{"- " + strings.Replace(good, "minor: 0", "fabric: {state: torn}", 1), "torn"},
		{"- " + strings.Replace(good, "minor: 0", "fabric: {state: completed, clusterUUID: x}", 1), "clusterUUID"},
	} {
		path := write(t, "bad.yaml", "driverVersion: \"1.2\"\ncudaVersion: \"12.4\"\ngpus:\n"+bad.cards+"\n")
		if _, err := ReadNode(path, ""); err == nil || !strings.Contains(err.Error(), bad.want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: error %v does not name the file and %q", bad.cards, err, bad.want)
		}
	}
}

func TestFolderWithoutModelsIsNamed(t *testing.T) {
	folder := t.TempDir()
	if _, err := ReadGPUs(folder); err == nil || !strings.Contains(err.Error(), folder) {
		t.Errorf("error %v does not name %s", err, folder)
	}
}
