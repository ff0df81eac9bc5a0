package nvidia

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
)

func TestCheckNamesMissingFileAndRemedy(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(fakeHost)
		says   []string
	}{
		{"all there", func(fakeHost) {}, nil},
		{"no library", func(h fakeHost) { h.remove("driver/usr/lib64/libnvidia-ml.so.1") },
			[]string{"libnvidia-ml.so.1 is not under the driver root", "set the driver root"}},
		{"no uvm", func(h fakeHost) { h.remove("driver/dev/nvidia-uvm") },
			[]string{"device node /run/nvidia/driver/dev/nvidia-uvm is missing", "nvidia-modprobe -u -c=0"}},
		{"no uvm tools", func(h fakeHost) { h.remove("driver/dev/nvidia-uvm-tools") },
			[]string{"/dev/nvidia-uvm-tools is missing", "nvidia-modprobe"}},
		{"uvm is a file", func(h fakeHost) { h.remove("driver/dev/nvidia-uvm"); h.file("driver/dev/nvidia-uvm", "") },
			[]string{"/dev/nvidia-uvm is missing"}},
		{"no control node", func(h fakeHost) { h.remove("driver/dev/nvidiactl") }, []string{"nvidiactl is missing", "nvidia-modprobe -c=255"}},
		{"no module", func(h fakeHost) { h.remove("driver/dev/nvidiactl"); h.remove("proc/driver") },
			[]string{"kernel module is not loaded", "modprobe nvidia"}},
		{"WSL2", func(h fakeHost) { h.node("driver/dev/dxg") }, []string{"Windows Subsystem for Linux"}},
		{"Tegra by release file", func(h fakeHost) { h.file("driver/etc/nv_tegra_release", "") }, []string{"Tegra"}},
		{"Tegra by SoC family", func(h fakeHost) { h.file("sys/devices/soc0/family", "Tegra\n") }, []string{"Tegra", "nodeSelector"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := newFakeHost(t)
			p := h.paths()
			p.DevRoot = p.DriverRoot
			tc.change(h)
			err := Check(p)
			if tc.says == nil {
				if err != nil {
					t.Error(err)
				}
				return
			}
			var unready *NotReadyError
			if !errors.As(err, &unready) {
				t.Fatalf("error is %v, want a NotReadyError", err)
			}
			for _, part := range tc.says {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("error %q does not contain %q", err, part)
				}
			}
		})
	}
}

func TestLibraryIsFoundInUsualDirectories(t *testing.T) {
	for _, dir := range driverroot.LibraryDirs() {
		h := fakeHost{t, t.TempDir()}
		h.file(dir+"/"+driverroot.NVML, "")
		if got, err := findLibrary(Paths{DriverRoot: h.root}); err != nil || got != filepath.Join(h.root, dir, driverroot.NVML) {
			t.Errorf("in %s: %s, %v", dir, got, err)
		}
	}
}

func TestOnlyNVIDIADisplayControllersAreGPUs(t *testing.T) {
	h := fakeHost{t, t.TempDir()}
	h.file("sys/bus/pci/devices/0000:00:01.0/vendor", "0x8086\n")
	h.file("sys/bus/pci/devices/0000:00:01.0/class", "0x030000\n")
	h.file("sys/bus/pci/devices/0000:07:00.0/vendor", "0x10de\n")
	h.file("sys/bus/pci/devices/0000:07:00.0/class", "0x068000\n")
	if found, err := HasNVIDIADevice(filepath.Join(h.root, "sys")); found || err != nil {
		t.Errorf("an Intel display and an NVSwitch: %v, %v", found, err)
	}
	h.file("sys/bus/pci/devices/0000:08:00.0/vendor", "0x10de\n")
	h.file("sys/bus/pci/devices/0000:08:00.0/class", "0x030000\n")
	if found, err := HasNVIDIADevice(filepath.Join(h.root, "sys")); !found || err != nil {
		t.Errorf("with a VGA card of NVIDIA: %v, %v", found, err)
	}
	if _, err := HasNVIDIADevice(filepath.Join(h.root, "nowhere")); err == nil {
		t.Error("an unreadable sysfs must not count as a node without GPUs")
	}
}

func TestLocateLeavesMissingFactsUnknown(t *testing.T) {
	for _, address := range []device.PCIAddress{"0000:99:00.0", "10000:01:00.0"} {
		g := device.GPU{PCIAddress: address}
		if locate(t.TempDir(), &g); g.PCIeRoot != "" || g.NUMANode != nil {
			t.Errorf("%s: %+v", address, g)
		}
	}
}

func TestFingerprintChangesWithScanInputs(t *testing.T) {
	for name, change := range map[string]func(fakeHost){
		"a GPU appears": func(h fakeHost) { h.gpuOnBus("0000:d1:00.0", "pci0000:cb", "1") },
		"a GPU is gone": func(h fakeHost) { h.remove("sys/bus/pci/devices/0000:c3:00.0") },
		"a GPU changes its kernel driver": func(h fakeHost) {
			h.link("../x/vfio-pci", "sys/devices/pci0000:15/0000:15:01.0/0000:1b:00.0/driver")
		},
		"a device node appears":             func(h fakeHost) { h.node("driver/dev/nvidia2") },
		"a device node is removed":          func(h fakeHost) { h.remove("driver/dev/nvidia-uvm") },
		"the driver's own dev is removed":   func(h fakeHost) { h.remove("driver/dev/nvidiactl") },
		"a library appears":                 func(h fakeHost) { h.file("driver/usr/lib64/libnvidia-nvvm.so.4", "") },
		"a library is replaced":             func(h fakeHost) { h.file("driver/usr/lib64/libcuda.so."+fakeVersion, "another") },
		"another directory has the library": func(h fakeHost) { h.file("driver/usr/lib/libnvidia-ml.so.1", "") },
		"nvidia-smi appears":                func(h fakeHost) { h.file("driver/usr/bin/nvidia-smi", "") },
		"firmware appears":                  func(h fakeHost) { h.file("driver/lib/firmware/nvidia/"+fakeVersion+"/gsp.bin", "") },
		"the module is unloaded":            func(h fakeHost) { h.remove("proc/driver") },
		"the module is of another version":  func(h fakeHost) { h.file("proc/driver/nvidia/version", "590.1") },
		"the same driver is reloaded between two calls": func(h fakeHost) {
			h.remove("proc/driver")
			h.file("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  "+fakeVersion+"\n")
		},
		"the module appears in sysfs": func(h fakeHost) { h.file("sys/module/nvidia/version", "590.1") },
	} {
		t.Run(name, func(t *testing.T) {
			h := newFakeHost(t)
			detector := NewChangeDetector(h.paths())
			// At this time the ChangeDetector still uses its cached directory listings.
			detector.now = func() time.Time { return time.Now().Add(relistInterval / 2) }
			before := detector.Fingerprint()
			if again := detector.Fingerprint(); again != before {
				t.Fatalf("%s, then %s without a change", before, again)
			}
			h.awaitNewFileTime()
			change(h)
			after := detector.Fingerprint()
			if after == before {
				t.Error("the fingerprint did not change")
			}
			if fresh := NewChangeDetector(h.paths()).Fingerprint(); fresh != after {
				t.Errorf("got %s, but %s from a new detector", after, fresh)
			}
		})
	}
}

// awaitNewFileTime returns when a new file would get a later time than the existing files. File
// times have coarse steps.
func (h fakeHost) awaitNewFileTime() {
	h.file("clock", "x")
	before := durable.StampOf(filepath.Join(h.root, "clock"))
	for durable.StampOf(filepath.Join(h.root, "clock")) == before {
		h.file("clock", "x")
	}
}

func TestFingerprintIgnoresUnrelatedFiles(t *testing.T) {
	h := newFakeHost(t)
	before := NewChangeDetector(h.paths()).Fingerprint()
	h.file("driver/usr/lib64/libssl.so", "")
	h.file("driver/dev/tty", "")
	if err := os.Chmod(h.root, 0o700); err != nil {
		t.Fatal(err)
	}
	if NewChangeDetector(h.paths()).Fingerprint() != before {
		t.Error("the fingerprint changed")
	}
}
