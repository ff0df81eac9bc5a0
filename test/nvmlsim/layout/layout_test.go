package layout

import (
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/vfio"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// options returns the Options with which Up creates a simulated node in a new temporary folder.
func options(t *testing.T, node string, kind Kind) Options {
	t.Helper()
	if out, err := exec.Command("make", "-s", "-C", "..", "library").CombinedOutput(); err != nil {
		t.Fatalf("build the simulated library: %v\n%s", err, out)
	}
	models, err := model.ReadGPUs("../models")
	if err != nil {
		t.Fatal(err)
	}
	described, err := model.ReadNode("../nodes/"+node+".yaml", "seed")
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	smi := filepath.Join(folder, "smi")
	if err := os.WriteFile(smi, []byte("#!/bin/sh\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	dev := filepath.Join(folder, "dev")
	if err := os.Mkdir(dev, 0o755); err != nil {
		t.Fatal(err)
	}
	return Options{
		Root:    filepath.Join(folder, "root"),
		Config:  Config{Kind: kind, Node: described, Dev: dev, PlainDevices: os.Getuid() != 0},
		Models:  models,
		Seed:    "seed",
		Sources: Sources{Library: "../../../build/nvmlsim/libnvidia-ml.so.1", SMI: smi},
	}
}

func up(t *testing.T, o Options) *Config {
	t.Helper()
	c, err := Up(o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// change calls do with the state file of the simulated node c, and fails the test if do returns an
// error.
func change(t *testing.T, c *Config, do func(*state.File) error) {
	t.Helper()
	f, err := state.Open(StatePath(c.root))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(do(f), f.Close()); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, parts ...string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(parts...))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func exists(parts ...string) bool {
	_, err := os.Lstat(filepath.Join(parts...))
	return err == nil
}

func TestDriverRootOfEachKind(t *testing.T) {
	for kind, want := range map[Kind]struct{ libraries, smi string }{
		Host:      {"usr/lib/" + multiarch(), "usr/bin/nvidia-smi"},
		Container: {"usr/lib/" + multiarch(), "usr/bin/nvidia-smi"},
		Bare:      {"lib64", "bin/nvidia-smi"},
	} {
		t.Run(string(kind), func(t *testing.T) {
			c := up(t, options(t, "dgx-h100", kind))
			root := c.DriverRoot()
			for _, name := range []string{"libnvidia-ml", "libcuda", "libnvidia-ptxjitcompiler"} {
				file, err := elf.Open(filepath.Join(root, want.libraries, name+".so.580.65.06"))
				if err != nil {
					t.Fatal(err)
				}
				soname, err := file.DynString(elf.DT_SONAME)
				if err != nil || len(soname) != 1 || soname[0] != name+".so.1" {
					t.Errorf("SONAME of %s: %v (%v)", name, soname, err)
				}
				if target, err := os.Readlink(filepath.Join(root, want.libraries, name+".so.1")); err != nil || target != name+".so.580.65.06" {
					t.Errorf("link of %s: %q (%v)", name, target, err)
				}
				_ = file.Close()
			}
			if info, err := os.Stat(filepath.Join(root, want.smi)); err != nil || info.Mode().Perm() != 0o755 {
				t.Errorf("nvidia-smi: %v (%v)", info, err)
			}
			master, err := os.Stat(StatePath(c.root))
			if err != nil {
				t.Fatal(err)
			}
			linked, err := os.Stat(filepath.Join(root, "lib/firmware/nvidia/580.65.06", StateFile))
			if err != nil || !os.SameFile(master, linked) {
				t.Errorf("the state in the firmware folder is not the state file: %v", err)
			}
			if got, want := exists(root, "dev/nvidia7"), kind == Container; got != want {
				t.Errorf("device nodes in the driver root: %t, want %t", got, want)
			}
			if got, want := exists(c.Dev, "nvidia7"), kind != Container; got != want {
				t.Errorf("device nodes in /dev: %t, want %t", got, want)
			}
			if exists(root, "bin/sh") {
				t.Error("there is a shell")
			}
		})
	}
}

func TestProcTree(t *testing.T) {
	c := up(t, options(t, "mixed", Host))
	minors := strings.Split(strings.TrimSuffix(read(t, c.root, "proc/driver/nvidia-caps/mig-minors"), "\n"), "\n")
	if len(minors) != 4322 {
		t.Errorf("%d lines in mig-minors, want 4322", len(minors))
	}
	have := map[string]bool{}
	for _, line := range minors {
		have[line] = true
	}
	for _, line := range []string{
		"config 1", "monitor 2", "gpu0/gi0/access 3", "gpu0/gi0/ci0/access 4", "gpu3/gi3/ci3/access 439", "gpu6/gi11/ci5/access 918",
		"gpu31/gi14/ci7/access 4322",
	} {
		if !have[line] {
			t.Errorf("mig-minors has no line %q", line)
		}
	}
	if got, want := read(t, c.root, "proc/driver/nvidia/capabilities/mig/config"),
		"DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 1\n"; got != want {
		t.Errorf("mig/config is %q, want %q", got, want)
	}
	information := read(t, c.root, "proc/driver/nvidia/gpus/0000:31:00.0/information")
	for _, line := range []string{"Model: \t\t NVIDIA A30\n", "Bus Location: \t 0000:31:00.0\n", "Device Minor: \t 0\n", "GPU UUID: \t GPU-"} {
		if !strings.Contains(information, line) {
			t.Errorf("information has no %q:\n%s", line, information)
		}
	}
	const bootID = "proc/sys/kernel/random/boot_id"
	if own := read(t, "/", bootID); read(t, c.root, bootID) != own {
		t.Errorf("%s is not the machine's own, %s", bootID, own)
	}
	devices := read(t, c.root, "proc/devices")
	if !regexp.MustCompile(`(?s)^Character devices:\n(.*\n)?195 nvidia\n195 nvidiactl\n.*\n\d{3} nvidia-caps\n.*\nBlock devices:\n`).
		MatchString(devices) {
		t.Errorf("proc/devices:\n%s", devices)
	}
	if !strings.HasPrefix(read(t, c.root, "proc/driver/nvidia/version"), "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  ") {
		t.Error("version file")
	}
}

func TestSysfsTree(t *testing.T) {
	c := up(t, options(t, "dgx-h100", Host))
	sys := filepath.Join(c.root, "sys")
	gpu := filepath.Join(sys, "bus/pci/devices/0000:9d:00.0")
	for name, want := range map[string]string{
		"vendor": "0x10de\n", "device": "0x2330\n", "class": "0x030200\n", "numa_node": "1\n",
		"subsystem_vendor": "0x10de\n", "subsystem_device": "0x16c1\n", "driver_override": "(null)\n",
		"modalias": "pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00\n",
	} {
		if got := read(t, gpu, name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	path, err := filepath.EvalSymlinks(gpu)
	if err != nil || !strings.HasSuffix(path, "/sys/devices/pci0000:97/0000:97:01.0/0000:9d:00.0") {
		t.Errorf("the device lies at %s (%v)", path, err)
	}
	if driver, err := filepath.EvalSymlinks(filepath.Join(gpu, "driver")); err != nil || filepath.Base(driver) != "nvidia" {
		t.Errorf("driver %s (%v)", driver, err)
	}
	if got := read(t, sys, "bus/pci/devices/0000:07:00.0/class"); got != "0x068000\n" {
		t.Errorf("class of the NVSwitch is %q", got)
	}
	if got := read(t, sys, "bus/pci/devices/0000:18:00.0/vendor"); got != "0x15b3\n" {
		t.Errorf("vendor of the network card is %q", got)
	}
}

// A virtual machine reserves this address space: 128 GiB of frame buffer and two small regions,
// rounded up to a power of two.
func TestGPUsHaveMemoryRegions(t *testing.T) {
	c := up(t, options(t, "dgx-h100", Host))
	if got, err := vfio.AddressableMemory(c.SysPath(), "0000:1b:00.0"); err != nil || got != 256<<30 {
		t.Errorf("the GPU takes %d bytes of address space, %v", got, err)
	}
	for _, function := range []device.PCIAddress{"0000:15:01.0", "0000:07:00.0"} { // a bridge and an NVSwitch
		if got, err := vfio.AddressableMemory(c.SysPath(), function); err != nil || got != 0 {
			t.Errorf("%s takes %d bytes, %v", function, got, err)
		}
	}
}

func TestGB200HasItsOwnPCIDomains(t *testing.T) {
	c := up(t, options(t, "gb200-tray", Host))
	path, err := filepath.EvalSymlinks(filepath.Join(c.root, "sys/bus/pci/devices/0018:01:00.0"))
	if err != nil || !strings.Contains(path, "/devices/pci0018:00/") {
		t.Errorf("the device lies at %s (%v)", path, err)
	}
	if !exists(c.root, "proc/driver/nvidia/gpus/0018:01:00.0/information") {
		t.Error("no information file")
	}
}

func TestDeviceNodesHaveTheDriversNumbers(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes")
	}
	c := up(t, options(t, "mixed", Host))
	numbers := map[string]uint32{}
	for line := range strings.Lines(read(t, c.root, "proc/devices")) {
		var major uint32
		var name string
		if n, _ := fmt.Sscanf(line, "%d %s", &major, &name); n == 2 {
			numbers[name] = major
		}
	}
	for name, want := range map[string][2]uint32{
		"nvidia0": {195, 0}, "nvidia3": {195, 3}, "nvidiactl": {195, 255}, "nvidia-modeset": {195, 254},
		"nvidia-uvm": {numbers["nvidia-uvm"], 0}, "nvidia-uvm-tools": {numbers["nvidia-uvm"], 1},
		"nvidia-caps/nvidia-cap1": {numbers["nvidia-caps"], 1}, "nvidia-caps/nvidia-cap2": {numbers["nvidia-caps"], 2},
	} {
		var info unix.Stat_t
		if err := unix.Stat(filepath.Join(c.Dev, name), &info); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if unix.Major(info.Rdev) != want[0] || unix.Minor(info.Rdev) != want[1] || info.Mode&unix.S_IFMT != unix.S_IFCHR {
			t.Errorf("%s is %d:%d, want %d:%d", name, unix.Major(info.Rdev), unix.Minor(info.Rdev), want[0], want[1])
		}
		// No kernel driver handles this device number, so opening the device node fails with ENXIO or
		// ENODEV. The simulated library takes these errors as proof that the process has the device node.
		if _, err := os.Open(filepath.Join(c.Dev, name)); !errors.Is(err, unix.ENXIO) && !errors.Is(err, unix.ENODEV) {
			t.Errorf("open %s: %v, want ENXIO", name, err)
		}
	}
}

func TestDeviceNodesCreatedLater(t *testing.T) {
	o := options(t, "l40s-x2", Host)
	o.Config.NoDevices, o.Config.NoUVM = true, true
	c := up(t, o)
	if exists(c.Dev, "nvidiactl") || exists(c.Dev, "nvidia-uvm") {
		t.Error("device nodes are there at once")
	}
	change(t, c, func(f *state.File) error { return c.MakeDevices(f, false) })
	if !exists(c.Dev, "nvidiactl") || !exists(c.Dev, "nvidia1") || exists(c.Dev, "nvidia-uvm") {
		t.Error("device nodes without uvm: not as asked")
	}
	change(t, c, func(f *state.File) error { return c.MakeDevices(f, true) })
	if !exists(c.Dev, "nvidia-uvm") || !exists(c.Dev, "nvidia-uvm-tools") {
		t.Error("no uvm nodes")
	}
}

func TestDriverInstalledLater(t *testing.T) {
	for _, kind := range []Kind{Host, Container, Bare} {
		t.Run(string(kind), func(t *testing.T) {
			o := options(t, "l40s-x2", kind)
			o.NoDriver = true
			c := up(t, o)
			if exists(c.DriverRoot(), "lib") || exists(c.DeviceDir(), "nvidiactl") || exists(c.root, "proc/driver/nvidia") {
				t.Error("there is a driver at once")
			}
			if strings.Contains(read(t, c.root, "proc/devices"), "nvidia") || exists(c.root, "sys/bus/pci/devices/0000:3d:00.0/driver") {
				t.Error("the kernel shows a driver at once")
			}
			if !exists(c.root, "sys/bus/pci/devices/0000:3d:00.0") {
				t.Error("the hardware is not there")
			}
			loaded, err := Load(c.root)
			if err != nil {
				t.Fatal(err)
			}
			change(t, loaded, func(f *state.File) error { return loaded.DriverBack(f, "", "") })
			if !exists(c.DriverRoot(), c.LibraryDir, "libcuda.so.580.95.05") || !exists(c.DeviceDir(), "nvidia1") ||
				!exists(c.root, "proc/driver/nvidia/version") {
				t.Error("the driver did not come")
			}
		})
	}
}

func TestReloadChangesVersionAndKeepsState(t *testing.T) {
	c := up(t, options(t, "l40s-x2", Host))
	before, err := os.Stat(StatePath(c.root))
	if err != nil {
		t.Fatal(err)
	}
	directory, err := os.Open(filepath.Join(c.root, "proc/driver/nvidia")) // keeps its inode in use
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = directory.Close() }()
	change(t, c, func(f *state.File) error { return c.DriverReload(f, "590.48.01", "13.1", false) })
	old, _ := directory.Stat()
	if loaded, err := os.Stat(directory.Name()); err != nil || os.SameFile(old, loaded) {
		t.Errorf("/proc/driver/nvidia is the directory of before the reload (%v)", err)
	}
	libraries := filepath.Join(c.DriverRoot(), c.LibraryDir)
	if exists(libraries, "libcuda.so.580.95.05") || exists(c.DriverRoot(), "lib/firmware/nvidia/580.95.05") {
		t.Error("files of the old version are left")
	}
	if target, err := os.Readlink(filepath.Join(libraries, "libnvidia-ml.so.1")); err != nil || target != "libnvidia-ml.so.590.48.01" {
		t.Errorf("libnvidia-ml.so.1 leads to %q (%v)", target, err)
	}
	after, err := os.Stat(filepath.Join(c.DriverRoot(), "lib/firmware/nvidia/590.48.01", StateFile))
	if err != nil || !os.SameFile(before, after) {
		t.Errorf("another state file: %v", err)
	}
}

// Calling Up again on the same root simulates a reboot. A GPU that was lost before must stay lost:
// the driver does not find it. Settings such as the compute mode must be reset.
func TestRebootKeepsState(t *testing.T) {
	o := options(t, "dgx-h100", Host)
	c := up(t, o)
	change(t, c, func(f *state.File) error {
		f.GPU(1).ComputeMode = 3
		return f.Lose(2)
	})
	up(t, o)
	change(t, c, func(f *state.File) error {
		if f.GPU(2).Lost != 1 || f.GPU(2).Present != 0 || f.GPU(1).ComputeMode != 0 {
			t.Errorf("after the reboot: lost %d, present %d, compute mode %d", f.GPU(2).Lost, f.GPU(2).Present, f.GPU(1).ComputeMode)
		}
		return nil
	})
	if exists(c.root, "sys/bus/pci/devices/0000:52:00.0") || exists(c.root, "proc/driver/nvidia/gpus/0000:52:00.0") {
		t.Error("the lost GPU is still shown")
	}
	if next := read(t, c.root, "proc/driver/nvidia/gpus/0000:61:00.0/information"); !strings.Contains(next, "Device Minor: \t 2\n") {
		t.Errorf("the next GPU has not the lost one's number:\n%s", next)
	}
	o.Fresh = true
	up(t, o)
	if !exists(c.root, "proc/driver/nvidia/gpus/0000:52:00.0") {
		t.Error("a fresh node has a lost GPU")
	}
}

// A second Up with the same options must not replace any file, because a plugin may be reading it.
func TestApplyTwiceChangesNothing(t *testing.T) {
	o := options(t, "dgx-h100", Host)
	c := up(t, o)
	inodes := func() map[string]uint64 {
		found := map[string]uint64{}
		for _, folder := range []string{"sys", "proc", "driver", "../dev"} {
			root := filepath.Join(c.root, folder)
			if err := filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
				var info unix.Stat_t
				err = errors.Join(err, unix.Lstat(path, &info))
				found[path] = info.Ino
				return err
			}); err != nil {
				t.Fatal(err)
			}
		}
		return found
	}
	before := inodes()
	up(t, o)
	after := inodes()
	if len(before) < 300 || len(before) != len(after) {
		t.Errorf("%d files before, %d after", len(before), len(after))
	}
	for path, inode := range before {
		if after[path] != inode {
			t.Errorf("%s was made anew", path)
		}
	}
}

func TestAnotherNodeNeedsFreshState(t *testing.T) {
	o := options(t, "dgx-h100", Host)
	up(t, o)
	other := options(t, "mixed", Host)
	o.Config.Node = other.Config.Node
	if _, err := Up(o); err == nil || !strings.Contains(err.Error(), "--fresh") {
		t.Errorf("error %v does not name the way out", err)
	}
	o.Fresh = true
	up(t, o)
}

func TestDownLeavesNothing(t *testing.T) {
	c := up(t, options(t, "mixed", Host))
	mine := filepath.Join(c.Dev, "zero")
	if err := os.WriteFile(mine, []byte("not ours"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Down(c.root); err != nil {
		t.Fatal(err)
	}
	if exists(c.root) {
		t.Error("the root is still there")
	}
	left, err := os.ReadDir(c.Dev)
	if err != nil || len(left) != 1 || left[0].Name() != "zero" {
		t.Errorf("left in /dev: %v (%v)", left, err)
	}
}

func TestDownKeepsForeignFiles(t *testing.T) {
	c := up(t, options(t, "t4-x1", Host))
	path := filepath.Join(c.Dev, "nvidiactl")
	if err := errors.Join(os.Remove(path), os.WriteFile(path, []byte("something"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := Down(c.root); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("error %v does not name %s", err, path)
	}
}

func TestInvalidOptionsAreNamed(t *testing.T) {
	for what, spoil := range map[string]struct {
		do   func(*Options)
		want string
	}{
		"kind":    {func(o *Options) { o.Config.Kind = "odd" }, "odd"},
		"library": {func(o *Options) { o.Sources.Library = "" }, "--lib"},
		"libdir":  {func(o *Options) { o.Config.LibraryDir = "../up" }, "../up"},
		"model":   {func(o *Options) { o.Models = nil }, "h100-sxm5-80gb.yaml"},
	} {
		t.Run(what, func(t *testing.T) {
			o := options(t, "dgx-h100", Host)
			spoil.do(&o)
			if _, err := Up(o); err == nil || !strings.Contains(err.Error(), spoil.want) {
				t.Errorf("error %v does not name %q", err, spoil.want)
			}
		})
	}
}
