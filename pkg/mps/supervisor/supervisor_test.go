package supervisor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

func TestDaemonStartsWithLimitsAndStopsCleanly(t *testing.T) {
	n := newNode(t)
	n.supervise()
	n.mustStart(daemonWithLimits("claim-0", "GPU-a", "GPU-b"))
	s := n.status("claim-0")
	if s.State != mps.Ready || s.PID == 0 {
		t.Errorf("%+v", s)
	}
	log, err := os.ReadFile(filepath.Join(n.paths.Logs("claim-0"), outputFile))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"-f -multiuser-server", "devices GPU-a,GPU-b",
		"set_default_active_thread_percentage 40", "pinned_mem_limit 0 18432M", "pinned_mem_limit 1 1500M"} {
		if !strings.Contains(string(log), want) {
			t.Errorf("the control daemon did not get %q:\n%s", want, log)
		}
	}
	n.mustStop("claim-0")
	n.mustStop("claim-0") // To stop a stopped daemon is no error.
	if !strings.Contains(n.supervisorLog(), "MPS daemon logged") || !strings.Contains(n.supervisorLog(), "Cmd:quit -t 2") {
		t.Errorf("the daemon's log is not in the supervisor's log:\n%s", n.supervisorLog())
	}
}

func TestNonRootClientsReachTheDirectories(t *testing.T) {
	n := newNode(t)
	n.supervise()
	n.mustStart(mps.Daemon{ID: "a", Devices: []string{"GPU-a"}})
	for dir, want := range map[string]os.FileMode{n.paths.Pipes("a"): shared, n.paths.Shm("a"): shared, n.paths.Logs("a"): 0o700} {
		info, err := os.Stat(dir)
		if err != nil {
			t.Fatal(err)
		}
		if have := info.Mode() & (os.ModePerm | os.ModeSticky); have != want {
			t.Errorf("%s has mode %v, want %v", dir, have, want)
		}
	}
}

func TestClientDirectoriesHaveSELinuxLabel(t *testing.T) {
	n := newNode(t)
	n.options.SELinuxLabel = "system_u:object_r:container_file_t:s0"
	n.supervise()
	if err := n.start(mps.Daemon{ID: "a", Devices: []string{"GPU-a"}}); err != nil {
		if !strings.Contains(err.Error(), "--selinux-label") {
			t.Fatal(err)
		}
		n.mustStop("a")
		t.Skip("this file system does not support labels: ", err)
	}
	for dir, want := range map[string]string{n.paths.Pipes("a"): n.options.SELinuxLabel,
		n.paths.Shm("a"): n.options.SELinuxLabel, n.paths.Logs("a"): ""} {
		label := make([]byte, 100)
		length, err := unix.Lgetxattr(dir, selinux, label)
		if have := strings.TrimRight(string(label[:max(0, length)]), "\x00"); have != want &&
			(want != "" || err == nil && have == n.options.SELinuxLabel) {
			t.Errorf("%s has label %q (%v), not %q", dir, have, err, want)
		}
	}
	n.mustStop("a")
}

func TestStartRestartsOnlyChangedDaemon(t *testing.T) {
	n := newNode(t)
	n.supervise()
	d := daemonWithLimits("a", "GPU-a", "GPU-b")
	n.mustStart(d)
	first := n.status("a").PID
	pipes, err := os.Stat(n.paths.Pipes("a"))
	if err != nil {
		t.Fatal(err)
	}
	n.mustStart(d)
	if pid := n.status("a").PID; pid != first {
		t.Errorf("an unchanged daemon was restarted: PID %d is now %d", first, pid)
	}
	d.Devices = []string{"GPU-a", "GPU-c"}
	n.mustStart(d)
	if pid := n.status("a").PID; pid == first {
		t.Error("a daemon with other devices was not restarted")
	}
	again, err := os.Stat(n.paths.Pipes("a"))
	if err != nil || !os.SameFile(pipes, again) {
		t.Error("the pipe directory was replaced, but running containers have the old one", err)
	}
}

func TestStartRestoresChangedLimits(t *testing.T) {
	n := newNode(t)
	n.supervise()
	d := daemonWithLimits("a", "GPU-a", "GPU-b")
	n.mustStart(d)
	c, err := newControl(mustComplete(t, n.options), d)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.ask(t.Context(), "set_default_active_thread_percentage 90"); err != nil {
		t.Fatal(err)
	}
	n.mustStart(d)
	if answer, err := c.ask(t.Context(), "get_default_active_thread_percentage"); err != nil || answer != "40.0" {
		t.Error(answer, err)
	}
}

func mustComplete(t *testing.T, o Options) Options {
	t.Helper()
	if err := o.complete(); err != nil {
		t.Fatal(err)
	}
	return o
}

func TestFailedStartExplainsAndCleansUp(t *testing.T) {
	for name, c := range map[string]struct {
		behave behaviour
		change func(*node)
		want   []string
	}{
		"daemon that ends": {behaviour{Exit: "Cannot initialize CUDA"}, nil,
			[]string{"control daemon ended", "exit status 1", "Cannot initialize CUDA"}},
		"daemon that hangs": {behaviour{Hang: []string{"GPU-a"}}, nil, []string{"is not ready after 500ms"}},
		"daemon that hangs and ignores SIGTERM": {behaviour{Hang: []string{"GPU-a"}, IgnoreTerm: true}, nil,
			[]string{"is not ready after 500ms"}},
		"daemon that does not answer": {behaviour{Deaf: true}, nil, []string{"is not ready after 500ms"}},
		"daemon that forgets limits": {behaviour{Forget: true}, nil,
			[]string{"does not keep", "set_default_device_pinned_mem_limit 0 18432M"}},
		"daemon without multi-user option": {behaviour{Old: true}, nil, []string{"no MPS for several users", "upgrade the driver"}},
		"no driver": {behaviour{}, func(n *node) { _ = os.RemoveAll(n.options.DriverRootMount) },
			[]string{"/opt/driver", "find the driver's MPS"}},
		"no server": {behaviour{}, func(n *node) { _ = os.Remove(filepath.Join(n.options.DriverRootMount, "usr/sbin", serverProgram)) },
			[]string{"nvidia-cuda-mps-server", "/opt/driver"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.options.StartTimeout = patience
			if c.behave.Deaf || c.behave.Hang != nil {
				n.options.StartTimeout = 500 * time.Millisecond // The other cases must not fail by a timeout.
			}
			n.behave(c.behave)
			n.supervise()
			if c.change != nil {
				c.change(n)
			}
			err := n.start(daemonWithLimits("a", "GPU-a", "GPU-b"))
			if err == nil {
				t.Fatal("the daemon started")
			}
			for _, want := range append(c.want, "start MPS daemon a: ") {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q is not in: %v", want, err)
				}
			}
			n.mustStop("a")
			if s := n.status("a"); s.State != "" {
				t.Errorf("the daemon is still known: %+v", s)
			}
		})
	}
}

func TestHangingStartDoesNotDelayOthers(t *testing.T) {
	n := newNode(t)
	n.behave(behaviour{Hang: []string{"GPU-bad"}})
	n.supervise()
	hanging, cancel := context.WithCancel(t.Context())
	var wait sync.WaitGroup
	wait.Go(func() {
		if err := n.client.Start(hanging, mps.Daemon{ID: "bad", Devices: []string{"GPU-bad"}}); !errors.Is(err, context.Canceled) {
			t.Error("the hanging start returned:", err)
		}
	})
	n.await("the hanging daemon is there", func() bool { return len(n.daemons("bad")) == 1 })
	for _, id := range []string{"a", "b", "c"} {
		n.mustStart(mps.Daemon{ID: id, Devices: []string{"GPU-" + id}})
		n.mustStop(id)
	}
	cancel()
	wait.Wait()
	n.mustStop("bad") // Stop must not wait for the start timeout.
}

func TestDeadDaemonRestartsInSameDirectories(t *testing.T) {
	n := newNode(t)
	n.behave(behaviour{Server: true})
	n.supervise()
	n.mustStart(daemonWithLimits("a", "GPU-a", "GPU-b"))
	first := n.status("a").PID
	pipes, err := os.Stat(n.paths.Pipes("a"))
	if err != nil {
		t.Fatal(err)
	}
	n.killProcess(first)
	n.await("the daemon is ready again", func() bool { s := n.status("a"); return s.State == mps.Ready && s.PID != first })
	if again, err := os.Stat(n.paths.Pipes("a")); err != nil || !os.SameFile(pipes, again) {
		t.Error("the pipe directory was replaced", err)
	}
	if s := n.status("a"); s.Restarts != 1 {
		t.Errorf("%+v", s)
	}
	if pids := n.processes("a"); len(pids) != 2 {
		t.Errorf("want one daemon and its server, got processes %v", pids)
	}
	if !strings.Contains(n.supervisorLog(), "signal: killed") {
		t.Errorf("the exit status is not in the log:\n%s", n.supervisorLog())
	}
	n.mustStop("a")
}

func TestStartRetriesFailedDaemonAtOnce(t *testing.T) {
	n := newNode(t)
	n.supervise()
	d := mps.Daemon{ID: "a", Devices: []string{"GPU-a"}}
	n.mustStart(d)
	n.behave(behaviour{Exit: "out of order"})
	n.killProcess(n.status("a").PID)
	n.await("the daemon fails", func() bool { return n.status("a").Restarts > 1 })
	if err := n.start(d); err == nil || !strings.Contains(err.Error(), "out of order") {
		t.Error(err)
	}
	if n.status("a").Daemon.ID != "a" {
		t.Error("a failing daemon was removed")
	}
	n.behave(behaviour{})
	n.mustStart(d)
}

func TestUnresponsiveDaemonIsNotRestarted(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.supervise()
	d := mps.Daemon{ID: "a", Devices: []string{"GPU-a"}}
	n.mustStart(d)
	pid := n.status("a").PID
	must(t, unix.Kill(pid, unix.SIGSTOP)) // A stopped process cannot answer, but SIGKILL ends it.
	if err := n.start(d); err == nil || !strings.Contains(err.Error(), "does not answer") || !strings.Contains(err.Error(), itoa(pid)) {
		t.Error(err)
	}
	if n.status("a").PID != pid {
		t.Error("the daemon was restarted")
	}
	n.mustStop("a")
}

// The context of Start can end while the supervisor asks a ready daemon for an answer, for example
// because the plugin is killed. The daemon may be fine then, so the error must not suggest to kill
// it.
func TestCanceledStartDoesNotBlameDaemon(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.supervise()
	d := mps.Daemon{ID: "a", Devices: []string{"GPU-a"}}
	n.mustStart(d)
	before, pid := len(n.processes("a")), n.status("a").PID
	must(t, unix.Kill(pid, unix.SIGSTOP))
	ctx, cancel := context.WithCancel(t.Context())
	gaveUp := make(chan error, 1)
	go func() { gaveUp <- n.client.Start(ctx, d) }()
	n.await("the supervisor asks the daemon", func() bool { return len(n.processes("a")) > before })
	cancel()
	if err := <-gaveUp; err == nil {
		t.Error("a stopped daemon answered")
	}
	n.await("the supervisor has given up too", func() bool { return strings.Contains(n.supervisorLog(), "context canceled") })
	if log := n.supervisorLog(); strings.Contains(log, "kill process") {
		t.Errorf("the log suggests to kill the daemon:\n%s", log)
	}
	must(t, unix.Kill(pid, unix.SIGCONT))
	n.mustStop("a")
}

// If another program removes a daemon's directory, a new container would not share that directory
// with the daemon. So Start must fail until the daemon has restarted.
func TestRemovedDirectoriesAreReported(t *testing.T) {
	for name, dir := range map[string]func(mps.Paths, string) string{"shared memory": mps.Paths.Shm, "pipes": mps.Paths.Pipes} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.supervise()
			d := mps.Daemon{ID: "a", Devices: []string{"GPU-a"}}
			n.mustStart(d)
			pid := n.status("a").PID
			must(t, unmountAll(dir(n.paths, "a")), os.RemoveAll(dir(n.paths, "a")))
			for range 2 {
				if err := n.start(d); err == nil || !strings.Contains(err.Error(), "was removed under") || !strings.Contains(err.Error(), itoa(pid)) {
					t.Error(err)
				}
			}
			n.killProcess(pid)
			n.await("the daemon is ready again", func() bool { s := n.status("a"); return s.State == mps.Ready && s.PID != pid })
			n.mustStart(d)
			n.mustStop("a")
		})
	}
}

func TestStopKillsStubbornDaemonAndServer(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.behave(behaviour{IgnoreQuit: true, IgnoreTerm: true, Server: true})
	n.supervise()
	n.mustStart(mps.Daemon{ID: "a", Devices: []string{"GPU-a"}})
	n.mustStop("a")
}

// A daemon that loses its file run.json must not survive its Stop: the next claim gets its GPU.
func TestStopFindsDaemonWithoutRunFile(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(path string) error{
		"removed": os.Remove,
		"altered": func(path string) error { return os.WriteFile(path, []byte("no JSON"), 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.behave(behaviour{IgnoreQuit: true, Server: true})
			n.supervise()
			n.mustStart(mps.Daemon{ID: "a", Devices: []string{"GPU-a"}})
			must(t, lose(filepath.Join(n.paths.Dir("a"), runFile)))
			n.mustStop("a")
		})
	}
}

func TestShutdownStopsDaemonsAndNextSupervisorRestartsThem(t *testing.T) {
	n := newNode(t)
	n.supervise()
	d := daemonWithLimits("a", "GPU-a", "GPU-b")
	n.mustStart(d)
	n.stop()
	if pids := n.processes("a"); len(pids) > 0 {
		t.Errorf("processes %v are left", pids)
	}
	if !strings.Contains(n.supervisorLog(), "Cmd:quit") {
		t.Errorf("the daemon did not get quit:\n%s", n.supervisorLog())
	}
	if err := n.start(d); err == nil || !strings.Contains(err.Error(), "mps.enabled") {
		t.Error("without a supervisor:", err)
	}
	n.supervise()
	n.await("the daemon is ready again", func() bool { return n.status("a").State == mps.Ready })
	n.mustStart(d)
	n.mustStop("a")
	n.stop()
	if _, err := os.Lstat(n.paths.PluginDir); !errors.Is(err, os.ErrNotExist) {
		t.Error("directories are left without daemons", err)
	}
}

func TestSecondSupervisorWaitsForFirst(t *testing.T) {
	n := newNode(t)
	n.supervise()
	n.mustStart(mps.Daemon{ID: "a", Devices: []string{"GPU-a"}})
	pid := n.status("a").PID
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Run(ctx, n.options); err == nil || !strings.Contains(err.Error(), "another supervisor") {
		t.Error(err)
	}
	if n.status("a").PID != pid {
		t.Error("the second supervisor changed the daemon")
	}
}

func TestConcurrentDaemons(t *testing.T) {
	n := newNode(t)
	n.supervise()
	var wait sync.WaitGroup
	for i := range 8 {
		wait.Go(func() {
			id := "d" + itoa(i)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			for range 2 {
				if err := n.client.Start(ctx, mps.Daemon{ID: id, Devices: []string{"GPU-" + id}}); err != nil {
					t.Error(err)
				}
				if err := n.client.Stop(ctx, id); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wait.Wait()
	if ids, err := (directories{paths: n.paths}).daemonIDs(); err != nil || len(ids) > 0 {
		t.Error(ids, err)
	}
}
