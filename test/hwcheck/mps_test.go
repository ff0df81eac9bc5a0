package main

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
)

// Each result of the MPS program must get the verdict that it proves.
func TestMPSVerdicts(t *testing.T) {
	right := facts.MPS{Step: "done", FreeMiB: mpsFreeMiB, Started: true, Servers: 1, Clients: 2, Allocated: 2, Refused: 2, Ended: true}
	dead, stays, noLimit, noMPS, failed, full := right, right, right, right, right, right
	dead.Started, stays.Ended, noLimit.Refused, noMPS.Servers, failed.Error = false, false, 1, 0, cudaNoDevice
	full.FreeMiB = mpsFreeMiB - 1 // the clients were refused memory, but maybe only because of this
	left := facts.MPS{Step: "free memory", FreeMiB: mpsFreeMiB - 1}
	unknown := facts.MPS{Step: "nvmlDeviceGetMemoryInfo", Error: 3}
	for _, x := range []struct {
		name      string
		result    facts.MPS
		simulated bool
		want      facts.Verdict
	}{
		{"both clients are limited", right, false, facts.Agreed},
		{"the GPU was nearly full", full, false, facts.NotProven},
		{"the GPU is nearly full, so there was no daemon", left, false, facts.NotProven},
		{"the free memory is unknown", unknown, false, facts.NotProven},
		{"the daemon does not start", dead, false, facts.Failed},
		{"the daemon does not start in the simulation", dead, true, facts.Failed},
		{"the daemon stays", stays, false, facts.Differed},
		{"a client has no limit", noLimit, false, facts.Differed},
		{"the clients use no server", noMPS, false, facts.Differed},
		{"CUDA fails", failed, false, facts.Failed},
		{"the library is simulated", failed, true, facts.NotProven},
	} {
		t.Run(x.name, func(t *testing.T) {
			s := &visit{progress: io.Discard}
			s.report.Driver = &facts.Driver{Simulated: x.simulated}
			s.judgeMPS(x.result)
			if got := s.report.Checks[0]; got.Verdict != x.want {
				t.Errorf("%+v, want %s", got, x.want)
			}
		})
	}
}

// writeScript writes a shell script to a new folder and returns its path.
func writeScript(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	return path
}

// The program that starts an MPS daemon must run by runc or not at all, also if runc has worked
// until now. A program without onlyByRunc shows that the next way would have run it.
func TestMPSRunsOnlyByRunc(t *testing.T) {
	for _, first := range []way{byRunc, inNamespace, onTheMachine} {
		for _, only := range []bool{true, false} {
			ran := filepath.Join(t.TempDir(), "ran")
			c := &containers{
				programs: programs{self: writeScript(t, "hwcheck", "echo >"+ran)}, work: "/dev/null", // so runc and the chroot are refused
				libraries: []string{"/nonexistent/libcuda.so.1"}, way: first, refused: []string{"an earlier reason"},
			}
			p := guest{host: "/bin/true", inside: filepath.Join("/usr/bin", cudaCheck), onlyByRunc: only}
			result := c.run(t.Context(), p, nil, mpsArgument)
			if exists(ran) == only || errors.Is(result.err, errNotByRunc) != only || only && c.way != first {
				t.Errorf("way %d, only by runc: %t; it ran: %t, %v, then way %d", first, only, exists(ran), result.err, c.way)
			}
			why := "an earlier reason"
			if first == byRunc {
				why = "/dev/null"
			}
			if only && !strings.Contains(result.err.Error(), why) {
				t.Errorf("way %d: %v, want the reason %q", first, result.err, why)
			}
		}
	}
}

// The MPS program must start a daemon only as the first process of a PID namespace and with enough
// free memory, and must send no signal if there is no daemon.
func TestMPSProgramStartsDaemonOnlyWhereItMay(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: namespaces")
	}
	dir := t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o700); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	write("nvml.c", fakeNVML)
	write("nofork.c", noFork)
	write(mpsControl, "#!/bin/sh\necho >began\nexit 1\n")
	source, err := filepath.Abs("cudacheck/cudacheck.c")
	if err != nil {
		t.Fatal(err)
	}
	build := exec.Command("/bin/sh", "-ec", `gcc -std=gnu11 -o cudacheck "$1" -ldl
		gcc -shared -fPIC -o libnvidia-ml.so.1 nvml.c
		gcc -shared -fPIC -o nofork.so nofork.c`, "sh", source)
	build.Dir = dir
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	const notAtAll = `"started":false,"servers":0,"clients":0,"allocated":0,"refused":0,"ended":false`
	for _, x := range []struct {
		name, env  string
		namespaces uintptr
		code       int
		daemon     bool
		want       string
	}{
		{"without a PID namespace", "FREE_MIB=9999", 0, 1, false, "not the first process"},
		{"on a nearly full GPU", "FREE_MIB=3071", unix.CLONE_NEWPID, 0, false, `{"step":"free memory","error":0,"freeMiB":3071,` + notAtAll},
		{"with enough memory", "FREE_MIB=3072", unix.CLONE_NEWPID, 0, true, `{"step":"","error":0,"freeMiB":3072,` + notAtAll},
		{"if NVML fails", "NONE=", unix.CLONE_NEWPID, 0, false, `{"step":"nvmlInit_v2","error":9,"freeMiB":0,` + notAtAll},
		{"without a process", "FREE_MIB=9999 LD_PRELOAD=./nofork.so", unix.CLONE_NEWPID, 1, false, "fork: Resource temporarily unavailable"},
	} {
		t.Run(x.name, func(t *testing.T) {
			// The program leaves files in /tmp. It gets a /tmp of its own, which hides the test's folder, so
			// the paths are relative.
			script := "mount -t tmpfs tmpfs /tmp; exec env PATH=.:/usr/bin:/bin LD_LIBRARY_PATH=. " + x.env + " ./cudacheck " + mpsArgument
			cmd := exec.Command("/bin/sh", "-ec", script) //nolint:gosec // our own
			cmd.Dir, cmd.SysProcAttr = dir, &syscall.SysProcAttr{Cloneflags: x.namespaces, Unshareflags: unix.CLONE_NEWNS}
			out, _ := cmd.CombinedOutput()
			code, text := cmd.ProcessState.ExitCode(), string(out)
			if code != x.code || !strings.Contains(text, x.want) || strings.Contains(text, "kill") {
				t.Errorf("exit code %d, want %d and %s:\n%s", code, x.code, x.want, out)
			}
			if err := os.Remove(filepath.Join(dir, "began")); (err == nil) != x.daemon {
				t.Errorf("a daemon began: %t, want %t", err == nil, x.daemon)
			}
		})
	}
}
