package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// behaviour tells the fake control daemon which faults to show. test/mpsstandin explains the
// fields.
type behaviour struct {
	Hang                                 []string `json:"hang,omitempty"`
	Deaf, IgnoreQuit, IgnoreTerm, Forget bool
	Exit                                 string
	Server, Old                          bool
}

// programsDir is the directory in which the function programs builds the binaries. TestMain removes
// it.
var programsDir string

// programs builds gpu-mps and the fake MPS programs of the driver, once for all tests. It returns
// their directory.
var programs = sync.OnceValues(func() (dir string, err error) {
	dir, err = os.MkdirTemp("", "gpu-mps-test")
	if err != nil {
		return "", err
	}
	programsDir = dir
	for name, source := range map[string]string{mps.HookProgram: "../../../cmd/gpu-mps", "standin": "../../../test/mpsstandin"} {
		build := exec.Command("go", "build", "-o", filepath.Join(dir, name), source)
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			return dir, fmt.Errorf("build %s: %w: %s", source, err, out)
		}
	}
	return dir, nil
})

func TestMain(m *testing.M) {
	m.Run()
	if programsDir != "" {
		_ = os.RemoveAll(programsDir)
	}
}

// patience is how long a test waits for an expected event before it fails.
const patience = 2 * time.Minute

// node fakes a host whose driver has fake MPS programs. The supervisor under test and its client
// are real.
type node struct {
	t       *testing.T
	options Options
	paths   mps.Paths
	client  *mps.Client
	log     string
	// cmd is the supervisor's process if it runs separately. stop ends the supervisor if it runs in
	// the test's own process.
	cmd  *exec.Cmd
	stop func()
}

func newNode(t *testing.T) *node {
	t.Helper()
	needMounts(t)
	dir := t.TempDir()
	root := filepath.Join(dir, "driver")
	built, err := programs()
	must(t, err)
	for _, name := range []string{"usr/bin/" + controlProgram, "usr/sbin/" + serverProgram,
		"usr/lib64/libnvidia-ml.so.1", "usr/lib64/libc.so.6"} {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Link(filepath.Join(built, "standin"), path); err != nil {
			t.Fatal(err)
		}
	}
	n := &node{t: t, paths: mps.Paths{PluginDir: filepath.Join(dir, "plugin")}, log: filepath.Join(dir, "supervisor.log")}
	n.options = Options{Paths: n.paths, DriverRoot: "/opt/driver", DriverRootMount: root, Program: filepath.Join(built, mps.HookProgram),
		StartTimeout: DefaultStartTimeout}
	n.client = mps.NewClient(n.paths)
	t.Cleanup(n.cleanUp)
	return n
}

// needMounts skips the test if this process has no right to create mount namespaces.
func needMounts(t *testing.T) {
	t.Helper()
	probe := exec.Command("/bin/true")
	probe.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	if err := probe.Run(); errors.Is(err, fs.ErrPermission) {
		t.Skip("needs permission to create mount namespaces")
	}
}

// leftover starts an MPS program in a session of its own, as an earlier supervisor did. It returns
// the program's start time too.
func (n *node) leftover() (*exec.Cmd, string) {
	n.t.Helper()
	cmd := exec.Command(filepath.Join(n.options.DriverRootMount, "usr/sbin", serverProgram), "-f")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	must(n.t, cmd.Start())
	n.t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	st, err := readStat(procRoot, cmd.Process.Pid)
	must(n.t, err)
	return cmd, st.startTime
}

func (n *node) behave(b behaviour) {
	n.t.Helper()
	data, err := json.Marshal(b)
	if err != nil {
		n.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(n.options.DriverRootMount, "behaviour.json"), data, 0o644); err != nil {
		n.t.Fatal(err)
	}
}

// supervise runs a supervisor in this process. It returns when the supervisor answers.
func (n *node) supervise() {
	n.t.Helper()
	log := n.openLog()
	ctx, cancel := context.WithCancel(context.Background())
	ctx = klog.NewContext(ctx, textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(log))))
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, n.options) }()
	n.stop = func() {
		n.t.Helper()
		n.stop = nil
		cancel()
		if err := errors.Join(<-ended, log.Close()); err != nil {
			n.t.Errorf("the supervisor did not shut down cleanly: %v\n%s", err, n.supervisorLog())
		}
	}
	n.awaitSupervisor()
}

// superviseSeparately starts a supervisor as a process that [node.kill] can end.
func (n *node) superviseSeparately() {
	n.t.Helper()
	log := n.openLog()
	defer func() { _ = log.Close() }()
	o := n.options
	n.cmd = exec.Command(o.Program, "supervise", "--plugin-dir="+o.Paths.PluginDir, "--driver-root="+o.DriverRoot,
		"--driver-root-mount="+o.DriverRootMount, "--dev-root="+o.DevRoot, "--shared-memory="+fmt.Sprint(o.SharedMemory))
	n.cmd.Stdout, n.cmd.Stderr = log, log
	must(n.t, n.cmd.Start())
	n.awaitSupervisor()
}

func (n *node) openLog() *os.File {
	n.t.Helper()
	log, err := os.OpenFile(n.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	must(n.t, err)
	return log
}

func (n *node) awaitSupervisor() {
	n.t.Helper()
	n.await("the supervisor answers", func() bool {
		_, err := n.client.List(n.t.Context())
		return err == nil
	})
}

// kill ends the supervisor's process with SIGKILL, as a crash would.
func (n *node) kill() {
	n.t.Helper()
	must(n.t, n.cmd.Process.Kill())
	_ = n.cmd.Wait() // The error says that the process was killed.
	n.cmd = nil
}

func (n *node) supervisorLog() string {
	data, _ := os.ReadFile(n.log)
	return string(data)
}

// await returns as soon as the function named by the parameter "is" returns true. It fails the test
// if that takes longer than patience.
func (n *node) await(what string, is func() bool) {
	n.t.Helper()
	deadline := time.Now().Add(patience)
	for !is() {
		if time.Now().After(deadline) {
			n.t.Fatalf("%s: not within %s\n%s", what, patience, n.supervisorLog())
		}
		<-time.After(time.Millisecond)
	}
}

func (n *node) start(d mps.Daemon) error {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), patience)
	defer cancel()
	return n.client.Start(ctx, d)
}

func (n *node) mustStart(d mps.Daemon) {
	n.t.Helper()
	if err := n.start(d); err != nil {
		n.t.Fatalf("%v\n%s", err, n.supervisorLog())
	}
	if pids := n.daemons(d.ID); len(pids) != 1 {
		n.t.Fatalf("%s is ready with control daemons %v, want one\n%s", d.ID, pids, n.supervisorLog())
	}
}

func (n *node) mustStop(id string) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), patience)
	defer cancel()
	if err := n.client.Stop(ctx, id); err != nil {
		n.t.Fatalf("%v\n%s", err, n.supervisorLog())
	}
	n.expectNothingLeft(id)
}

func (n *node) status(id string) mps.Status {
	n.t.Helper()
	all, err := n.client.List(n.t.Context())
	if err != nil {
		n.t.Fatal(err)
	}
	i := slices.IndexFunc(all, func(s mps.Status) bool { return s.Daemon.ID == id })
	if i < 0 {
		return mps.Status{}
	}
	return all[i]
}

// processes returns the PIDs of the processes in a daemon's mount namespaces: the control daemon,
// its servers and the clients that send it commands. It does not trust run.json.
func (n *node) processes(id string) []int {
	n.t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/mountinfo")
	must(n.t, err)
	var pids []int
	for _, file := range files {
		mounts, _ := os.ReadFile(file) // The process may have ended.
		if strings.Contains(string(mounts), strings.TrimPrefix(n.paths.Logs(id), os.TempDir())) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			must(n.t, err)
			pids = append(pids, pid)
		}
	}
	return pids
}

// daemons returns the PIDs of the control daemons with this ID, without the short-lived clients
// that send them commands.
func (n *node) daemons(id string) []int {
	n.t.Helper()
	return slices.DeleteFunc(n.processes(id), func(pid int) bool {
		data, _ := os.ReadFile(filepath.Join("/proc", itoa(pid), "cmdline"))
		return !strings.HasPrefix(string(data), controlProgram+"\x00-f")
	})
}

func (n *node) expectNothingLeft(id string) {
	n.t.Helper()
	if pids := n.processes(id); len(pids) > 0 {
		n.t.Errorf("processes %v of %s are left", pids, id)
	}
	if _, err := os.Lstat(n.paths.Dir(id)); !errors.Is(err, fs.ErrNotExist) {
		n.t.Errorf("%s is left (%v)", n.paths.Dir(id), err)
	}
}

func (n *node) killProcess(pid int) {
	n.t.Helper()
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		n.t.Fatal(err)
	}
}

// cleanUp ends the supervisor and all daemons, and unmounts their directories, so that a failed
// test leaves nothing.
func (n *node) cleanUp() {
	if n.cmd != nil {
		_ = n.cmd.Process.Kill()
		_ = n.cmd.Wait()
	}
	if n.stop != nil {
		n.stop()
	}
	ids, _ := directories{paths: n.paths}.daemonIDs()
	for _, id := range ids {
		set := directories{paths: n.paths}.processesOf(id, procRoot)
		if err := errors.Join(set.end(normalWaits), unmountAll(n.paths.Pipes(id)), unmountAll(n.paths.Shm(id))); err != nil {
			n.t.Error(err)
		}
	}
}

func itoa(i int) string { return strconv.Itoa(i) }

func daemonWithLimits(id string, devices ...string) mps.Daemon {
	threads := 40
	return mps.Daemon{ID: id, Devices: devices, ThreadPercentage: &threads,
		MemoryLimits: map[int]uint64{0: 18 << 10, 1: 1500}, MultiUser: true}
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}
