package scan

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

func TestUsersAreFoundByDeviceNumber(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes with the driver's numbers")
	}
	root := t.TempDir()
	process := func(pid int, comm, cgroup, maps string, files ...string) {
		dir := filepath.Join(root, "proc", fmt.Sprint(pid))
		err := os.MkdirAll(filepath.Join(dir, "fd"), 0o750)
		for name, text := range map[string]string{"comm": comm, "cgroup": cgroup, "maps": maps} {
			err = errors.Join(err, os.WriteFile(filepath.Join(dir, name), []byte(text+"\n"), 0o600))
		}
		for fd, file := range files {
			err = errors.Join(err, os.Symlink(file, filepath.Join(dir, "fd", fmt.Sprint(fd))))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	node := func(path string, major, minor uint32) string {
		path = filepath.Join(root, path)
		err := os.MkdirAll(filepath.Dir(path), 0o750)
		if err = errors.Join(err, unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(major, minor)))); err != nil {
			t.Fatal(err)
		}
		return path
	}
	host, container := node("dev/nvidia3", 195, 3), node("container/dev/nvidia3", 195, 3)
	other, control := node("dev/nvidia4", 195, 4), node("dev/nvidiactl", 195, 255)
	process(10, "dcgm", "0::/system.slice", "", "/dev/null", control, host)
	process(11, "python", "0::/kubepods.slice/kubepods-pod1b4e28ba_2fa1_11d2_883f_0016d3cca427.slice/x.scope", "", container)
	process(12, "elsewhere", "0::/", "", other, control)
	process(13, "mapper", "0::/kubepods/burstable/pod1b4e28ba-2fa1-11d2-883f-0016d3cca428/x",
		"7f00-7f01 rw-s 00000000 00:05 600  /dev/nvidia3")
	// Of the GPU's DRM devices, one process has one open, and one has the mapping of a buffer.
	render := node("dev/dri/renderD129", 226, 129)
	node("sys/bus/pci/devices/0000:1b:00.0/drm/renderD129/x", 226, 129)
	number := filepath.Join(root, "sys/bus/pci/devices/0000:1b:00.0/drm/renderD129/dev")
	if err := os.WriteFile(number, []byte("226:129\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	process(18, "egl", "0::/", "", render)
	process(19, "gbm", "0::/", "7f00-7f01 rw-s 00000000 00:05 600  /dev/dri/renderD129")
	process(20, "other card", "0::/", "7f00-7f01 rw-s 00000000 00:05 600  /dev/dri/renderD128", node("dev/dri/renderD128", 226, 128))
	process(14, "ourselves", "0::/", "", host)
	if err := os.Symlink("14", filepath.Join(root, "proc", "self")); err != nil {
		t.Fatal(err)
	}
	want := []nvidia.Process{
		{PID: 10, Name: "dcgm"}, {PID: 11, Name: "python", Pod: "1b4e28ba-2fa1-11d2-883f-0016d3cca427"},
		{PID: 13, Name: "mapper", Pod: "1b4e28ba-2fa1-11d2-883f-0016d3cca428"},
		{PID: 18, Name: "egl"}, {PID: 19, Name: "gbm"},
	}
	paths := nvidia.Paths{Proc: filepath.Join(root, "proc"), Sysfs: filepath.Join(root, "sys")}
	gpus := []device.GPU{
		{PCIAddress: "0000:1b:00.0", Minor: 3}, {PCIAddress: "0000:43:00.0", Minor: 4}, {PCIAddress: "0000:52:00.0", Minor: 5},
	}
	if diff := cmp.Diff(want, Users(paths, gpus[:1])["0000:1b:00.0"]); diff != "" {
		t.Error(diff)
	}
	// Of several GPUs, without those of the plugin. The plugin of NVIDIA's DRA driver has the plugin's
	// name.
	own, _ := os.ReadFile("/proc/self/comm")
	namesake := nvidia.Process{PID: 17, Name: strings.TrimSpace(string(own))}
	for _, pid := range []int{15, 17} {
		process(pid, namesake.Name, "0::/", "", host)
	}
	if err := os.WriteFile(filepath.Join(root, "proc/15/environ"), []byte("HOME=/\x00GPU_DRA_DRIVER_CHILD=1\x00"), 0o600); err != nil {
		t.Fatal(err)
	}
	three, four := gpus[0].PCIAddress, gpus[1].PCIAddress
	withSelf := slices.Insert(slices.Clone(want), 3, nvidia.Process{PID: 14, Name: "ourselves"}, namesake)
	foreign := map[device.PCIAddress][]nvidia.Process{three: withSelf, four: {{PID: 12, Name: "elsewhere"}}}
	if err := os.Remove(filepath.Join(root, "proc", "self")); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(foreign, Foreign(paths, gpus)); diff != "" {
		t.Error(diff)
	}
	all := Users(paths, gpus)
	if len(all[three]) != len(foreign[three])+1 || len(all[four]) != len(foreign[four]) {
		t.Errorf("with those of the plugin: %v", all)
	}
	if text := all[three][4].String(); text != namesake.Name+" (process 15, of this driver)" {
		t.Error(text)
	}
	if text := want[1].String(); text != "python (process 11, Pod 1b4e28ba-2fa1-11d2-883f-0016d3cca427)" {
		t.Error(text)
	}
}
