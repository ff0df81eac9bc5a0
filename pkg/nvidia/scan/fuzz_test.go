package scan

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
)

// The test expects only possible device numbers from any content of the kernel's list of devices.
func FuzzDeviceNumbers(f *testing.F) {
	for _, list := range []string{
		"Character devices:\n195 nvidia\n234 nvidia-caps\n\nBlock devices:\n259 nvidia\n", "", "4096 nvidia", "-1 nvidia", "195 nvidia x",
		"1 mem\n195 nvidiactl", "Block devices:\n195 nvidia-caps",
	} {
		f.Add([]byte(list), "nvidia0", uint32(195), uint32(0))
	}
	f.Add([]byte("195 nvidia"), "nvidia18446744073709551616", uint32(195), uint32(0))
	f.Add([]byte("195 nvidia"), "nvidiactl", uint32(195), uint32(255))
	proc := f.TempDir()
	f.Fuzz(func(t *testing.T, list []byte, name string, major, minor uint32) {
		if err := os.WriteFile(filepath.Join(proc, "devices"), list, 0o600); err != nil {
			t.Fatal(err)
		}
		found, err := host.Majors(nvidia.Paths{Proc: proc})
		if err != nil {
			t.Fatal(err)
		}
		majors := slices.Collect(maps.Values(found))
		for _, m := range majors {
			if m >= 1<<12 {
				t.Errorf("%q has major number %d", list, m)
			}
		}
		number := unix.Mkdev(major, minor)
		if err := checkNumber(name, number, majors); err == nil && len(majors) > 0 {
			if m := unix.Major(number); m != majorDRM && !slices.Contains(majors, m) {
				t.Errorf("%q: %s may have major number %d", list, name, m)
			}
		}
	})
}

// The test expects a GPU from sysfs only for a valid PCI address whose files describe an NVIDIA
// display controller.
func FuzzPCIFunction(f *testing.F) {
	f.Add("0000:1b:00.0", []byte("0x10de\n"), []byte("0x030200\n"), []byte("1\n"))
	f.Add("0000:1B:00.0", []byte("0x10de"), []byte("0x03"), []byte("-1"))
	f.Add("1b:00.0", []byte("0x10DE"), []byte(""), []byte("99999999999999999999"))
	f.Add("..", []byte("0x10de"), []byte("0x0300"), []byte("\x00"))
	f.Fuzz(func(t *testing.T, name string, vendor, class, numa []byte) {
		if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") || len(name) > 255 {
			return // not a valid directory name
		}
		sysfs := t.TempDir()
		dir := filepath.Join(sysfs, "bus", "pci", "devices", name)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		for file, content := range map[string][]byte{"vendor": vendor, "class": class, "numa_node": numa} {
			if err := os.WriteFile(filepath.Join(dir, file), content, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		gpus, err := host.GPUs(sysfs)
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range gpus {
			if parsed, err := device.ParsePCIAddress(string(a)); err != nil || parsed != a {
				t.Errorf("%q is a card at %q", name, a)
			}
			g := device.GPU{PCIAddress: a}
			locate(sysfs, &g)
			_, _ = host.Driver(sysfs, a), host.Incarnation(nvidia.Paths{Sysfs: sysfs}, a)
		}
		if len(gpus) > 0 && !slices.Equal([]string{string(gpus[0])}, []string{strings.ToLower(name)}) {
			t.Errorf("%q is listed as %v", name, gpus)
		}
	})
}

// The test expects that the cgroup directory of a process is below the cgroup root, whatever /proc
// says.
func FuzzGroupOfProcess(f *testing.F) {
	for _, text := range []string{"0::/kubepods/x\n", "", "0::", "0::/../../etc", "1:name=systemd:/x\n0::y\n"} {
		f.Add([]byte(text))
	}
	proc := f.TempDir()
	if err := os.Mkdir(filepath.Join(proc, "self"), 0o700); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		if err := os.WriteFile(filepath.Join(proc, "self", "cgroup"), text, 0o600); err != nil {
			t.Fatal(err)
		}
		if group := groupBelow(proc, "/cg"); group != "" && group != "/cg" && !strings.HasPrefix(group, "/cg/") {
			t.Errorf("%q is group %q", text, group)
		}
	})
}
