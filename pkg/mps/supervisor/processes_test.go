package supervisor

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// freeze moves the process to a new control group that freezes it. thaw lets the process go on.
func freeze(t *testing.T, process *os.Process) (thaw func()) {
	t.Helper()
	//nolint:usetesting // a control group is not an ordinary directory
	group, err := os.MkdirTemp("/sys/fs/cgroup/freezer", "gpu-mps-test-")
	if err != nil {
		t.Skip("needs permission to create control groups:", err)
	}
	state := filepath.Join(group, "freezer.state")
	thaw = func() { _ = os.WriteFile(state, []byte("THAWED"), 0) }
	t.Cleanup(func() { thaw(); _ = process.Kill(); _, _ = process.Wait(); _ = os.Remove(group) })
	must(t, os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte(itoa(process.Pid)), 0), os.WriteFile(state, []byte("FROZEN"), 0))
	return thaw
}

// A process that hangs in the NVIDIA driver survives SIGKILL. The test imitates such a process by
// one in a frozen control group, and writes run.json as if an earlier supervisor had started it.
// The error must name the PID.
func TestUnkillableProcessIsReported(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	leftover, started := n.leftover()
	pid := leftover.Process.Pid
	thaw := freeze(t, leftover.Process)
	d := mps.Daemon{ID: "a", Devices: []string{"GPU-a"}}
	boot, err := durable.BootID(procRoot)
	d0 := directories{paths: n.paths}
	must(t, err, d0.prepare(), d0.make("a"), d0.writeSpec(boot, d), d0.write("a", runFile, runRecord{pid, started}))
	n.supervise()
	if err := n.start(d); err == nil || !strings.Contains(err.Error(), "cannot be killed") || !strings.Contains(err.Error(), itoa(pid)) {
		t.Error(err)
	}
	for range 2 {
		begin := time.Now()
		if err := n.client.Stop(t.Context(), "a"); err == nil || !strings.Contains(err.Error(), "cannot be killed") {
			t.Error(err)
		}
		// Stop must return within 5 s, because the plugin has only 8 s to undo a failed
		// NodePrepareResources before the kubelet gives up.
		if took := time.Since(begin); took > 5*time.Second {
			t.Errorf("checking whether it has ended took %s", took)
		}
	}
	if s := n.status("a"); s.Daemon.ID != "a" {
		t.Error("the daemon counts as gone")
	}
	thaw()
	n.mustStop("a")
	if now, err := readStat(procRoot, pid); err == nil && now.state != "Z" {
		t.Errorf("the process is still alive: %+v", now)
	}
}

// The supervisor must recognize a server also while that executes its program.
func TestProcessIsRecognizedDuringExec(t *testing.T) {
	t.Parallel()
	shell := filepath.Join(t.TempDir(), serverProgram)
	must(t, os.Symlink("/bin/sh", shell))
	leader := exec.CommandContext(t.Context(), "sh", "-c", `"$SHELL" -c 'eval "$LOOP"' & echo $!; wait`)
	leader.Env = []string{"SHELL=" + shell, `LOOP=exec "$SHELL" -c 'eval "$LOOP"'`}
	leader.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	out, err := leader.StdoutPipe()
	must(t, err, leader.Start())
	set := processSet{runRecord{PID: leader.Process.Pid}, procRoot}
	t.Cleanup(func() { _ = set.end(shortWaits); _ = leader.Process.Kill(); _ = leader.Wait() })
	var pid int
	_, err = fmt.Fscan(bufio.NewReader(out), &pid)
	must(t, err)
	for deadline := time.Now().Add(patience); !set.contains(pid); <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the process is not recognized")
		}
	}
	for i := range 20_000 {
		if !set.contains(pid) {
			t.Fatalf("check %d does not recognize the process", i+1)
		}
	}
}
