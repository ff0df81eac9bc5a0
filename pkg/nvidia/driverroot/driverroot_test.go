package driverroot

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// tree is a temporary driver root for a test.
type tree struct {
	*testing.T
	root string
}

func newTree(t *testing.T) tree {
	t.Helper()
	return tree{t, t.TempDir()}
}

func (t tree) parent(path string) string {
	t.Helper()
	full := filepath.Join(t.root, path)
	if err := os.MkdirAll(filepath.Dir(full), 0o750); err != nil {
		t.Fatal(err)
	}
	return full
}

func (t tree) file(path string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(t.parent(path), nil, mode); err != nil {
		t.Fatal(err)
	}
}

func (t tree) link(target, path string) {
	t.Helper()
	if err := os.Symlink(target, t.parent(path)); err != nil {
		t.Fatal(err)
	}
}

func TestFindLocatesProgram(t *testing.T) {
	for name, tc := range map[string]struct {
		lay  func(tree)
		path string
		dir  string
	}{
		"a distribution": {func(t tree) {
			t.file("usr/lib64/"+NVML, 0o644)
			t.file("usr/bin/nvidia-smi", 0o755)
		}, "usr/bin/nvidia-smi", "usr/lib64"},
		"a plain driver directory": {func(t tree) {
			t.file("lib64/"+NVML, 0o644)
			t.file("bin/nvidia-smi", 0o755)
		}, "bin/nvidia-smi", "lib64"},
		"alternatives with absolute symlinks": {func(t tree) {
			t.file("usr/lib/nvidia/current/nvidia-smi", 0o755)
			t.link("/etc/alternatives/nvidia--nvidia-smi", "usr/bin/nvidia-smi")
			t.link("/usr/lib/nvidia/current/nvidia-smi", "etc/alternatives/nvidia--nvidia-smi")
			t.file("usr/lib64/"+NVML, 0o644)
		}, "usr/lib/nvidia/current/nvidia-smi", "usr/lib64"},
		"alternatives of the library, too": {func(t tree) {
			t.file("usr/lib/nvidia/tesla-535/nvidia-smi", 0o755)
			t.link("/etc/alternatives/nvidia--nvidia-smi", "usr/bin/nvidia-smi")
			t.link("/usr/lib/nvidia/tesla-535/nvidia-smi", "etc/alternatives/nvidia--nvidia-smi")
			t.file("usr/lib64/nvidia/tesla-535/libnvidia-ml.so.535.1", 0o644)
			t.link("/etc/alternatives/nvidia--"+NVML, "usr/lib64/"+NVML)
			t.link("/usr/lib64/nvidia/tesla-535/libnvidia-ml.so.535.1", "etc/alternatives/nvidia--"+NVML)
		}, "usr/lib/nvidia/tesla-535/nvidia-smi", "usr/lib64/nvidia/tesla-535"},
		"a store with a program for containers": {func(t tree) {
			t.file("nix/store/a/bin/nvidia-smi", 0o755)
			t.file("nix/store/a/origBin/nvidia-smi", 0o755)
			t.link("/nix/store/a/bin", "run/current-system/sw/bin")
			t.file("nix/store/b/lib/"+NVML, 0o644)
			t.link("/nix/store/b", "run/opengl-driver")
		}, "nix/store/a/origBin/nvidia-smi", "nix/store/b/lib"},
		"a merged /usr": {func(t tree) {
			t.link("usr/bin", "bin")
			t.link("../../usr/../opt/nvidia/smi", "usr/bin/nvidia-smi")
			t.file("opt/nvidia/smi", 0o755)
			t.file("usr/lib64/"+NVML, 0o644)
		}, "opt/nvidia/smi", "usr/lib64"},
		"a symlink above the root": {func(t tree) {
			t.link("../../../../../../real", "usr/bin/nvidia-smi")
			t.file("real", 0o755)
			t.file("usr/lib64/"+NVML, 0o644)
		}, "real", "usr/lib64"},
		"a file that is not executable is skipped": {func(t tree) {
			t.file("usr/bin/nvidia-smi", 0o644)
			t.file("usr/local/bin/nvidia-smi", 0o755)
			t.file("usr/lib64/"+NVML, 0o644)
		}, "usr/local/bin/nvidia-smi", "usr/lib64"},
	} {
		t.Run(name, func(t *testing.T) {
			d := newTree(t)
			tc.lay(d)
			got, err := Find(d.root, "nvidia-smi")
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(Program{filepath.Join(d.root, tc.path), filepath.Join(d.root, tc.dir)}, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestFindNamesMissingFile(t *testing.T) {
	d := newTree(t)
	if _, err := Find(d.root, "nvidia-smi"); err == nil {
		t.Error("found without a driver")
	}
	d.file("lib64/"+NVML, 0o644)
	d.link("nvidia-smi", "bin/nvidia-smi") // to itself
	if _, err := Find(d.root, "nvidia-smi"); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

// Code that follows symlinks by itself, such as NVIDIA's, must not find files of this process's
// root.
func TestInsideTheRootAbsoluteLinksStayInIt(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: another root directory")
	}
	d := newTree(t)
	d.file("etc/alternatives/tool", 0o644)
	d.link("/etc/alternatives/tool", "usr/bin/tool")
	d.link("/proc/self", "usr/bin/out")
	var found string
	var err, outErr error
	if err := Inside(d.root, func() {
		found, err = filepath.EvalSymlinks("/usr/bin/tool")
		_, outErr = os.Stat("/usr/bin/out")
	}); err != nil {
		t.Fatal(err)
	}
	if found != "/etc/alternatives/tool" || err != nil || !errors.Is(outErr, fs.ErrNotExist) {
		t.Errorf("found %q (%v), and a file of this system: %v", found, err, outErr)
	}
	if _, err := os.Stat(d.root); err != nil {
		t.Errorf("this process has another root: %v", err)
	}
	if err := Inside(filepath.Join(d.root, "nowhere"), func() { t.Error("called without the root") }); err == nil {
		t.Error("no error without the root")
	}
}

func TestEnvironmentSkipsForeignCLibrary(t *testing.T) {
	d := newTree(t)
	p := Program{LibraryDir: filepath.Join(d.root, "lib64")}
	if diff := cmp.Diff([]string{"LD_LIBRARY_PATH=" + p.LibraryDir}, p.Environment()); diff != "" {
		t.Error(diff)
	}
	d.file("lib64/libc.so.6", 0o755)
	if diff := cmp.Diff([]string{"LD_PRELOAD=" + p.LibraryDir + "/libnvidia-ml.so.1"}, p.Environment()); diff != "" {
		t.Error(diff)
	}
}

func TestDeviceRootHasMostDeviceNodes(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes, mounts")
	}
	control, all := []string{"nvidiactl"}, []string{"nvidiactl", "nvidia-uvm"}
	for name, tc := range map[string]struct {
		driver, host []string // the device nodes of the driver root, and of the host's /dev
		want         bool     // whether the driver root is chosen
	}{
		"none":                          {nil, nil, false},
		"all in the driver root":        {all, nil, true},
		"some on the host":              {all, control, true},
		"all in both":                   {all, all, true},
		"only control, and none else":   {control, nil, true},
		"only control, all on the host": {control, all, false},
		"only uvm":                      {[]string{"nvidia-uvm"}, nil, false},
		"all on the host":               {nil, all, false},
	} {
		t.Run(name, func(t *testing.T) {
			root, host := t.TempDir(), t.TempDir()
			makeNodes(t, filepath.Join(root, "dev"), tc.driver)
			makeNodes(t, host, tc.host)
			want := "/"
			if tc.want {
				want = root
			}
			if got := deviceRootWith(t, host, root); got != want {
				t.Errorf("DeviceRoot is %s, want %s", got, want)
			}
		})
	}
}

func makeNodes(t *testing.T, dev string, names []string) {
	t.Helper()
	if err := os.MkdirAll(dev, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		if err := unix.Mknod(filepath.Join(dev, n), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))); err != nil {
			t.Fatal(err)
		}
	}
}

// deviceRootWith returns DeviceRoot(root) on a host with this /dev, which only one thread sees.
func deviceRootWith(t *testing.T, dev, root string) string {
	t.Helper()
	found := make(chan string, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked, so that the thread ends
		err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		if err == nil {
			err = unix.Mount(dev, "/dev", "", unix.MS_BIND, "")
		}
		if err != nil {
			found <- err.Error()
			return
		}
		found <- DeviceRoot(root)
	}()
	return <-found
}
