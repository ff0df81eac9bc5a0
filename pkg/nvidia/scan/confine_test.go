package scan

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
)

// secret is a host file whose name looks like a driver library.
const secret = "etc/libsecret.so." + nvidiatest.Version

// hostile are driver roots with files that could lead the container runtime to files outside the
// driver root. The runtime mounts the driver's files into tenants' containers.
var hostile = map[string]struct {
	plant func(h nvidiatest.Host)
	// reason must be in the problem that the scan reports. If reason is empty, the scan ignores the
	// planted file and reports no problem.
	reason string
	// unready says that without the file the node can offer nothing.
	unready bool
}{
	"a library that is an absolute symlink to a host file": {func(h nvidiatest.Host) {
		h.Link(filepath.Join(h.Root, secret), "driver/usr/lib64/libnvidia-ptxjitcompiler.so."+nvidiatest.Version)
	}, "", false},
	"a library that is a symlink with ..": {func(h nvidiatest.Host) {
		h.Link("../../../"+secret, "driver/usr/lib64/libnvidia-ptxjitcompiler.so."+nvidiatest.Version)
	}, "", false},
	"a library behind two symlinks": {func(h nvidiatest.Host) {
		h.Link("step", "driver/usr/lib64/libnvidia-ptxjitcompiler.so."+nvidiatest.Version)
		h.Link("/../../"+h.Root+"/"+secret, "driver/usr/lib64/step")
	}, "", false},
	"a program that is a symlink out": {func(h nvidiatest.Host) {
		h.Link(filepath.Join(h.Root, secret), "driver/usr/bin/nvidia-smi")
		h.Must(os.Chmod(filepath.Join(h.Root, secret), 0o755))
	}, `"nvidia-smi"`, false},
	"a configuration that is a symlink out": {func(h nvidiatest.Host) {
		h.Link("../../../../"+secret, "driver/usr/share/glvnd/egl_vendor.d/10_nvidia.json")
		h.Link(filepath.Join(h.Root, secret), "driver/etc/vulkan/icd.d/nvidia_icd.json")
	}, "", false},
	"firmware that is a symlink out": {func(h nvidiatest.Host) {
		h.Link(filepath.Join(h.Root, secret), "driver/lib/firmware/nvidia/"+nvidiatest.Version+"/gsp_ga10x.bin")
	}, "", false},
	"a library that is a pipe": {func(h nvidiatest.Host) {
		h.Pipe("driver/usr/lib64/libnvidia-ptxjitcompiler.so." + nvidiatest.Version)
		// The scan's child process hangs when it opens the pipe, so the parent kills it.
	}, "has not answered", true},
	"a library that is a device": {func(h nvidiatest.Host) {
		h.Node("driver/usr/lib64/libnvidia-ptxjitcompiler.so." + nvidiatest.Version)
	}, "is not a file but", false},
	"an endless library": {func(h nvidiatest.Host) {
		h.File("driver/usr/lib64/libnvidia-ptxjitcompiler.so."+nvidiatest.Version, "")
		h.Must(os.Truncate(filepath.Join(h.Root, "driver/usr/lib64/libnvidia-ptxjitcompiler.so."+nvidiatest.Version), 1<<42))
	}, "", false},
	"a library directory that is a symlink out": {func(h nvidiatest.Host) {
		h.Must(os.Rename(filepath.Join(h.Root, "driver/usr/lib64"), filepath.Join(h.Root, "etc/lib64")))
		h.Link(filepath.Join(h.Root, "etc/lib64"), "driver/usr/lib64")
	}, "are not complete under", true},
	"a GPU's device node that is a symlink": {func(h nvidiatest.Host) {
		h.Remove("driver/dev/nvidia0")
		h.Link(filepath.Join(h.Root, "driver/dev/nvidia1"), "driver/dev/nvidia0")
	}, "GPU", false},
}

// The test expects that no container gets a file from outside the driver root, whatever the driver
// root contains.
func TestHostileDriverRootExposesNoHostFiles(t *testing.T) {
	for name, c := range hostile {
		t.Run(name, func(t *testing.T) {
			h := nvidiatest.NewHost(t)
			h.File(secret, "root:$6$:1:0:99999:7:::\n")
			c.plant(h)
			s := scannerOf(h, nvidiatest.NVML(nvidiatest.TwoCards()...))
			if strings.Contains(c.reason, "not answered") {
				s.limit = time.Second
			}
			node, err := s.scan(t.Context())
			said, merr := json.Marshal(node)
			h.Must(merr)
			switch {
			case (err != nil) != c.unready:
				t.Errorf("the scan's error is %v", err)
			case err == nil && len(node.GPUs) == 0:
				t.Errorf("no GPU is offered: %s", said)
			case err == nil && c.reason != "" && !strings.Contains(string(said), c.reason):
				t.Errorf("no problem reported: %s", said)
			case err != nil && !strings.Contains(err.Error(), c.reason):
				t.Errorf("%v, want %q", err, c.reason)
			}
			all := []specs.ContainerEdits{node.Common}
			for _, g := range node.GPUs {
				all = append(all, g.Edits)
			}
			for _, e := range all {
				for _, m := range e.Mounts {
					rest, ok := hostfile.Below("/run/nvidia/driver", m.HostPath)
					if !ok || strings.Contains(m.HostPath, secret) || strings.Contains(m.ContainerPath, secret) {
						t.Errorf("%s is mounted at %s", m.HostPath, m.ContainerPath)
						continue
					}
					// The runtime follows symlinks from the host's root, so the mount source must
					// have none.
					path := filepath.Join(h.Root, "driver", rest)
					if leads, err := filepath.EvalSymlinks(path); err != nil || leads != path {
						t.Errorf("mount source %s resolves to %s (%v)", m.HostPath, leads, err)
					}
				}
			}
		})
	}
}

// The test expects that files outside the driver root are allowed only in the DriverDirs that the
// admin configured.
func TestOnlyConfiguredDriverDirsAreAllowed(t *testing.T) {
	h := nvidiatest.NewHost(t)
	h.File("opt/more/lib.so", "no ELF")
	h.File("etc/shadow", "secret")
	h.Link("lib.so", "opt/more/link.so")
	h.Link("../../etc/shadow", "opt/more/out.so")
	more := filepath.Join(h.Root, "opt/more")
	for _, c := range []struct {
		file, leads string
		dirs        []string
	}{
		{"lib.so", "", nil},
		{"lib.so", "", []string{filepath.Join(h.Root, "opt/mo"), "/elsewhere"}},
		{"lib.so", "lib.so", []string{"/elsewhere", more}},
		{"link.so", "lib.so", []string{more + "/"}},
		{"out.so", "", []string{more}},
		{"not-there.so", "", []string{more}},
	} {
		paths := h.Paths()
		paths.DriverDirs = c.dirs
		got, err := resolveConfined(paths, filepath.Join(more, c.file))
		if c.leads == "" && err == nil || c.leads != "" && got != filepath.Join(more, c.leads) {
			t.Errorf("%s with %q: %q, %v", c.file, c.dirs, got, err)
		}
	}
}

func TestLibrarySymlinkStaysInItsDirectory(t *testing.T) {
	mounts := []*specs.Mount{{ContainerPath: "/usr/lib64/libcuda.so.1"}, {ContainerPath: "/nvidia.json"}}
	for link, want := range map[string]bool{
		"/usr/lib64/libcuda.so": true, "/usr/lib64/gbm/nvidia-drm_gbm.so": true, "/dev/dri/by-path/pci-0000:1b:00.0-card": true,
		"/etc/ld.so.preload": false, "/usr/lib64/../../etc/ld.so.preload": false, "/usr/lib": false, "/usr/lib641/x": false,
		"usr/lib64/x": false, "": false, "/devil": false, "/x": false,
	} {
		if got := isNextToMount(link, mounts); got != want {
			t.Errorf("%q: %t", link, got)
		}
	}
}

// The test expects that an edit which could expose the host, or which the driver does not know, is
// dropped and named, and that all others stay.
func TestRefusedEditCostsOnlyItself(t *testing.T) {
	h := nvidiatest.NewHost(t)
	h.File("proc/devices", "Character devices:\n195 nvidia\n\n")
	h.File("etc/shadow", "secret")
	s := scannerOf(h, nil)
	library := "/usr/lib64/libcuda.so." + nvidiatest.Version
	hook := func(path string, args ...string) *specs.Hook {
		return &specs.Hook{HookName: "createContainer", Path: path, Args: append([]string{"nvidia-cdi-hook"}, args...)}
	}
	kept, refused := s.confine(specs.ContainerEdits{
		Env: []string{"NVIDIA_CTK_LIBCUDA_DIR=/usr/lib64", "LD_PRELOAD=/tmp/evil.so"},
		Mounts: []*specs.Mount{
			{HostPath: filepath.Join(h.Root, "driver"+library), ContainerPath: library},
			{HostPath: "/dev/null", ContainerPath: "/var/run/something"},
			{HostPath: filepath.Join(h.Root, "etc/shadow"), ContainerPath: "/usr/lib64/libshadow.so"},
			{HostPath: filepath.Join(h.Root, "driver"+library), ContainerPath: "/usr/lib64/../../etc/x"},
		},
		DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidiactl", HostPath: filepath.Join(h.Root, "driver/dev/nvidiactl")}},
		Hooks: []*specs.Hook{
			hook(s.paths.HookPath, "update-ldcache", "--folder", "/usr/lib64"),
			hook("/usr/bin/nvidia-ctk", "hook", "update-ldcache"),
			hook(s.paths.HookPath, "create-symlinks", "--link", "libcuda.so.1::/usr/lib64/libcuda.so", "--link",
				"libcuda.so.1::/etc/ld.so.preload"),
			hook(s.paths.HookPath, "create-symlinks", "--link", "x::/etc/cron.d/x"),
			{HookName: "afterStart", Path: s.paths.HookPath, Args: []string{"nvidia-cdi-hook", "something"}},
		},
		IntelRdt: &specs.IntelRdt{ClosID: "x"}, NetDevices: []*specs.LinuxNetDevice{{HostInterfaceName: "eth0", Name: "eth0"}},
	})
	want := specs.ContainerEdits{
		Env:    []string{"NVIDIA_CTK_LIBCUDA_DIR=/usr/lib64"},
		Mounts: []*specs.Mount{{HostPath: filepath.Join(h.Root, "driver"+library), ContainerPath: library}},
		Hooks: []*specs.Hook{
			hook(s.paths.HookPath, "update-ldcache", "--folder", "/usr/lib64"),
			hook(s.paths.HookPath, "create-symlinks", "--link", "libcuda.so.1::/usr/lib64/libcuda.so"),
		},
	}
	if diff := cmp.Diff(want, kept); diff != "" {
		t.Error(diff)
	}
	var names []string
	for _, p := range refused {
		if names = append(names, p.Name); p.Kind != nvidia.RefusedEdit || p.Message == "" {
			t.Errorf("%+v", p)
		}
	}
	wantNames := []string{
		"LD_PRELOAD", "/dev/null", filepath.Join(h.Root, "etc/shadow"), "/run/nvidia/driver" + library,
		"/run/nvidia/driver/dev/nvidiactl", "/usr/bin/nvidia-ctk", "/etc/ld.so.preload", "/etc/cron.d/x", "afterStart", "intelRdt", "netDevices",
	}
	if diff := cmp.Diff(wantNames, names); diff != "" {
		t.Error(diff)
	}
}

// The test expects that a node without files that CUDA does not need offers its GPUs and names the
// files.
func TestMissingFilesAreNamed(t *testing.T) {
	h := nvidiatest.NewHost(t)
	h.Node("driver/dev/nvidia-modeset")
	h.File("driver/usr/bin/nvidia-smi", "no ELF")
	h.Must(os.Chmod(filepath.Join(h.Root, "driver/usr/bin/nvidia-smi"), 0o700))
	node, err := scannerOf(h, nvidiatest.NVML(nvidiatest.TwoCards()...)).scan(t.Context())
	if err != nil || len(node.GPUs) != 2 || len(node.Problems) > 0 {
		t.Fatal(err, node.GPUs, node.Problems)
	}
	var names []string
	for _, p := range node.Omissions {
		if names = append(names, p.Name); p.Kind != nvidia.MissingFile || !strings.Contains(p.Message, "/run/nvidia/driver") {
			t.Errorf("%+v", p)
		}
	}
	want := []string{"libnvidia-ptxjitcompiler.so." + nvidiatest.Version, "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Error(diff)
	}
}

func TestDeviceNodeNumberMatchesName(t *testing.T) {
	h := nvidiatest.NewHost(t)
	h.File("proc/devices", "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n226 drm\n510 nvidia-uvm\n\n"+
		"Block devices:\n  8 sd\n259 nvidia-block\n")
	listed, err := host.Majors(h.Paths())
	if err != nil {
		t.Fatal(err)
	}
	majors := slices.Collect(maps.Values(listed))
	for _, c := range []struct {
		name         string
		major, minor uint32
		good         bool
	}{
		{"nvidia0", 195, 0, true},
		{"nvidia17", 195, 17, true},
		{"nvidiactl", 195, 255, true},
		{"nvidia-uvm", 510, 0, true},
		{"nvidia-uvm-tools", 510, 1, true},
		{"card1", 226, 1, true},
		{"renderD129", 226, 129, true},
		{"card1", 226, 0, false},      // another display adapter
		{"card1", 195, 1, false},      // a GPU itself
		{"nvidia0", 226, 0, false},    // a display adapter
		{"nvidia0", 195, 1, false},    // the number of another GPU
		{"nvidia0", 1, 0, false},      // the number of /dev/mem
		{"nvidia-uvm", 511, 0, false}, // the number of an earlier module load, now free for any driver
		{"nvidia-uvm", 8, 0, false},
		{"nvidia-uvm", 259, 0, false}, // a block device's number
		{"nvidiactl", 195, 0, false},
		{"nvidia99999999999", 195, 0, false},
	} {
		if err := checkNumber(c.name, unix.Mkdev(c.major, c.minor), majors); (err == nil) != c.good {
			t.Errorf("%s %d:%d: %v", c.name, c.major, c.minor, err)
		}
	}
	unreadable, _ := host.Majors(nvidia.Paths{Proc: filepath.Join(h.Root, "nowhere")})
	if err := checkNumber("nvidia0", unix.Mkdev(0, 0), slices.Collect(maps.Values(unreadable))); err != nil {
		t.Errorf("without a list of numbers: %v", err)
	}
}
