package conformance

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// Only one process can compute on a GPU in exclusive mode. If that process is the MPS server, its
// clients can all compute on the GPU.
func TestExclusiveGPUServesOneProcess(t *testing.T) {
	s := newService(t, "l40s-x2", layout.Host)
	s.setComputeMode(0, nvml.COMPUTEMODE_EXCLUSIVE_PROCESS)
	alone := []string{"CUDA_MPS_PIPE_DIRECTORY=" + s.pipes + "-none", "CUDA_VISIBLE_DEVICES=" + s.uuid(0)}
	first := s.compute(0, []string{"--hold"}, alone...)
	first.attached()
	s.compute(0, nil, alone...).failed("CUDA_ERROR_DEVICE_UNAVAILABLE")
	s.compute(0, nil, alone[0], "CUDA_VISIBLE_DEVICES="+s.uuid(1)).attached()
	s.startDaemon(s.uuid(0))
	s.compute(0, nil).failed("CUDA_ERROR_DEVICE_UNAVAILABLE") // the server does not get the GPU while the first program computes
	first.kill()
	for range 3 {
		s.compute(0, []string{"--hold"}).attached()
	}
	s.compute(0, nil, alone...).failed("CUDA_ERROR_DEVICE_UNAVAILABLE")
	s.setComputeMode(0, nvml.COMPUTEMODE_PROHIBITED)
	s.compute(0, nil, alone...).failed("CUDA_ERROR_DEVICE_UNAVAILABLE")
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, to be several users")
	}
}

// open lets other users read the node's files, which lie in a temporary folder of the test's user.
func (s *service) open() {
	for folder := s.root; folder != "/" && folder != os.TempDir(); folder = filepath.Dir(folder) {
		if err := os.Chmod(folder, 0o755); err != nil {
			s.t.Fatal(err)
		}
	}
	if err := os.Chmod(s.dev, 0o755); err != nil {
		s.t.Fatal(err)
	}
}

func TestClientsOfAnotherUserWait(t *testing.T) {
	needRoot(t)
	s := newService(t, "l40s-x2", layout.Host)
	s.open()
	s.startDaemon(s.uuid(0))
	first, mate := s.compute(1000, []string{"--hold"}), s.compute(1000, []string{"--hold"})
	server := first.attached().Server
	mate.attached()
	other := s.compute(1001, []string{"--hold"})
	other.next("pending")
	late := s.compute(1000, []string{"--hold"})
	late.next("pending") // waits behind the other program
	first.kill()
	mate.kill()
	got := other.next("attached")
	if got.Server == server || got.Mode != "mps" {
		t.Errorf("the other user is served by %d", got.Server)
	}
	other.kill()
	late.attached()
}

func TestMultiUserServerServesAllUsers(t *testing.T) {
	needRoot(t)
	s := newService(t, "l40s-x2", layout.Host)
	s.open()
	s.startDaemon(s.uuid(0), "-multiuser-server")
	servers := map[int]bool{}
	for _, user := range []uint32{0, 1000, 1001, 1002} {
		servers[s.compute(user, []string{"--hold"}).attached().Server] = true
	}
	if len(servers) != 1 {
		t.Errorf("%d servers, want one", len(servers))
	}
	command := s.command("nvidia-cuda-mps-control", nil)
	command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1000, Gid: 1000}}
	command.Stdin = strings.NewReader("quit\n")
	if out, err := command.CombinedOutput(); err != nil || !strings.Contains(string(out), "Not enough privilege") {
		t.Errorf("another user's command: %s (%v)", out, err)
	}
	s.expect("100.0\n", "get_default_active_thread_percentage")
}

// quit must wait until the clients have ended; quit with a timeout must wait no longer than the
// timeout.
func TestQuitWaitsForClients(t *testing.T) {
	s := newService(t, "l40s-x2", layout.Host)
	s.startDaemon(s.uuid(0))
	p := s.compute(0, []string{"--hold"})
	p.attached()
	p.next("holding")
	daemon := s.daemonPID()
	done := make(chan error, 1)
	go func() { _, err := s.tell("quit"); done <- err }()
	waitFor(t, "the daemon to admit no client", func() bool {
		out, _ := s.command("nvmlsim-cuda", nil).Output()
		return strings.Contains(string(out), "CUDA_ERROR_MPS_SERVER_NOT_READY")
	})
	select {
	case err := <-done:
		t.Fatalf("quit returned (%v) while a client is there", err)
	default:
	}
	p.kill()
	if err := <-done; err != nil {
		t.Error(err)
	}
	waitFor(t, "the daemon to end", func() bool { return !alive(daemon) })

	s.startDaemon(s.uuid(0))
	p = s.compute(0, []string{"--hold"})
	p.attached()
	p.next("holding")
	s.expect("", "quit -t 0")
	if lost := p.next("lost"); lost.Error != "CUDA_ERROR_MPS_RPC_FAILURE" {
		t.Errorf("the client says %+v", lost)
	}
}

// A client that does not share /dev/shm with the MPS server must fail to attach.
func TestClientNeedsServersSharedMemory(t *testing.T) {
	needRoot(t)
	s := newService(t, "l40s-x2", layout.Host)
	s.startDaemon(s.uuid(0))
	s.compute(0, nil).attached()
	command := s.command("nvmlsim-cuda", nil)
	command.Args = append([]string{"unshare", "-m", "sh", "-c", `mount -t tmpfs none /dev/shm && exec "$0"`}, command.Path)
	path, err := exec.LookPath("unshare")
	if err != nil {
		t.Skip("no unshare here")
	}
	command.Path = path
	out, _ := command.CombinedOutput()
	if !strings.Contains(string(out), "CUDA_ERROR_MPS_RPC_FAILURE") || !strings.Contains(string(out), "/dev/shm") {
		t.Errorf("with a /dev/shm of its own: %s", out)
	}
}

// If the pipe directory's path is too long for a socket, the daemon must fail with the real
// program's message.
func TestPipeDirectoryTooLong(t *testing.T) {
	s := newService(t, "l40s-x2", layout.Host)
	s.pipes = filepath.Join(filepath.Dir(s.pipes), strings.Repeat("x", 100))
	out, err := s.command("nvidia-cuda-mps-control", []string{"-d"}).CombinedOutput()
	if err == nil || string(out) != "Cannot find MPS control daemon process\n" {
		t.Errorf("%s (%v)", out, err)
	}
}

// Injected faults must be able to delay or fail the daemon's start, its answers and the server's
// start.
func TestMPSFaults(t *testing.T) {
	s := newService(t, "l40s-x2", layout.Host)
	fault := func(kind uint32, function string) {
		s.change(func(_ *layout.Config, f *state.File) error {
			return f.AddFault(
				state.Fault{Kind: kind, Error: uint32(nvml.ERROR_UNKNOWN), DelayMS: uint64(time.Hour.Milliseconds()), GPU: state.AnyGPU},
				function,
				1,
			)
		})
	}
	hangs := func(what string, done <-chan error) {
		t.Helper()
		waitFor(t, what+" to arrive", func() bool {
			hit := false
			s.change(func(_ *layout.Config, f *state.File) error {
				hit = atomic.LoadUint64(&f.Fault(0).Hits) == 1
				return nil
			})
			return hit
		})
		select {
		case err := <-done:
			t.Errorf("%s does not hang: %v", what, err)
		default:
		}
		s.change(func(_ *layout.Config, f *state.File) error { return f.ClearFaults() })
		if err := <-done; err != nil {
			t.Errorf("%s, let go: %v", what, err)
		}
	}
	inBackground := func(do func() error) <-chan error {
		done := make(chan error, 1)
		go func() { done <- do() }()
		return done
	}
	fault(state.FaultFail, "mpsControlStart")
	if out, err := s.command("nvidia-cuda-mps-control", []string{"-d"}).CombinedOutput(); err == nil ||
		!strings.Contains(string(out), "NVML_ERROR_UNKNOWN") {
		t.Errorf("a failing start: %s (%v)", out, err)
	}
	s.change(func(_ *layout.Config, f *state.File) error { return f.ClearFaults() })
	fault(state.FaultSlow, "mpsControlStart")
	hangs("the start", inBackground(s.command("nvidia-cuda-mps-control", []string{"-d"}, "CUDA_VISIBLE_DEVICES="+s.uuid(0)).Run))
	t.Cleanup(func() { _, _ = s.tell("quit -t 0") })
	fault(state.FaultSlow, "mpsControlCommand")
	hangs("an answer", inBackground(func() error { _, err := s.tell("get_server_list"); return err }))
	fault(state.FaultFail, "mpsServerStart")
	s.compute(0, nil).failed("CUDA_ERROR_MPS_SERVER_NOT_READY")
	s.change(func(_ *layout.Config, f *state.File) error { return f.ClearFaults() })
	fault(state.FaultSlow, "mpsServerStart")
	p := s.compute(0, nil)
	p.next("pending")
	done := inBackground(func() error { p.attached(); return nil })
	hangs("a server", done)
}

// In a container, nvidia-cuda-mps-control can run the stand-in of a CUDA program, because the
// container has the MPS programs but no nvmlsim-cuda.
func TestStandInRunsByInjectedName(t *testing.T) {
	s := newService(t, "l40s-x2", layout.Host)
	out, err := s.command("nvidia-cuda-mps-control", []string{"nvmlsim-cuda", "--allocate", "10"}, "CUDA_VISIBLE_DEVICES="+s.uuid(1)).
		CombinedOutput()
	if err != nil || !strings.Contains(string(out), s.uuid(1)) {
		t.Errorf("%s (%v)", out, err)
	}
}
