package conformance

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// On real hardware, every GPU of the machine must agree with its model file. This test only reads.
func TestHardwareAgreesWithModelFile(t *testing.T) {
	if simulated != "" {
		t.Skip("needs hardware: name its library with -lib")
	}
	byDevice := map[uint32]*model.GPU{}
	for _, m := range readModels(t) {
		id, err := model.ParsePCIID(m.PCIDeviceID.Value)
		if err != nil {
			t.Fatal(err)
		}
		byDevice[id] = m
	}
	library := initialize(t)
	version, ret := library.SystemGetDriverVersion()
	want(t, "driver version", ret, nvml.SUCCESS)
	all := devices(t, library)
	if len(all) == 0 {
		t.Fatal("the driver finds no GPU")
	}
	for i, device := range all {
		pci, ret := device.GetPciInfo()
		want(t, "PCI address", ret, nvml.SUCCESS)
		name, ret := device.GetName()
		want(t, "name", ret, nvml.SUCCESS)
		t.Run(fmt.Sprintf("gpu%d", i), func(t *testing.T) {
			t.Logf("%s, PCI ID %#08x, subsystem %#08x, driver %s", name, pci.PciDeviceId, pci.PciSubSystemId, version)
			m, known := byDevice[pci.PciDeviceId]
			if !known {
				t.Fatalf("no model file for %s with PCI ID %#08x", name, pci.PciDeviceId)
			}
			var reader Reader = device
			for _, difference := range Compare(reader, m) {
				t.Error(difference)
			}
		})
	}
}

// A node with nine GPU models must report the values of every model file. With nine, the test would
// notice a limit of eight.
func TestEveryModelAgreesWithItsFile(t *testing.T) {
	needSimulator(t)
	for key, m := range readModels(t) {
		t.Run(key, func(t *testing.T) {
			newWorld(t, manyOf(t, key, 9))
			all := devices(t, initialize(t))
			if len(all) != 9 {
				t.Fatalf("%d GPUs, want 9", len(all))
			}
			for _, device := range all {
				for _, difference := range Compare(device, m) {
					t.Error(difference)
				}
			}
		})
	}
}

// manyOf returns a simulated node with count GPUs of the model whose file name is key.
func manyOf(t *testing.T, key string, count int) *model.Node {
	t.Helper()
	text := "name: many\ndriverVersion: \"550.163.01\"\ncudaVersion: \"12.4\"\ngpus:\n"
	for i := range count {
		text += fmt.Sprintf("- {model: %s, pci: \"0000:%02x:00.0\", pciRoot: \"pci0000:%02x\", numaNode: %d}\n", key, 2*i+1, 2*i, i%2)
	}
	path := filepath.Join(t.TempDir(), "many.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	node, err := model.ReadNode(path, t.Name())
	if err != nil {
		t.Fatal(err)
	}
	return node
}

func TestMoreThanEightGPUs(t *testing.T) {
	newWorld(t, manyOf(t, "t4-16gb", 100))
	all := devices(t, initialize(t))
	if len(all) != 100 {
		t.Fatalf("%d GPUs, want 100", len(all))
	}
	uuids := map[string]bool{}
	for i, device := range all {
		uuid, ret := device.GetUUID()
		want(t, "UUID", ret, nvml.SUCCESS)
		uuids[uuid] = true
		minor, ret := device.GetMinorNumber()
		want(t, "minor", ret, nvml.SUCCESS)
		if minor != i {
			t.Errorf("GPU %d has minor %d", i, minor)
		}
	}
	if len(uuids) != 100 {
		t.Errorf("%d different UUIDs of 100", len(uuids))
	}
}

// On every node, NVML must list the GPUs in the order of their PCI addresses, and find each by
// index, UUID and PCI address.
func TestEveryNodeAgreesWithItsFile(t *testing.T) {
	needSimulator(t)
	for _, name := range nodeNames(t) {
		t.Run(name, func(t *testing.T) {
			node := readNode(t, name)
			models := readModels(t)
			newWorld(t, node)
			library := initialize(t)
			version, ret := library.SystemGetDriverVersion()
			want(t, "driver version", ret, nvml.SUCCESS)
			if version != node.DriverVersion {
				t.Errorf("driver version %s, the node file says %s", version, node.DriverVersion)
			}
			cuda, ret := library.SystemGetCudaDriverVersion()
			want(t, "CUDA version", ret, nvml.SUCCESS)
			if got := fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10); got != node.CUDAVersion {
				t.Errorf("CUDA version %s, the node file says %s", got, node.CUDAVersion)
			}
			all := devices(t, library)
			if len(all) != len(node.GPUs) {
				t.Fatalf("%d GPUs, the node file has %d", len(all), len(node.GPUs))
			}
			for i, card := range node.GPUs {
				for _, difference := range Compare(all[i], models[card.Model]) {
					t.Errorf("GPU %d: %v", i, difference)
				}
				compareCard(t, library, all[i], i, card)
			}
		})
	}
}

func compareCard(t *testing.T, library nvml.Interface, device nvml.Device, index int, card model.Card) {
	t.Helper()
	uuid, ret := device.GetUUID()
	want(t, "UUID", ret, nvml.SUCCESS)
	minor, ret := device.GetMinorNumber()
	want(t, "minor", ret, nvml.SUCCESS)
	if uuid != card.UUID || minor != int(*card.Minor) {
		t.Errorf("GPU %d: UUID %s and minor %d, want %s and %d", index, uuid, minor, card.UUID, *card.Minor)
	}
	pci, ret := device.GetPciInfo()
	want(t, "PCI address", ret, nvml.SUCCESS)
	address, err := model.ParsePCIAddress(card.PCI)
	if err != nil {
		t.Fatal(err)
	}
	long := fmt.Sprintf("%08X:%02X:%02X.0", address.Domain, address.Bus, address.Device)
	if text(pci.BusId[:]) != long || pci.Domain != address.Domain || pci.Bus != address.Bus || pci.Device != address.Device {
		t.Errorf("GPU %d at %s (%d:%d:%d), want %s", index, text(pci.BusId[:]), pci.Domain, pci.Bus, pci.Device, long)
	}
	fabric, ret := device.GetGpuFabricInfo()
	if architecture, _ := device.GetArchitecture(); architecture < nvml.DEVICE_ARCH_HOPPER { // nvml.h: Hopper or newer
		want(t, "fabric", ret, nvml.ERROR_NOT_SUPPORTED)
	} else {
		want(t, "fabric", ret, nvml.SUCCESS)
		state, err := card.Fabric.StateValue()
		if err != nil {
			t.Fatal(err)
		}
		if uint32(fabric.State) != state {
			t.Errorf("GPU %d: fabric state %d, want %d", index, fabric.State, state)
		}
	}
	for name, found := range map[string]func() (nvml.Device, nvml.Return){
		"UUID":                func() (nvml.Device, nvml.Return) { return library.DeviceGetHandleByUUID(card.UUID) },
		"address":             func() (nvml.Device, nvml.Return) { return library.DeviceGetHandleByPciBusId(card.PCI) },
		"NVML's own spelling": func() (nvml.Device, nvml.Return) { return library.DeviceGetHandleByPciBusId(long) },
	} {
		other, ret := found()
		want(t, "handle by "+name, ret, nvml.SUCCESS)
		if got, ret := other.GetIndex(); ret != nvml.SUCCESS || got != index {
			t.Errorf("handle by %s has index %d (%v), want %d", name, got, ret, index)
		}
	}
}

// With two seeds, one node file must give two nodes with different GPU UUIDs. With one seed, the
// UUIDs must be the same at every boot.
func TestSeedsGiveDifferentUUIDs(t *testing.T) {
	needSimulator(t)
	read := func(seed string) string {
		node, err := model.ReadNode("../nodes/dgx-h100.yaml", seed)
		if err != nil {
			t.Fatal(err)
		}
		return node.GPUs[0].UUID
	}
	one, again, other := read("a"), read("a"), read("b")
	if one != again || one == other {
		t.Errorf("UUIDs of seeds a, a, b: %s, %s, %s", one, again, other)
	}
}
