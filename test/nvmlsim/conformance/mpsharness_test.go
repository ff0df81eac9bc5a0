package conformance

import (
	"bufio"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// service is a simulated node with directories for an MPS daemon's pipes and logs. The directories
// have short names, because a socket's path has at most 107 characters.
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
	command.Env = append(command.Env, "CUDA_MPS_PIPE_DIRECTORY="+s.pipes, "CUDA_MPS_LOG_DIRECTORY="+s.logs,
		"PATH="+filepath.Dir(s.program(name))+":"+os.Getenv("PATH")) // the daemon looks up the server program in PATH
	command.Env = append(command.Env, env...)
	return command
}

// uuid returns the UUID of the node's i-th GPU.
func (s *service) uuid(i int) string { return s.options.Config.Node.GPUs[i].UUID }

// startDaemon starts an MPS control daemon in the background for the devices. The daemon ends with
// the test.
func (s *service) startDaemon(devices string, args ...string) {
	s.t.Helper()
	command := s.command("nvidia-cuda-mps-control", append([]string{"-d"}, args...), "CUDA_VISIBLE_DEVICES="+devices)
	if out, err := command.CombinedOutput(); err != nil {
		s.t.Fatalf("nvidia-cuda-mps-control -d: %v\n%s", err, out)
	}
	s.t.Cleanup(func() { _, _ = s.tell("quit -t 0") })
}

// daemonPID returns the PID from the control daemon's PID file.
func (s *service) daemonPID() int {
	s.t.Helper()
	text, err := os.ReadFile(filepath.Join(s.pipes, "nvidia-cuda-mps-control.pid"))
	if err != nil {
		s.t.Fatal(err)
	}
	pid, err := strconv.Atoi(string(text))
	if err != nil {
		s.t.Fatal(err)
	}
	return pid
}

// tell sends commands to the control daemon. It returns the output, and an error if the sending
// program failed.
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

// said is one line of JSON that nvmlsim-cuda, the stand-in of a CUDA program, prints.
type said struct {
	Event   string
	Mode    string
	Server  int
	Devices []mps.Device
	MiB     uint64
	Error   string
	Message string
}

// program is a running nvmlsim-cuda, the stand-in of a CUDA program.
type program struct {
	t       *testing.T
	command *exec.Cmd
	lines   *bufio.Scanner
}

// compute starts nvmlsim-cuda, the stand-in of a CUDA program, with the user ID user.
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

// next returns the next line that the program prints. It fails the test if the line reports another
// event than the parameter names.
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

// attached returns the line with which the program reports its GPUs. The program may first report
// that it waits.
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

// failed fails the test unless the program reports that it could not get its GPUs, with the error
// want.
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
