package machine

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

func TestSpecRoundTrip(t *testing.T) {
	spec := &Spec{
		Name:     "node1",
		Dir:      filepath.Join(t.TempDir(), "node1"),
		BootHook: []string{"/bin/hook", "a b"},
		Services: []Service{{Name: "kubelet", Argv: []string{"/kubelet"}, Ready: "unix:///x"}},
	}
	if err := spec.Save(); err != nil {
		t.Fatal(err)
	}
	loaded, err := Load(spec.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if loaded.BootHook[1] != "a b" || loaded.Services[0].Ready != "unix:///x" || loaded.LogDir() != spec.LogDir() {
		t.Errorf("loaded %+v", loaded)
	}
	if info, err := os.Stat(spec.LogDir()); err != nil || !info.IsDir() {
		t.Errorf("a machine that never booted has no folder for logs: %v", err)
	}
}

func TestProcessIsIdentifiedByStartTime(t *testing.T) {
	own, err := processStart(os.Getpid())
	if err != nil || own == "" {
		t.Fatalf("own start is %q, %v", own, err)
	}
	child := exec.Command("sleep", "60")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	if start, err := processStart(child.Process.Pid); err != nil || start == "" {
		t.Errorf("start of a child is %q, %v", start, err)
	}
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = child.Wait()
	if start, err := processStart(child.Process.Pid); err == nil {
		t.Errorf("a process that is gone started at %s", start)
	}
}

func TestMachineWithoutValidRecordIsOff(t *testing.T) {
	spec := &Spec{Name: "node1", Dir: t.TempDir()}
	if pid, running := spec.PID(); running {
		t.Errorf("a machine that never booted counts as running, with process %d", pid)
	}
	// Process 1 exists, but the stored start time is another one. So the stored process is not this
	// one, and the machine must count as off.
	record := filepath.Join(spec.Dir, bootFile+".json")
	if err := os.WriteFile(record, []byte(`{"pid":1,"startTime":"123456789123"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if pid, running := spec.PID(); running {
		t.Errorf("process %d is taken for the machine", pid)
	}
}

func TestBootIDsAreUUIDsAndDiffer(t *testing.T) {
	first, err := newBootID()
	if err != nil {
		t.Fatal(err)
	}
	second, err := newBootID()
	if err != nil {
		t.Fatal(err)
	}
	if first == second || len(first) != 36 || first[14] != '4' {
		t.Errorf("boot IDs are %s and %s", first, second)
	}
}
