package namespace

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// Started with the argument "enter", the test binary acts as gpu-mps does: it executes the view's
// program in a new mount namespace.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "enter" {
		view, err := Parse(os.Args[2])
		if err == nil {
			err = Exec(view, os.Args[3:], append(os.Environ(), Environment()...))
		}
		_, _ = os.Stderr.WriteString(err.Error())
		os.Exit(1) //nolint:forbidigo // this process is the child of a test
	}
	m.Run()
}

// host returns a view of a fake host. Its driver root is a complete system with a shell, and has
// links like Debian's alternatives.
func host(t *testing.T) View {
	t.Helper()
	dir := t.TempDir()
	v := View{
		Pipes: filepath.Join(dir, "pipes"), Logs: filepath.Join(dir, "logs"), Shm: filepath.Join(dir,
			"shm"), DriverRoot: filepath.Join(dir, "driver"),
		LibraryDir: filepath.Join(dir, "driver/usr/lib64"), Programs: []string{filepath.Join(dir, "driver/usr/bin/sh")},
	}
	for _, path := range []string{v.Pipes, v.Logs, v.Shm, v.LibraryDir, filepath.Dir(v.Programs[0]), filepath.Join(v.DriverRoot, "real")} {
		if err := os.MkdirAll(path, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for path, text := range map[string]string{
		filepath.Join(v.Pipes, "a-pipe"): "", filepath.Join(v.Logs, "a-log"): "", filepath.Join(v.Shm, "a-segment"): "",
		filepath.Join(v.DriverRoot, "real/libcuda.so.1"): "the driver's", filepath.Join(v.LibraryDir,
			"libnvidia-ml.so.1"): "", filepath.Join(v.LibraryDir, "libc.so.6"): "",
		filepath.Join(v.LibraryDir, "libnvidia.conf"): "",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for link, to := range map[string]string{filepath.Join(v.LibraryDir, "libcuda.so.1"): "/real/libcuda.so.1",
		filepath.Join(v.LibraryDir, "libcuda.so"): "/nowhere"} {
		if err := os.Symlink(to, link); err != nil {
			t.Fatal(err)
		}
	}
	shell, err := os.ReadFile("/bin/sh")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(v.Programs[0], shell, 0o755); err != nil {
		t.Fatal(err)
	}
	return v
}

func enterView(t *testing.T, v View, args ...string) (string, error) {
	t.Helper()
	probe := exec.Command("/proc/self/exe", "-test.run=^$")
	probe.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	if err := probe.Run(); os.IsPermission(err) {
		t.Skip("needs permission to create mount namespaces")
	}
	out, err := exec.Command("/proc/self/exe", append([]string{"enter", v.String()}, args...)...).CombinedOutput()
	return string(out), err
}

func TestExecShowsFilesOfDaemon(t *testing.T) {
	out, err := enterView(t, host(t), "-c", "echo /tmp/nvidia-mps/* /tmp/nvidia-log/* /dev/shm/* /tmp/lib/* /tmp/*; "+
		"cat /tmp/lib/libcuda.so.1; command -v sh")
	want := "/tmp/nvidia-mps/a-pipe /tmp/nvidia-log/a-log /dev/shm/a-segment /tmp/lib/libcuda.so.1 /tmp/lib/libnvidia-ml.so.1 " +
		"/tmp/bin /tmp/driver /tmp/lib /tmp/nvidia-log /tmp/nvidia-mps\nthe driver's/tmp/bin/sh\n"
	if err != nil || out != want {
		t.Errorf("%v\n%s\n%s", err, out, want)
	}
}

func TestExecWithSeparateDevDirectory(t *testing.T) {
	v := host(t)
	v.Dev = filepath.Join(v.DriverRoot, "dev")
	if out, err := enterView(t, v, "-c", "true"); err == nil || !strings.Contains(out, "--dev-root") {
		t.Errorf("dev without nodes: %v, %s", err, out)
	}
	if err := os.MkdirAll(filepath.Join(v.Dev, "nvidia-caps", "cap1"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(v.Dev, "nvidia0"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := enterView(t, v, "-c", "echo /dev/* /dev/nvidia-caps/* /dev/shm/*; echo x >/dev/null")
	if want := "/dev/full /dev/null /dev/nvidia-caps /dev/nvidia0 /dev/random /dev/shm /dev/tty /dev/urandom /dev/zero " +
		"/dev/nvidia-caps/cap1 /dev/shm/a-segment\n"; err != nil || out != want {
		t.Errorf("%v\n%s\n%s", err, out, want)
	}
}

// The driver's programs run as root of the node. They must not follow a link or open a device node
// that a client created, and must not write to other files of the node.
func TestNodeFilesAreReadOnly(t *testing.T) {
	v := host(t)
	//nolint:usetesting // the namespace has another /tmp
	dir, err := os.MkdirTemp("/var/tmp", "gpu-mps-test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	victim := filepath.Join(dir, "victim")
	for _, path := range []string{victim, filepath.Join(v.DriverRoot, "victim")} {
		if err := os.WriteFile(path, []byte("the node's"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, planted := range []string{v.Pipes, v.Shm, v.Logs} {
		if err := os.Symlink(victim, filepath.Join(planted, "link")); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("/dev/null", filepath.Join(planted, "null")); err != nil {
			t.Fatal(err)
		}
		// 1 and 3 are the device numbers of /dev/null.
		if err := syscall.Mknod(filepath.Join(planted, "node"), syscall.S_IFCHR|0o666, 1<<8|3); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{
		"/tmp/nvidia-mps/link", "/dev/shm/link", "/tmp/nvidia-log/link",
		"/tmp/nvidia-mps/null", "/dev/shm/null", "/tmp/nvidia-log/null",
		"/tmp/nvidia-mps/node", "/dev/shm/node", "/tmp/nvidia-log/node",
		victim, "/tmp/driver/victim", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger",
	} {
		// Open the file for appending without writing, so that the test does no harm even if it fails.
		if out, err := enterView(t, v, "-c", ": >>"+path); err == nil {
			t.Errorf("%s can be written to: %s", path, out)
		}
	}
	for _, path := range []string{"/tmp/nvidia-mps/own", "/dev/shm/own", "/tmp/nvidia-log/own", "/dev/null", "/proc/self/comm"} {
		if out, err := enterView(t, v, "-c", ": >>"+path); err != nil {
			t.Errorf("%s cannot be written to: %s", path, out)
		}
	}
}

func TestExecErrorNamesMissingFile(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(*View)
		want  string
	}{
		"pipes":     {func(v *View) { v.Pipes += "-gone" }, "pipes-gone"},
		"libraries": {func(v *View) { v.LibraryDir += "-gone" }, "lib64-gone"},
		"program":   {func(v *View) { v.Programs = []string{v.Programs[0] + "-gone"} }, "sh-gone"},
		"format":    {func(v *View) { v.Programs = []string{filepath.Join(v.LibraryDir, "libc.so.6")} }, "run /"},
	} {
		t.Run(name, func(t *testing.T) {
			v := host(t)
			c.spoil(&v)
			if out, err := enterView(t, v); err == nil || !strings.Contains(out, c.want) {
				t.Errorf("%v, %s", err, out)
			}
		})
	}
}

func TestParseRejectsInvalidViews(t *testing.T) {
	for _, text := range []string{"", "{", "{}",
		`{"pipes":"x","logs":"/l","shm":"/s","driverRoot":"/","libraryDir":"/","programs":["/p"]}`,
		`{"pipes":"/x","logs":"/l","shm":"/s","driverRoot":"/","libraryDir":"/","programs":[]}`} {
		if _, err := Parse(text); err == nil {
			t.Errorf("%q is parsed as a view", text)
		}
	}
	v := View{Pipes: "/p", Logs: "/l", Shm: "/s", DriverRoot: "/", LibraryDir: "/usr/lib", Programs: []string{"/usr/bin/x"}}
	if read, err := Parse(v.String()); err != nil || read.String() != v.String() {
		t.Error(read, err)
	}
}
