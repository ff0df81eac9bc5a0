package supervisor

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// startInGroup starts a process that has the marker of daemon "a" in its environment, and moves it
// to a new control group. It creates the group in the first of hierarchies (paths of control group
// file systems) that is mounted and writable.
func startInGroup(t *testing.T, n *node, hierarchies ...string) (pid int, group string) {
	t.Helper()
	stranger := exec.Command(filepath.Join(n.options.DriverRootMount, "usr/sbin", serverProgram), "-f")
	stranger.Env = []string{mark(n.paths, "a")}
	must(t, stranger.Start())
	t.Cleanup(func() { _ = stranger.Process.Kill(); _ = stranger.Wait() })
	pid = stranger.Process.Pid
	for _, hierarchy := range hierarchies {
		//nolint:usetesting // a control group is not an ordinary directory
		group, err := os.MkdirTemp(hierarchy, "gpu-mps-test-")
		if err != nil {
			continue
		}
		t.Cleanup(func() { _ = stranger.Process.Kill(); _ = stranger.Wait(); _ = os.Remove(group) })
		if _, err := os.Lstat(filepath.Join(group, "cgroup.procs")); err != nil {
			continue // No control group hierarchy is mounted there.
		}
		if os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte(itoa(pid)), 0) == nil {
			return pid, group
		}
	}
	t.Skip("needs permission to create control groups")
	return 0, ""
}

// A process of another container may have the daemon's marker, because any container can set that
// variable. The supervisor must neither wait for such a process nor kill it.
func TestMarkedProcessOfAnotherContainerIsIgnored(t *testing.T) {
	n := newNode(t)
	pid, _ := startInGroup(t, n, "/sys/fs/cgroup", "/sys/fs/cgroup/pids")
	n.supervise()
	begin := time.Now()
	n.mustStart(mps.Daemon{ID: "a", Devices: []string{"GPU-a"}})
	n.killProcess(n.status("a").PID)
	n.await("the daemon is ready again", func() bool { s := n.status("a"); return s.State == mps.Ready && s.Restarts > 0 })
	n.mustStop("a")
	if took := time.Since(begin); took > terminateWait+killWait {
		t.Errorf("stopping waited for the unrelated process: %s", took)
	}
	if groups, err := groupsOf(procRoot, pid); err != nil || !processSetOf(groups, n).contains(pid) {
		t.Errorf("the unrelated process was killed, or has no mark: %v", err)
	}
}

func processSetOf(groups string, n *node) processSet {
	return processSet{mark: mark(n.paths, "a"), groups: []string{groups}, proc: procRoot}
}

// A process that hangs in the NVIDIA driver survives SIGKILL. The test imitates such a process by
// one in a frozen control group, and writes run.json as if an earlier supervisor had started it.
// The error must name the PID.
func TestUnkillableProcessIsReported(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pid, group := startInGroup(t, n, "/sys/fs/cgroup/freezer")
	state := filepath.Join(group, "freezer.state")
	must(t, os.WriteFile(state, []byte("FROZEN"), 0))
	thaw := func() { _ = os.WriteFile(state, []byte("THAWED"), 0) }
	t.Cleanup(thaw)
	groups, err := groupsOf(procRoot, pid)
	must(t, err)
	d := mps.Daemon{ID: "a", Devices: []string{"GPU-a"}}
	boot, err := durable.BootID(procRoot)
	d0 := directories{paths: n.paths}
	must(t, err, d0.prepare(), d0.make("a"), d0.writeSpec(boot, d), d0.write("a", runFile, runRecord{Groups: groups}))
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
	if err := unix.Kill(pid, 0); err == nil && processSetOf(groups, n).contains(pid) {
		t.Error("the process is still alive")
	}
}

// During execve, as when a daemon starts, a process has no environment for a moment. The supervisor
// must recognize the daemon's process also if it reads the environment at that moment.
func TestProcessKeepsMarkDuringExec(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	execLoop := exec.CommandContext(t.Context(), "sh", "-c", `eval "$LOOP"`)
	execLoop.Env = []string{mark(n.paths, "a"), `LOOP=exec sh -c 'eval "$LOOP"'`}
	must(t, execLoop.Start())
	t.Cleanup(func() { _ = execLoop.Process.Kill(); _ = execLoop.Wait() })
	k := n.processesOf("a")
	for i := range 20_000 {
		if !k.contains(execLoop.Process.Pid) {
			t.Fatalf("check %d does not recognize the process", i+1)
		}
	}
}
