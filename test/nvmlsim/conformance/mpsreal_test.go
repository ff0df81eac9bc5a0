package conformance

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/smi"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// dialogue lists commands that the test sends to the real control daemon and to the stand-in. The
// real daemon needs a GPU only when a client asks for a server.
var dialogue = []string{
	"get_server_list", "get_server_list too much", "get_server_status 1", "get_client_list 1", "get_client_list", "get_device_client_list",
	"get_device_client_list 1",
	"ps", "ps -p 1", "terminate_client 1 2", "shutdown_server 1", "get_active_thread_percentage 1", "set_active_thread_percentage 1 50",
	"get_device_pinned_mem_limit 1 0", "start_server", "start_server -uid", "start_server -uid x", "nonsense", "nonsense with words", "",
	"help",
	"get_default_active_thread_percentage", "set_default_active_thread_percentage 30", "set_default_active_thread_percentage 33.37",
	"set_default_active_thread_percentage 0", "set_default_active_thread_percentage 101", "set_default_active_thread_percentage abc",
	"set_default_active_thread_percentage", "set_default_active_thread_percentage -5", "get_default_active_thread_percentage",
	"get_default_device_pinned_mem_limit 0", "get_default_device_pinned_mem_limit", "set_default_device_pinned_mem_limit 0",
	"get_default_active_thread_percentage\nget_server_list\nnonsense\nget_default_active_thread_percentage",
}

// limits lists memory limits that the test sets and then reads back.
var limits = []string{
	"0 1G", "0 1500M", "0 512M", "0 512", "0 0M", "0 18432M", "1 1023M", "0 4000000000", "0 700m", "0 1.5G", "0 abcM", "0 1g", "0 18G more",
	"31 1G", "32 1G", "5 1G",
	"GPU-565e61d6-853a-4904-8caa-6170d78f7c8a 2G",
}

// conversation runs the control program at the path control as a daemon and sends it all commands.
// It returns the daemon's answers, and the names and modes of the files in the pipe directory.
func (s *service) conversation(control string) []string {
	s.t.Helper()
	var all []string
	note := func(what string, out []byte, err error) {
		var status *exec.ExitError
		if err != nil && !errors.As(err, &status) {
			s.t.Fatalf("%s: %v", what, err)
		}
		all = append(all, fmt.Sprintf("%s: %q (%v)", what, out, err))
	}
	run := func(user uint32, input string, args ...string) {
		command := s.command("nvidia-cuda-mps-control", args)
		command.Path = control
		command.Stdin = strings.NewReader(input)
		if user != 0 {
			command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
		}
		out, err := command.CombinedOutput()
		if len(args) == 1 && args[0] == "-x" {
			out = nil // the help texts may differ
		}
		note(fmt.Sprintf("user %d, %q, %v", user, input, args), out, err)
	}
	files := func(when string) {
		entries, err := os.ReadDir(s.pipes)
		if err != nil {
			s.t.Fatal(err)
		}
		for _, entry := range entries {
			info, err := entry.Info()
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				s.t.Fatal(err)
			}
			all = append(all, fmt.Sprintf("%s: %s %v", when, entry.Name(), info.Mode()))
		}
	}
	run(0, "get_server_list\n")
	run(0, "", "-x")
	run(0, "", "-d")
	run(0, "", "-d")
	files("running")
	for _, line := range dialogue {
		run(0, line+"\n")
	}
	for _, limit := range limits {
		device, _, _ := strings.Cut(limit, " ")
		run(0, "set_default_device_pinned_mem_limit "+limit+"\nget_default_device_pinned_mem_limit "+device+"\n")
	}
	for _, line := range []string{"get_default_active_thread_percentage", "set_default_active_thread_percentage 20",
		"set_default_device_pinned_mem_limit 0 1G", "ps", "quit"} {
		run(1000, line+"\n")
	}
	run(0, "")
	run(0, "quit -t 1\n")
	waitFor(s.t, "the daemon to have cleaned up", func() bool {
		_, err := os.Lstat(filepath.Join(s.pipes, "log"))
		return errors.Is(err, fs.ErrNotExist)
	})
	files("ended")
	run(0, "get_server_list\n")
	run(0, "", "-multiuser-server")
	run(0, "", "-d", "-multiuser-server")
	run(0, "get_default_active_thread_percentage\n")
	run(0, "quit\n")
	return all
}

// The stand-in must give the same answers as the real control daemon of the same driver version.
func TestControlDaemonAnswersLikeRealOne(t *testing.T) {
	needRoot(t)
	for suite, version := range map[string]string{"bookworm": "535.261.03", "trixie": "550.163.01", "experimental": "555.58.02"} {
		t.Run(suite, func(t *testing.T) {
			fetched, err := smi.FetchProgram(t.Context(), suite, "nvidia-cuda-mps", "nvidia-cuda-mps-control")
			if errors.Is(err, smi.ErrUnavailable) {
				t.Skipf("NOT TESTED, the real program is missing: %v", err)
			}
			if err != nil {
				t.Fatal(err)
			}
			program, err := os.ReadFile(fetched)
			if err != nil {
				t.Fatal(err)
			}
			talk := func(pick func(*service) string) []string {
				s := newService(t, "l40s-x2", layout.Host)
				s.change(func(c *layout.Config, f *state.File) error { return c.DriverReload(f, version, "12.5", false) })
				s.open()
				return s.conversation(pick(s))
			}
			genuine := talk(func(s *service) string { // the copy lies where other users can run it
				path := filepath.Join(filepath.Dir(s.pipes), "real")
				if err := os.WriteFile(path, program, 0o755); err != nil {
					t.Fatal(err)
				}
				return path
			})
			standIn := talk(func(s *service) string { return s.program("nvidia-cuda-mps-control") })
			if slices.Equal(genuine, standIn) {
				return
			}
			for i := range max(len(genuine), len(standIn)) {
				switch {
				case i >= len(genuine):
					t.Errorf("the stand-in says more: %s", standIn[i])
				case i >= len(standIn):
					t.Errorf("the real one says more: %s", genuine[i])
				case genuine[i] != standIn[i]:
					t.Errorf("the real one:\n%s\nthe stand-in:\n%s", genuine[i], standIn[i])
				}
			}
		})
	}
}
