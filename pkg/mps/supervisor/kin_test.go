package supervisor

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// inGroup starts a process that carries the mark of the node's daemon "a", in a control group of its own in one of the hierarchies.
func inGroup(t *testing.T, n *node, hierarchies ...string) (pid int, group string) {
	t.Helper()
	stranger := exec.Command(filepath.Join(n.options.DriverRootMount, "usr/sbin", serverProgram), "-f")
	stranger.Env = []string{mark(n.paths, "a")}
	must(t, stranger.Start())
	t.Cleanup(func() { _ = stranger.Process.Kill(); _ = stranger.Wait() })
	pid = stranger.Process.Pid
	for _, hierarchy := range hierarchies {
		group, err := os.MkdirTemp(hierarchy, "gpu-mps-test-") //nolint:usetesting // a control group is a directory of another kind
		if err != nil {
			continue
		}
		t.Cleanup(func() { _ = stranger.Process.Kill(); _ = stranger.Wait(); _ = os.Remove(group) })
		if _, err := os.Lstat(filepath.Join(group, "cgroup.procs")); err != nil {
			continue // no hierarchy is mounted there
		}
		if os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte(itoa(pid)), 0) == nil {
			return pid, group
		}
	}
	t.Skip("needs the right to make control groups")
	return 0, ""
}

// Any container can give its processes the environment of a daemon's.
func TestAMarkedProcessOfAnotherContainerIsNobodysBusiness(t *testing.T) {
	n := newNode(t)
	pid, _ := inGroup(t, n, "/sys/fs/cgroup", "/sys/fs/cgroup/pids")
	n.supervise()
	begin := time.Now()
	n.mustStart(mps.Daemon{ID: "a", Devices: []string{"GPU-a"}})
	n.killProcess(n.status("a").PID)
	n.await("it is ready again", func() bool { s := n.status("a"); return s.State == mps.Ready && s.Restarts > 0 })
	n.mustStop("a")
	if took := time.Since(begin); took > terminateWait+killWait {
		t.Errorf("it was waited for: %s", took)
	}
	if groups, err := groupsOf(procRoot, pid); err != nil || !kinOf(groups, n).has(pid) {
		t.Errorf("the stranger was ended, or has no mark: %v", err)
	}
}

func kinOf(groups string, n *node) kin {
	return kin{mark: mark(n.paths, "a"), groups: []string{groups}, proc: procRoot}
}

// A process that hangs in the driver survives being killed; one in a frozen control group does so, too. It is of a daemon that an earlier supervisor has
// started, in its own container.
func TestAProcessThatCannotBeKilledIsTold(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pid, group := inGroup(t, n, "/sys/fs/cgroup/freezer")
	state := filepath.Join(group, "freezer.state")
	must(t, os.WriteFile(state, []byte("FROZEN"), 0))
	thaw := func() { _ = os.WriteFile(state, []byte("THAWED"), 0) }
	t.Cleanup(thaw)
	groups, err := groupsOf(procRoot, pid)
	must(t, err)
	d := mps.Daemon{ID: "a", Devices: []string{"GPU-a"}}
	boot, err := durable.BootID(procRoot)
	d0 := directories{paths: n.paths, shm: new(sync.Mutex)}
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
		// What undoes a claim in time for the kubelet has 8 s.
		if took := time.Since(begin); took > 5*time.Second {
			t.Errorf("whether it has ended by now took %s to find out", took)
		}
	}
	if s := n.status("a"); s.Daemon.ID != "a" {
		t.Error("it is taken for gone")
	}
	thaw()
	n.mustStop("a")
	if err := unix.Kill(pid, 0); err == nil && kinOf(groups, n).has(pid) {
		t.Error("it lives on")
	}
}

// A process has no environment while it becomes another program, as a daemon does when it starts: whoever looks just then must not take it for a stranger's.
func TestAProcessThatBecomesAnotherProgramKeepsItsMark(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	changeling := exec.CommandContext(t.Context(), "sh", "-c", `eval "$LOOP"`)
	changeling.Env = []string{mark(n.paths, "a"), `LOOP=exec sh -c 'eval "$LOOP"'`}
	must(t, changeling.Start())
	t.Cleanup(func() { _ = changeling.Process.Kill(); _ = changeling.Wait() })
	k := n.kin("a")
	for i := range 20_000 {
		if !k.has(changeling.Process.Pid) {
			t.Fatalf("at the look %d it is not the daemon's", i+1)
		}
	}
}
