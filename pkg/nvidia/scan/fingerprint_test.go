package scan

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
)

func TestOnlyNVIDIADisplayControllersAreGPUs(t *testing.T) {
	h := nvidiatest.EmptyHost(t)
	h.File("sys/bus/pci/devices/0000:00:01.0/vendor", "0x8086\n")
	h.File("sys/bus/pci/devices/0000:00:01.0/class", "0x030000\n")
	h.File("sys/bus/pci/devices/0000:07:00.0/vendor", "0x10de\n")
	h.File("sys/bus/pci/devices/0000:07:00.0/class", "0x068000\n")
	if found, err := HasNVIDIADevice(filepath.Join(h.Root, "sys")); found || err != nil {
		t.Errorf("an Intel display and an NVSwitch: %v, %v", found, err)
	}
	h.File("sys/bus/pci/devices/0000:08:00.0/vendor", "0x10de\n")
	h.File("sys/bus/pci/devices/0000:08:00.0/class", "0x030000\n")
	if found, err := HasNVIDIADevice(filepath.Join(h.Root, "sys")); !found || err != nil {
		t.Errorf("with a VGA card of NVIDIA: %v, %v", found, err)
	}
	if _, err := HasNVIDIADevice(filepath.Join(h.Root, "nowhere")); err == nil {
		t.Error("an unreadable sysfs must not count as a node without GPUs")
	}
}

func TestFingerprintChangesWithScanInputs(t *testing.T) {
	for name, change := range map[string]func(nvidiatest.Host){
		"a GPU appears": func(h nvidiatest.Host) { h.GPUOnBus("0000:d1:00.0", "pci0000:cb", "1") },
		"a GPU is gone": func(h nvidiatest.Host) { h.Remove("sys/bus/pci/devices/0000:c3:00.0") },
		"a GPU changes its kernel driver": func(h nvidiatest.Host) {
			h.Link("../x/vfio-pci", "sys/devices/pci0000:15/0000:15:01.0/0000:1b:00.0/driver")
		},
		"a device node appears":             func(h nvidiatest.Host) { h.Node("driver/dev/nvidia2") },
		"a device node is removed":          func(h nvidiatest.Host) { h.Remove("driver/dev/nvidia-uvm") },
		"the driver's own dev is removed":   func(h nvidiatest.Host) { h.Remove("driver/dev/nvidiactl") },
		"a library appears":                 func(h nvidiatest.Host) { h.File("driver/usr/lib64/libnvidia-nvvm.so.4", "") },
		"a library is replaced":             func(h nvidiatest.Host) { h.File("driver/usr/lib64/libcuda.so."+nvidiatest.Version, "another") },
		"another directory has the library": func(h nvidiatest.Host) { h.File("driver/usr/lib/libnvidia-ml.so.1", "") },
		"nvidia-smi appears":                func(h nvidiatest.Host) { h.File("driver/usr/bin/nvidia-smi", "") },
		"an alternative leads elsewhere": func(h nvidiatest.Host) {
			h.Link("/usr/lib/nvidia/current/nvidia-smi", "driver/etc/alternatives/nvidia--nvidia-smi")
		},
		"firmware appears":                 func(h nvidiatest.Host) { h.File("driver/lib/firmware/nvidia/"+nvidiatest.Version+"/gsp.bin", "") },
		"the module is unloaded":           func(h nvidiatest.Host) { h.Remove("proc/driver") },
		"the module is of another version": func(h nvidiatest.Host) { h.File("proc/driver/nvidia/version", "590.1") },
		"the same driver is reloaded between two calls": func(h nvidiatest.Host) {
			h.Remove("proc/driver")
			h.File("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  "+nvidiatest.Version+"\n")
		},
		"the module appears in sysfs": func(h nvidiatest.Host) { h.File("sys/module/nvidia/version", "590.1") },
	} {
		t.Run(name, func(t *testing.T) {
			h := nvidiatest.NewHost(t)
			before := Fingerprint(h.Paths())
			if again := Fingerprint(h.Paths()); again != before {
				t.Fatalf("%s, then %s without a change", before, again)
			}
			awaitNewFileTime(h)
			change(h)
			if Fingerprint(h.Paths()) == before {
				t.Error("the fingerprint did not change")
			}
		})
	}
}

// awaitNewFileTime returns when a new file would get a later time than the existing files. File
// times have coarse steps.
func awaitNewFileTime(h nvidiatest.Host) {
	h.File("clock", "x")
	before := durable.StampOf(filepath.Join(h.Root, "clock"))
	for durable.StampOf(filepath.Join(h.Root, "clock")) == before {
		h.File("clock", "x")
	}
}

func TestFingerprintIgnoresUnrelatedFiles(t *testing.T) {
	h := nvidiatest.NewHost(t)
	before := Fingerprint(h.Paths())
	h.File("driver/usr/lib64/libssl.so", "")
	h.File("driver/dev/tty", "")
	if err := os.Chmod(h.Root, 0o700); err != nil {
		t.Fatal(err)
	}
	if Fingerprint(h.Paths()) != before {
		t.Error("the fingerprint changed")
	}
}

func TestFingerprintChangesWithInstances(t *testing.T) {
	h := nvidiatest.NewHost(t)
	f := nvidiatest.NewMIG(h, 1)
	files := WithoutInstances(Fingerprint(h.Paths()))
	seen := map[string]bool{Fingerprint(h.Paths()): true}
	for _, change := range []func(){
		func() { f.Partition(t, 19, 0, 1) },
		func() { f.AddCompute(1, 0) },
		func() { f.Partition(t, 9, 4, 4) },
		func() { h.Remove(f.Folder(1)) },
	} {
		change()
		now := Fingerprint(h.Paths())
		if seen[now] || WithoutInstances(now) != files || now == files {
			t.Errorf("fingerprint after a change: %s", now)
		}
		seen[now] = true
	}
}
