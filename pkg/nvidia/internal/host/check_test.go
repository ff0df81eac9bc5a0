package host

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
)

func TestNVMLIsLoadedOnlyFromDriverRoot(t *testing.T) {
	for name, plant := range map[string]func(h nvidiatest.Host, path string){
		"a symlink out": func(h nvidiatest.Host, path string) {
			h.File("etc/own.so", "no ELF")
			h.Link(filepath.Join(h.Root, "etc/own.so"), path)
		},
		"a symlink with ..": func(h nvidiatest.Host, path string) {
			h.File("etc/own.so", "no ELF")
			h.Link("../../../etc/own.so", path)
		},
		"a pipe":      func(h nvidiatest.Host, path string) { h.Pipe(path) },
		"a device":    func(h nvidiatest.Host, path string) { h.Node(path) },
		"a directory": func(h nvidiatest.Host, path string) { h.File(path+"/x", "") },
	} {
		t.Run(name, func(t *testing.T) {
			h := nvidiatest.NewHost(t)
			h.Remove("driver/usr/lib64/libnvidia-ml.so.1")
			plant(h, "driver/usr/lib64/libnvidia-ml.so.1")
			if path, err := Library(h.Paths()); err == nil {
				t.Errorf("%s would be loaded", path)
			}
		})
	}
}

func TestCheckNamesMissingFileAndRemedy(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(nvidiatest.Host)
		says   []string
	}{
		{"all there", func(nvidiatest.Host) {}, nil},
		{"no library", func(h nvidiatest.Host) { h.Remove("driver/usr/lib64/libnvidia-ml.so.1") },
			[]string{"libnvidia-ml.so.1 is not under the driver root", "set the driver root"}},
		{"no uvm", func(h nvidiatest.Host) { h.Remove("driver/dev/nvidia-uvm") },
			[]string{"device node /run/nvidia/driver/dev/nvidia-uvm is missing", "nvidia-modprobe -u -c=0"}},
		{"no uvm tools", func(h nvidiatest.Host) { h.Remove("driver/dev/nvidia-uvm-tools") }, nil},
		{"uvm is a file", func(h nvidiatest.Host) { h.Remove("driver/dev/nvidia-uvm"); h.File("driver/dev/nvidia-uvm", "") },
			[]string{"/dev/nvidia-uvm is missing"}},
		{"no control node", func(h nvidiatest.Host) { h.Remove("driver/dev/nvidiactl") },
			[]string{"nvidiactl is missing", "nvidia-modprobe -c=255"}},
		{"no module", func(h nvidiatest.Host) { h.Remove("driver/dev/nvidiactl"); h.Remove("proc/driver") },
			[]string{"kernel module is not loaded", "modprobe nvidia"}},
		{"WSL2", func(h nvidiatest.Host) { h.Node("driver/dev/dxg") }, []string{"Windows Subsystem for Linux"}},
		{"Tegra by release file", func(h nvidiatest.Host) { h.File("driver/etc/nv_tegra_release", "") }, []string{"Tegra"}},
		{"Tegra by SoC family", func(h nvidiatest.Host) { h.File("sys/devices/soc0/family", "Tegra\n") }, []string{"Tegra", "nodeSelector"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := nvidiatest.NewHost(t)
			p := h.Paths()
			p.DevRoot = p.DriverRoot
			tc.change(h)
			err := Check(p)
			if tc.says == nil {
				if err != nil {
					t.Error(err)
				}
				return
			}
			var unready *nvidia.NotReadyError
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
		h := nvidiatest.EmptyHost(t)
		h.File(dir+"/"+driverroot.NVML, "")
		if got, err := Library(nvidia.Paths{DriverRoot: h.Root}); err != nil || got != filepath.Join(h.Root, dir, driverroot.NVML) {
			t.Errorf("in %s: %s, %v", dir, got, err)
		}
	}
}
