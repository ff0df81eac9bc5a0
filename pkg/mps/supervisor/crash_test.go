package supervisor

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

func TestRestartedSupervisorRestartsDaemon(t *testing.T) {
	n := newNode(t)
	n.behave(behaviour{Server: true})
	n.superviseSeparately()
	d := daemonWithLimits("a", "GPU-a", "GPU-b")
	n.mustStart(d)
	before := n.processes("a")
	n.kill()
	n.await("the control daemon has ended with its supervisor", func() bool { return len(n.daemons("a")) == 0 })
	n.supervise()
	n.await("the daemon is ready again", func() bool { return n.status("a").State == mps.Ready })
	n.mustStart(d)
	after := n.processes("a")
	if len(after) != 2 || slices.ContainsFunc(after, func(pid int) bool { return slices.Contains(before, pid) }) {
		t.Errorf("want another daemon and its server, got processes %v after %v", after, before)
	}
	if s := n.status("a"); s.Restarts > 0 {
		t.Errorf("%+v", s)
	}
	n.mustStop("a")
}

// A test can see each action of a daemon's start from outside, such as a new file or process. After
// each of them, the test kills the supervisor. The next supervisor must then be able to start and
// stop the daemon.
func TestSupervisorCrashDuringStart(t *testing.T) {
	exists := func(path func(mps.Paths) string) func(*node) bool {
		return func(n *node) bool { _, err := os.Lstat(path(n.paths)); return err == nil }
	}
	for name, done := range map[string]func(*node) bool{
		"before any step":   func(*node) bool { return true },
		"directory":         exists(func(p mps.Paths) string { return p.Dir("a") }),
		"shared memory":     exists(func(p mps.Paths) string { return p.Shm("a") }),
		"specification":     exists(func(p mps.Paths) string { return filepath.Join(p.Dir("a"), specFile) }),
		"output":            exists(func(p mps.Paths) string { return filepath.Join(p.Logs("a"), outputFile) }),
		"process":           func(n *node) bool { return len(n.processes("a")) > 0 },
		"record of process": exists(func(p mps.Paths) string { return filepath.Join(p.Dir("a"), runFile) }),
		"control daemon":    func(n *node) bool { return len(n.daemons("a")) > 0 },
		"pipes":             exists(func(p mps.Paths) string { return filepath.Join(p.Pipes("a"), "control") }),
		"ready":             func(n *node) bool { return n.status("a").State == mps.Ready },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.superviseSeparately()
			d := daemonWithLimits("a", "GPU-a", "GPU-b")
			var asking sync.WaitGroup
			// This Start may fail, because the test kills the supervisor during the call.
			asking.Go(func() { _ = n.client.Start(context.WithoutCancel(t.Context()), d) })
			n.await(name, func() bool { return done(n) })
			n.kill()
			asking.Wait()
			n.supervise()
			n.mustStart(d)
			n.mustStop("a")
		})
	}
}

func TestSupervisorCrashDuringStop(t *testing.T) {
	gone := func(path func(mps.Paths) string) func(*node) bool {
		return func(n *node) bool { _, err := os.Lstat(path(n.paths)); return err != nil }
	}
	for name, done := range map[string]func(*node) bool{
		"before any step":   func(*node) bool { return true },
		"no control daemon": func(n *node) bool { return len(n.daemons("a")) == 0 },
		"no process":        func(n *node) bool { return len(n.processes("a")) == 0 },
		"no specification":  gone(func(p mps.Paths) string { return filepath.Join(p.Dir("a"), specFile) }),
		"no directory":      gone(func(p mps.Paths) string { return p.Dir("a") }),
		"no shared memory":  gone(func(p mps.Paths) string { return p.Shm("a") }),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.behave(behaviour{Server: true})
			n.superviseSeparately()
			n.mustStart(daemonWithLimits("a", "GPU-a", "GPU-b"))
			var asking sync.WaitGroup
			asking.Go(func() { _ = n.client.Stop(context.WithoutCancel(t.Context()), "a") })
			n.await(name, func() bool { return done(n) })
			n.kill()
			asking.Wait()
			n.supervise()
			n.mustStop("a")
			n.mustStart(daemonWithLimits("a", "GPU-c", "GPU-d"))
		})
	}
}

// Whatever a supervisor finds on disk for a daemon, it kills processes that are left of the daemon.
// If spec.json is valid and of this boot, the supervisor restarts the daemon. Otherwise it removes
// the daemon's files.
func TestRestoreFromDisk(t *testing.T) {
	boot, err := durable.BootID(procRoot)
	if err != nil {
		t.Fatal(err)
	}
	d := mps.Daemon{ID: "a", Devices: []string{"GPU-a"}}
	for name, c := range map[string]struct {
		put  func(*testing.T, directories)
		runs bool // whether the supervisor keeps the daemon
	}{
		"specification of this boot": {func(t *testing.T, d0 directories) { t.Helper(); must(t, d0.make("a"), d0.writeSpec(boot, d)) }, true},
		"specification without directories": {func(t *testing.T, d0 directories) {
			t.Helper()
			must(t, os.MkdirAll(d0.paths.Dir("a"), 0o700), d0.writeSpec(boot, d))
		}, true},
		"specification of an earlier boot": {func(t *testing.T, d0 directories) {
			t.Helper()
			must(t, d0.make("a"), d0.writeSpec("earlier", d))
		}, false},
		"specification of another daemon": {func(t *testing.T, d0 directories) {
			t.Helper()
			must(t, d0.make("a"), d0.write("a", specFile, specRecord{boot, mps.Daemon{ID: "b", Devices: d.Devices}}))
		}, false},
		"invalid specification": {func(t *testing.T, d0 directories) {
			t.Helper()
			must(t, d0.make("a"), d0.write("a", specFile, specRecord{boot, mps.Daemon{ID: "a"}}))
		}, false},
		"unreadable specification": {func(t *testing.T, d0 directories) {
			t.Helper()
			must(t, d0.make("a"), os.WriteFile(filepath.Join(d0.paths.Dir("a"), specFile), []byte("{"), 0o600))
		}, false},
		"directories without a specification": {func(t *testing.T, d0 directories) { t.Helper(); must(t, d0.make("a")) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			d0 := directories{paths: n.paths}
			must(t, d0.prepare())
			c.put(t, d0)
			leftover, started := n.leftover()
			must(t, d0.write("a", runFile, runRecord{leftover.Process.Pid, started}))
			ended := make(chan error, 1)
			go func() { ended <- leftover.Wait() }()
			n.supervise()
			if err := <-ended; err == nil {
				t.Error("the leftover process was not killed")
			}
			if c.runs {
				n.await("the daemon is ready", func() bool { return n.status("a").State == mps.Ready })
				n.mustStop("a")
				return
			}
			n.await("the daemon is removed", func() bool {
				_, err := os.Lstat(n.paths.Dir("a"))
				return err != nil
			})
			if s := n.status("a"); s.State != "" {
				t.Errorf("%+v", s)
			}
		})
	}
}

// The supervisor must signal no unrelated process, neither one with the PID in run.json nor an MPS
// program of another session.
func TestUnrelatedProcessSurvives(t *testing.T) {
	for name, record := range map[string]func(pid int, started string) runRecord{
		"PID used again":  func(pid int, _ string) runRecord { return runRecord{pid, "1"} },
		"another session": func(int, string) runRecord { return runRecord{os.Getpid(), "1"} },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			other, started := n.leftover()
			d0 := directories{paths: n.paths}
			boot, err := durable.BootID(procRoot)
			must(t, err, d0.prepare(), d0.make("a"), d0.writeSpec(boot, mps.Daemon{ID: "a", Devices: []string{"GPU-a"}}))
			must(t, d0.write("a", runFile, record(other.Process.Pid, started)))
			n.supervise()
			n.await("the daemon is ready", func() bool { return n.status("a").State == mps.Ready })
			begin := time.Now()
			n.killProcess(n.status("a").PID)
			n.await("the daemon is ready again", func() bool { s := n.status("a"); return s.State == mps.Ready && s.Restarts > 0 })
			n.mustStop("a")
			if took := time.Since(begin); took > terminateWait+killWait {
				t.Errorf("stopping waited for the unrelated process: %s", took)
			}
			if now, err := readStat(procRoot, other.Process.Pid); err != nil || now.state == "Z" {
				t.Errorf("an unrelated process was killed: %+v, %v", now, err)
			}
		})
	}
}
