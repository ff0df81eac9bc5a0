package sysfs

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// machine is a simulated node with its sysfs mounted.
type machine struct {
	*testing.T
	config *layout.Config
	state  *state.File
	server *Server
	dev    string
}

// boot boots a node. edit changes its options, drivers the drivers at boot.
func boot(t *testing.T, node string, edit func(*layout.Options), drivers ...map[string]string) *machine {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: it mounts a file system and creates device nodes")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("needs /dev/fuse")
	}
	if out, err := buildLibrary(); err != nil {
		t.Fatalf("build the simulated library: %v\n%s", err, out)
	}
	models, err := model.ReadGPUs("../models")
	if err != nil {
		t.Fatal(err)
	}
	var edits []func(*model.Node) error
	for _, d := range drivers {
		edits = append(edits, model.BootDrivers(d))
	}
	described, err := model.ReadNode("../nodes/"+node+".yaml", "seed", edits...)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	m := &machine{T: t, dev: filepath.Join(folder, "dev")}
	if err := os.Mkdir(m.dev, 0o755); err != nil {
		t.Fatal(err)
	}
	o := layout.Options{
		Root: filepath.Join(folder, "root"), Config: layout.Config{Kind: layout.Host, Node: described, Dev: m.dev}, Models: models, Seed: "seed",
		Sources: layout.Sources{Library: "../../../build/nvmlsim/libnvidia-ml.so.1"},
	}
	if edit != nil {
		edit(&o)
	}
	if m.config, err = layout.Up(o); err != nil {
		t.Fatal(err)
	}
	if m.state, err = state.Open(layout.StatePath(o.Root)); err != nil {
		t.Fatal(err)
	}
	if m.server, err = Mount(o.Root); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		err := m.state.ClearFaults()
		if _, gone := os.Stat(o.Root); gone == nil {
			err = errors.Join(err, layout.Down(o.Root))
		}
		if err != nil {
			t.Error(err)
		}
		m.server.Wait()
	})
	return m
}

func (m *machine) path(parts ...string) string {
	return filepath.Join(append([]string{m.config.SysPath()}, parts...)...)
}

func (m *machine) device(address string, parts ...string) string {
	return m.path(append([]string{"bus/pci/devices", address}, parts...)...)
}

// write writes as a shell does, and returns the error of the write.
func (m *machine) write(text string, parts ...string) error {
	err := os.WriteFile(m.path(parts...), []byte(text), 0o600)
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}

func (m *machine) must(text string, parts ...string) {
	m.Helper()
	if err := m.write(text, parts...); err != nil {
		m.Fatalf("write %q to %v: %v", text, parts, err)
	}
}

func (m *machine) fails(want syscall.Errno, text string, parts ...string) {
	m.Helper()
	if err := m.write(text, parts...); !errors.Is(err, want) {
		m.Errorf("write %q to %v: got %v, want %v", text, parts, err, want)
	}
}

func (m *machine) override(address, driver string) {
	m.Helper()
	m.must(driver+"\n", "bus/pci/devices", address, "driver_override")
}

func (m *machine) unbind(address, driver string) {
	m.Helper()
	m.must(address+"\n", "bus/pci/drivers", driver, "unbind")
}

func (m *machine) probe(address string) {
	m.Helper()
	m.must(address+"\n", "bus/pci/drivers_probe")
}

// hand gives a function from one driver to another, as a user of driver_override does.
func (m *machine) hand(address, from, to string) {
	m.Helper()
	m.override(address, to)
	m.unbind(address, from)
	m.probe(address)
}

// driver returns the driver that the function's link names, or nothing.
func (m *machine) driver(address string) string {
	m.Helper()
	target, err := os.Readlink(m.device(address, "driver"))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return ""
	case err != nil:
		m.Fatal(err)
	}
	return filepath.Base(target)
}

func (m *machine) has(address, want string) {
	m.Helper()
	if got := m.driver(address); got != want {
		m.Errorf("driver of %s is %q, want %q", address, got, want)
	}
}

func (m *machine) read(parts ...string) string {
	m.Helper()
	content, err := os.ReadFile(m.path(parts...))
	if err != nil {
		m.Fatal(err)
	}
	return string(content)
}

func (m *machine) reads(want string, parts ...string) {
	m.Helper()
	if got := m.read(parts...); got != want {
		m.Errorf("%v has %q, want %q", parts, got, want)
	}
}

// nodes returns the names of VFIO's device nodes.
func (m *machine) nodes() string {
	m.Helper()
	var found []string
	for _, pattern := range []string{"iommu", "vfio/*", "vfio/devices/*"} {
		paths, _ := filepath.Glob(filepath.Join(m.dev, pattern))
		for _, path := range paths {
			info, err := os.Lstat(path)
			if err != nil {
				m.Fatal(err)
			}
			if name, _ := filepath.Rel(m.dev, path); info.Mode()&os.ModeCharDevice != 0 {
				found = append(found, name)
			}
		}
	}
	return strings.Join(found, " ")
}

// eventually waits until the condition holds.
func (m *machine) eventually(what string, condition func() bool) {
	m.Helper()
	end := time.After(10 * time.Second)
	for !condition() {
		select {
		case <-end:
			m.Fatalf("not within ten seconds: %s", what)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// writer is a process that writes one text to one file.
type writer struct {
	*exec.Cmd
	done   chan error
	output bytes.Buffer
}

func (m *machine) start(text string, parts ...string) *writer {
	m.Helper()
	w := &writer{Cmd: exec.Command("sh", "-c", fmt.Sprintf("printf '%%s\\n' %s > %s", text, m.path(parts...))), done: make(chan error, 1)}
	w.Stderr = &w.output
	w.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := w.Start(); err != nil {
		m.Fatal(err)
	}
	go func() { w.done <- w.Wait() }()
	return w
}

// ended waits for the end of the process, however it ends.
func (w *writer) ended() error { return <-w.done }

// status returns the state letter of the process in /proc.
func (w *writer) status() string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", w.Process.Pid))
	_, after, _ := strings.Cut(string(text), ") ")
	letter, _, _ := strings.Cut(after, " ")
	return letter
}

// startReader reads the file and then closes the channel.
func (m *machine) startReader(path string) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		if _, err := os.ReadFile(path); err != nil {
			m.Error(err)
		}
	}()
	return done
}
