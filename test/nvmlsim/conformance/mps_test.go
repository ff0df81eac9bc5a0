package conformance

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
)

func TestMPSDaemonLifecycle(t *testing.T) {
	for _, kind := range []layout.Kind{layout.Host, layout.Container, layout.Bare} {
		t.Run(string(kind), func(t *testing.T) {
			s := newService(t, "l40s-x2", kind)
			if out, err := s.tell("get_server_list"); err == nil || out != "Cannot find MPS control daemon process\n" {
				t.Errorf("without a daemon: %q (%v)", out, err)
			}
			s.startDaemon(s.uuid(1))
			s.expect("", "get_server_list") // the daemon starts a server only for the first client
			s.expect("100.0\n", "get_default_active_thread_percentage")
			second := s.command("nvidia-cuda-mps-control", []string{"-d"})
			if out, err := second.CombinedOutput(); err == nil || string(out) != "An instance of this daemon is already running\n" {
				t.Errorf("a second daemon: %q (%v)", out, err)
			}
			for name, mode := range map[string]os.FileMode{
				"control": os.ModeSocket | 0o666, "control_privileged": os.ModeSocket | 0o755, "control_lock": 0o666,
				"nvidia-cuda-mps-control.pid": 0o666, "log": os.ModeNamedPipe | 0o777,
			} {
				info, err := os.Lstat(filepath.Join(s.pipes, name))
				if err != nil || info.Mode() != mode {
					t.Errorf("%s: %v (%v), want mode %v", name, info, err, mode)
				}
			}
			p := s.compute(0, []string{"--hold"})
			got := p.attached()
			if got.Mode != "mps" || len(got.Devices) != 1 || got.Devices[0].UUID != s.uuid(1) {
				t.Errorf("attached: %+v, want %s by mps", got, s.uuid(1))
			}
			s.expect(fmt.Sprintln(got.Server), "get_server_list")
			s.expect("ACTIVE\n", fmt.Sprintf("get_server_status %d", got.Server))
			s.expect(fmt.Sprintln(p.command.Process.Pid), fmt.Sprintf("get_client_list %d", got.Server))
			s.expect(fmt.Sprintf("%s: %d\n", s.uuid(1), p.command.Process.Pid), "get_device_client_list")
			p.kill()
			waitFor(t, "the client to be gone", func() bool { out, _ := s.tell(fmt.Sprintf("get_client_list %d", got.Server)); return out == "" })
			s.expect(fmt.Sprintln(got.Server), "get_server_list") // the server stays without clients
			s.expect("", "quit")
			waitFor(t, "the PID file to be gone", func() bool {
				_, err := os.Stat(filepath.Join(s.pipes, "nvidia-cuda-mps-control.pid"))
				return os.IsNotExist(err)
			})
			for _, log := range []string{"control.log", "server.log"} {
				if text, err := os.ReadFile(filepath.Join(s.logs, log)); err != nil || len(text) == 0 {
					t.Errorf("%s: %q (%v)", log, text, err)
				}
			}
		})
	}
}

// After an MPS daemon was killed, a new daemon must take over the pipe directory. Clients of the
// killed daemon must continue, and programs that start before the new daemon must run without MPS.
func TestNewDaemonReplacesKilledOne(t *testing.T) {
	s := newService(t, "l40s-x2", layout.Host)
	s.startDaemon(s.uuid(0))
	holder := s.compute(0, []string{"--hold"})
	server := holder.attached().Server
	pid := s.daemonPID()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the daemon to be gone", func() bool { return !alive(pid) })
	if got := s.compute(0, nil).attached(); got.Mode != "direct" {
		t.Errorf("without a daemon a program is attached by %s, want direct", got.Mode)
	}
	s.startDaemon(s.uuid(0))
	if got := s.compute(0, nil).attached(); got.Mode != "mps" || got.Server == server {
		t.Errorf("attached: %+v, want a server other than %d", got, server)
	}
	holder.next("holding")
	holder.kill()
	waitFor(t, "the orphaned server to end with its last client", func() bool { return !alive(server) })
}

// alive reports whether a process runs. A zombie whose threads have all ended does not run.
func alive(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	return !strings.HasPrefix(rest, "Z") || len(threads) > 1
}

func TestMPSLimits(t *testing.T) {
	s := newService(t, "l40s-x2", layout.Host)
	s.startDaemon(s.uuid(0) + "," + s.uuid(1))
	s.expect("25.0\n", "set_default_active_thread_percentage 25")
	s.expect("25.0\n", "get_default_active_thread_percentage")
	s.expect("", "get_default_device_pinned_mem_limit 0")
	s.expect("", "set_default_device_pinned_mem_limit 0 3000M", "set_default_device_pinned_mem_limit 1 2G")
	s.expect("2G\n2G\n", "get_default_device_pinned_mem_limit 0", "get_default_device_pinned_mem_limit 1") // of 3000 MiB, whole GiB are shown
	type limit struct {
		memory  uint64
		threads float64
	}
	for _, test := range []struct {
		name string
		env  []string
		want []limit
	}{
		{"the daemon's own", nil, []limit{{3000, 25}, {2048, 25}}},
		{"less by the environment", []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1G," + s.uuid(1) + "=512M",
			"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=10"}, []limit{{1024, 10}, {512, 10}}},
		{"more by the environment is not more", []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=40G", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=90"},
			[]limit{{3000, 25}, {2048, 25}}},
		{"of one device", []string{"CUDA_VISIBLE_DEVICES=" + s.uuid(1), "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=100M"}, []limit{{100, 25}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := s.compute(0, []string{"--fill"}, test.env...)
			got := p.attached()
			if len(got.Devices) != len(test.want) {
				t.Fatalf("%+v, want %v", got.Devices, test.want)
			}
			for i, want := range test.want {
				if d := got.Devices[i]; d.MemoryLimitMiB != want.memory || d.ThreadPercentage != want.threads {
					t.Errorf("device %d: %d MiB, %v %%; want %v", i, d.MemoryLimitMiB, d.ThreadPercentage, want)
				}
			}
			if filled := p.next("filled"); filled.MiB != test.want[0].memory {
				t.Errorf("%d MiB are to be had, want %d", filled.MiB, test.want[0].memory)
			}
		})
	}
	p := s.compute(0, []string{"--allocate", "2999,2"})
	p.attached()
	p.next("allocated")
	if over := p.next("failed"); over.Error != "CUDA_ERROR_OUT_OF_MEMORY" {
		t.Errorf("over the limit: %+v", over)
	}
	s.compute(0, nil, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=5").failed("CUDA_ERROR_INVALID_VALUE")
}

// New default limits must apply only to servers that start later. Limits of a running server must
// be changed by its PID.
func TestMPSDefaultsApplyToNextServer(t *testing.T) {
	s := newService(t, "l40s-x2", layout.Host)
	s.startDaemon(s.uuid(0))
	threads := func() (int, float64) {
		got := s.compute(0, nil).attached()
		return got.Server, got.Devices[0].ThreadPercentage
	}
	server, have := threads()
	s.expect("40.0\n", "set_default_active_thread_percentage 40")
	if _, now := threads(); have != 100 || now != 100 {
		t.Errorf("%v %%, then %v %%: want 100", have, now)
	}
	s.expect("60.0\n60.0\n", fmt.Sprintf("set_active_thread_percentage %d 60", server), fmt.Sprintf("get_active_thread_percentage %d", server))
	if _, now := threads(); now != 60 {
		t.Errorf("%v %%, want 60", now)
	}
	s.expect("", fmt.Sprintf("shutdown_server %d", server))
	if next, now := threads(); now != 40 || next == server {
		t.Errorf("server %d with %v %%, want another with 40", next, now)
	}
}
