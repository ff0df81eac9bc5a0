package conformance

import (
	"bufio"
	"encoding/json"
	"fmt"
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
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// service is a site with a folder for an MPS daemon's pipes and one for its logs. The folders' names are short: a socket's path has 107 characters at most.
type service struct {
	*site
	pipes, logs string
}

func newService(t *testing.T, node string, kind layout.Kind) *service {
	t.Helper()
	s := newSite(t, node, kind, "")
	folder, err := os.MkdirTemp("", "mps") //nolint:usetesting // a test's own folder has a long name
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	if err := os.Chmod(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	return &service{site: s, pipes: filepath.Join(folder, "pipe"), logs: filepath.Join(folder, "log")}
}

func (s *service) program(name string) string {
	if s.kind == layout.Bare {
		return filepath.Join(s.driverRoot(), "bin", name)
	}
	return filepath.Join(s.driverRoot(), "usr/bin", name)
}

func (s *service) command(name string, args []string, env ...string) *exec.Cmd {
	command := exec.Command(s.program(name), args...)
	command.Env = append(os.Environ(), s.environment()...)
	command.Env = append(command.Env, "CUDA_MPS_PIPE_DIRECTORY="+s.pipes, "CUDA_MPS_LOG_DIRECTORY="+s.logs)
	command.Env = append(command.Env, env...)
	return command
}

// uuid is a GPU's.
func (s *service) uuid(i int) string { return s.options.Config.Node.GPUs[i].UUID }

// startDaemon starts a daemon in the background for the devices; it is ended with the test.
func (s *service) startDaemon(devices string, args ...string) {
	s.t.Helper()
	command := s.command("nvidia-cuda-mps-control", append([]string{"-d"}, args...), "CUDA_VISIBLE_DEVICES="+devices)
	if out, err := command.CombinedOutput(); err != nil {
		s.t.Fatalf("nvidia-cuda-mps-control -d: %v\n%s", err, out)
	}
	s.t.Cleanup(func() { _, _ = s.tell("quit -t 0") })
}

// tell sends commands to the daemon and gives what is printed, and whether the program succeeded.
func (s *service) tell(commands ...string) (string, error) {
	command := s.command("nvidia-cuda-mps-control", nil)
	command.Stdin = strings.NewReader(strings.Join(commands, "\n") + "\n")
	out, err := command.CombinedOutput()
	return string(out), err
}

func (s *service) expect(want string, commands ...string) {
	s.t.Helper()
	if out, err := s.tell(commands...); err != nil || out != want {
		s.t.Errorf("%s: %q (%v), want %q", strings.Join(commands, "; "), out, err, want)
	}
}

// said is a line of the stand-in of a CUDA program.
type said struct {
	Event   string
	Mode    string
	Server  int
	Devices []mps.Device
	MiB     uint64
	Error   string
	Message string
}

// program is a running stand-in of a CUDA program.
type program struct {
	t       *testing.T
	command *exec.Cmd
	lines   *bufio.Scanner
}

// compute starts the stand-in as a user of the node: 0 or another.
func (s *service) compute(user uint32, args []string, env ...string) *program {
	s.t.Helper()
	command := s.command("nvmlsim-cuda", args, env...)
	if user != 0 {
		command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	}
	command.Stderr = os.Stderr
	out, err := command.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		s.t.Fatal(err)
	}
	p := &program{t: s.t, command: command, lines: bufio.NewScanner(out)}
	s.t.Cleanup(p.kill)
	return p
}

func (p *program) kill() {
	_ = p.command.Process.Kill()
	_ = p.command.Wait()
}

// next gives the program's next line, which must be of this event.
func (p *program) next(event string) said {
	p.t.Helper()
	var l said
	if !p.lines.Scan() {
		p.t.Fatalf("the program ended: want %s", event)
	}
	if err := json.Unmarshal(p.lines.Bytes(), &l); err != nil || l.Event != event {
		p.t.Fatalf("the program says %s (%v), want %s", p.lines.Text(), err, event)
	}
	return l
}

// attached gives what the program says when it has the GPUs; it may have waited.
func (p *program) attached() said {
	p.t.Helper()
	for {
		var l said
		if !p.lines.Scan() {
			p.t.Fatal("the program ended before it was attached")
		}
		if err := json.Unmarshal(p.lines.Bytes(), &l); err != nil {
			p.t.Fatal(err)
		}
		if l.Event != "pending" {
			if l.Event != "attached" {
				p.t.Fatalf("the program says %s", p.lines.Text())
			}
			return l
		}
	}
}

// failed gives the error with which the program did not get the GPUs.
func (p *program) failed(want string) {
	p.t.Helper()
	for p.lines.Scan() {
		var l said
		if err := json.Unmarshal(p.lines.Bytes(), &l); err != nil {
			p.t.Fatal(err)
		}
		if l.Event == "pending" {
			continue
		}
		if l.Event != "failed" || l.Error != want {
			p.t.Errorf("the program says %s, want %s", p.lines.Text(), want)
		}
		return
	}
	p.t.Errorf("the program ended, want %s", want)
}

func (s *service) setComputeMode(gpu int, mode nvml.ComputeMode) {
	s.t.Helper()
	s.change(func(_ *layout.Config, f *state.File) error { return f.SetComputeMode(gpu, uint32(mode)) })
}

func TestMPSDaemonsLife(t *testing.T) {
	for _, kind := range []layout.Kind{layout.Host, layout.Container, layout.Bare} {
		t.Run(string(kind), func(t *testing.T) {
			s := newService(t, "l40s-x2", kind)
			if out, err := s.tell("get_server_list"); err == nil || out != "Cannot find MPS control daemon process\n" {
				t.Errorf("without a daemon: %q (%v)", out, err)
			}
			s.startDaemon(s.uuid(1))
			s.expect("", "get_server_list") // a server comes with the first client
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
			s.expect(fmt.Sprintln(got.Server), "get_server_list") // the server stays
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

// A daemon that was killed leaves its files; the next one takes them over. Its clients go on, and new ones run without MPS meanwhile.
func TestAKilledMPSDaemonIsFollowed(t *testing.T) {
	s := newService(t, "l40s-x2", layout.Host)
	s.startDaemon(s.uuid(0))
	holder := s.compute(0, []string{"--hold"})
	server := holder.attached().Server
	text, err := os.ReadFile(filepath.Join(s.pipes, "nvidia-cuda-mps-control.pid"))
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Sscan(string(text), &pid); err != nil {
		t.Fatal(err)
	}
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

// alive tells whether a process runs; one that nobody has waited for does not.
func alive(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	return !strings.HasPrefix(rest, "Z")
}

func TestMPSLimits(t *testing.T) {
	s := newService(t, "l40s-x2", layout.Host)
	s.startDaemon(s.uuid(0) + "," + s.uuid(1))
	s.expect("25.0\n", "set_default_active_thread_percentage 25")
	s.expect("25.0\n", "get_default_active_thread_percentage")
	s.expect("0M\n", "get_default_device_pinned_mem_limit 0")
	s.expect("", "set_default_device_pinned_mem_limit 0 3000M", "set_default_device_pinned_mem_limit 1 2G")
	s.expect("3000M\n2G\n2G\n", "get_default_device_pinned_mem_limit 0", "get_default_device_pinned_mem_limit 1", "get_default_device_pinned_mem_limit "+s.uuid(1))
	for _, wrong := range []string{"set_default_device_pinned_mem_limit 0 3000", "set_default_device_pinned_mem_limit 0", "set_default_active_thread_percentage 101", "nonsense"} {
		if out, _ := s.tell(wrong); out == "" {
			t.Errorf("%q is taken without a word", wrong)
		}
	}
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
		{"less by the environment", []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1G," + s.uuid(1) + "=512M", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=10"}, []limit{{1024, 10}, {512, 10}}},
		{"more by the environment is not more", []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=40G", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=90"}, []limit{{3000, 25}, {2048, 25}}},
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

// New defaults are for the next server; the limits of a running one are set by its PID.
func TestMPSDefaultsAreForTheNextServer(t *testing.T) {
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

// One process at a time has an exclusive GPU: the MPS server, through which others compute.
func TestAnExclusiveGPUIsOneProcesss(t *testing.T) {
	s := newService(t, "l40s-x2", layout.Host)
	s.setComputeMode(0, nvml.COMPUTEMODE_EXCLUSIVE_PROCESS)
	alone := []string{"CUDA_MPS_PIPE_DIRECTORY=" + s.pipes + "-none", "CUDA_VISIBLE_DEVICES=" + s.uuid(0)}
	first := s.compute(0, []string{"--hold"}, alone...)
	first.attached()
	s.compute(0, nil, alone...).failed("CUDA_ERROR_DEVICE_UNAVAILABLE")
	s.compute(0, nil, alone[0], "CUDA_VISIBLE_DEVICES="+s.uuid(1)).attached()
	s.startDaemon(s.uuid(0))
	s.compute(0, nil).failed("CUDA_ERROR_DEVICE_UNAVAILABLE") // the server cannot have it
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

// Let other users reach the site's files, which are in a folder of this user's.
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
	late.next("pending") // behind the other
	first.kill()
	mate.kill()
	got := other.next("attached")
	if got.Server == server || got.Mode != "mps" {
		t.Errorf("the other user is served by %d", got.Server)
	}
	other.kill()
	late.attached()
}

func TestAMultiUserServerServesAll(t *testing.T) {
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
	if out, err := command.CombinedOutput(); err == nil {
		t.Errorf("another user's command is obeyed: %s", out)
	}
}

// quit waits for the clients; with a time it does not wait for longer.
func TestQuitWaitsForClients(t *testing.T) {
	s := newService(t, "l40s-x2", layout.Host)
	s.startDaemon(s.uuid(0))
	p := s.compute(0, []string{"--hold"})
	p.attached()
	p.next("holding")
	done := make(chan error, 1)
	go func() { _, err := s.tell("quit"); done <- err }()
	waitFor(t, "nobody to be let in any more", func() bool {
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

	s.startDaemon(s.uuid(0))
	p = s.compute(0, []string{"--hold"})
	p.attached()
	p.next("holding")
	s.expect("", "quit -t 0")
	if lost := p.next("lost"); lost.Error != "CUDA_ERROR_MPS_RPC_FAILURE" {
		t.Errorf("the client says %+v", lost)
	}
}

// Server and client must have the same /dev/shm.
func TestAnotherSharedMemoryIsNoticed(t *testing.T) {
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

// A pipe directory whose sockets' names are too long is refused with the little that the real program says.
func TestATooLongPipeDirectory(t *testing.T) {
	s := newService(t, "l40s-x2", layout.Host)
	s.pipes = filepath.Join(filepath.Dir(s.pipes), strings.Repeat("x", 100))
	out, err := s.command("nvidia-cuda-mps-control", []string{"-d"}).CombinedOutput()
	if err == nil || string(out) != "Cannot find MPS control daemon process\n" {
		t.Errorf("%s (%v)", out, err)
	}
}

// The start can hang or fail, and so can an answer and the server's start.
func TestMPSFaults(t *testing.T) {
	s := newService(t, "l40s-x2", layout.Host)
	fault := func(kind uint32, function string) {
		s.change(func(_ *layout.Config, f *state.File) error {
			return f.AddFault(state.Fault{Kind: kind, Error: uint32(nvml.ERROR_UNKNOWN), DelayMS: uint64(time.Hour.Milliseconds()), GPU: state.AnyGPU}, function, 1)
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
	if out, err := s.command("nvidia-cuda-mps-control", []string{"-d"}).CombinedOutput(); err == nil || !strings.Contains(string(out), "NVML_ERROR_UNKNOWN") {
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

// A container gets the MPS programs, and by them the stand-in of a CUDA program, as it gets nvidia-smi.
func TestTheStandInRunsByAnInjectedName(t *testing.T) {
	s := newService(t, "l40s-x2", layout.Host)
	out, err := s.command("nvidia-cuda-mps-control", []string{"nvmlsim-cuda", "--allocate", "10"}, "CUDA_VISIBLE_DEVICES="+s.uuid(1)).CombinedOutput()
	if err != nil || !strings.Contains(string(out), s.uuid(1)) {
		t.Errorf("%s (%v)", out, err)
	}
}
