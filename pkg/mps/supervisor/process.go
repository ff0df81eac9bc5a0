package supervisor

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/namespace"
)

const (
	// marker is the environment variable, with "=", that identifies a daemon's processes. The value is
	// the daemon's directory.
	marker = "GPU_DRA_MPS_DIRECTORY="

	controlProgram = "nvidia-cuda-mps-control"
	serverProgram  = "nvidia-cuda-mps-server"

	// terminateWait is how long a process may take to end after SIGTERM, and killWait how long after
	// SIGKILL.
	terminateWait = 3 * time.Second
	killWait      = 5 * time.Second
)

// process is a control daemon. The supervisor either started it as a child process, or adopted it
// from an earlier supervisor.
type process struct {
	pid  int
	done chan struct{} // closed when the process has ended
	how  string        // how the process ended, valid after done is closed
}

// spawn starts the program gpu-mps, which makes the mounts that view describes and then becomes the
// control daemon. args and env are the daemon's. Its output goes to the end of the file output.
func spawn(program string, view namespace.View, args, env []string, output *os.File) (*process, error) {
	cmd := exec.Command(program, append([]string{"daemon", view.String()}, args...)...)
	cmd.Env, cmd.Dir = env, "/"
	cmd.Stdout, cmd.Stderr = output, output
	// The daemon gets its own session, so that signals of a terminal or a shell do not reach it. Until
	// the child has executed program, it lacks env, by which the next supervisor would find it. So it
	// dies with this supervisor until [namespace.Exec] lifts that.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	p := &process{done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		// For the kernel the parent is the thread that starts the child, so this thread must not end.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(p.done)
		err := cmd.Start()
		if err == nil {
			p.pid = cmd.Process.Pid
		}
		if started <- err; err != nil {
			return
		}
		p.how = "exit status 0"
		if err := cmd.Wait(); err != nil {
			p.how = err.Error()
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", program, err)
	}
	return p, nil
}

// adopt returns the control daemon that an earlier supervisor started and wrote to run.json as
// record. It returns nil if that process has ended, is not in the set named by the parameter of, or
// is still program: spawn makes that die with its supervisor.
func adopt(record runRecord, of processSet, program string) *process {
	fd, err := unix.PidfdOpen(record.PID, 0)
	if err != nil {
		return nil
	}
	started, err := startTime(procRoot, record.PID)
	line, _ := os.ReadFile(filepath.Join(procRoot, strconv.Itoa(record.PID), "cmdline"))
	isProgram := bytes.HasPrefix(line, []byte(program+"\x00"))
	if err != nil || started != record.StartTime || !of.contains(record.PID) || isProgram {
		_ = unix.Close(fd)
		return nil
	}
	p := &process{pid: record.PID, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		defer func() { _ = unix.Close(fd) }()
		p.how = "unknown status, started by an earlier supervisor"
		awaitExit(fd, -1)
	}()
	return p
}

// awaitExit returns when the process with pidfd fd has ended, or after limit. A negative limit
// means forever.
func awaitExit(fd int, limit time.Duration) {
	deadline := time.Now().Add(limit)
	for {
		milliseconds := -1
		if limit >= 0 {
			milliseconds = int(max(0, time.Until(deadline).Milliseconds()))
		}
		//nolint:gosec // a descriptor is a small number
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, milliseconds)
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// processSet selects the processes of one daemon: those that have mark in their environment and are
// in one of groups. The mark alone is not enough because any process can set it, while only the
// container runtime sets control groups.
type processSet struct {
	mark string
	// groups are this supervisor's control groups, and those of the supervisor that started the
	// daemon.
	groups []string
	// proc is where the processes are listed: /proc, or another procfs mount of the node if the set's
	// processes are only read. To signal them it must be /proc, because signals take this process's
	// own PIDs.
	proc string
}

const procRoot = "/proc"

// waits says how long processes may take to end: terminate after SIGTERM, kill after SIGKILL.
type waits struct{ terminate, kill time.Duration }

var (
	normalWaits = waits{terminateWait, killWait}
	// shortWaits is for processes that have already survived SIGKILL.
	shortWaits = waits{0, 500 * time.Millisecond}
)

// stuckError is the error of end if processes survived SIGKILL. pids are their PIDs.
type stuckError struct{ pids []int }

func (e *stuckError) Error() string {
	return fmt.Sprintf("processes %v cannot be killed: they hang in the NVIDIA driver; "+
		"check dmesg, and reset the GPUs or reboot the node", e.pids)
}

// end sends SIGTERM to all processes of the daemon, and SIGKILL to those that survive. It returns
// nil when none is left, and a stuckError if some survive SIGKILL too.
func (p processSet) end(w waits) error {
	for _, step := range []struct {
		signal unix.Signal
		wait   time.Duration
	}{{unix.SIGTERM, w.terminate}, {unix.SIGKILL, w.kill}} {
		for deadline := time.Now().Add(step.wait); ; {
			pids, err := p.processes()
			if err != nil || len(pids) == 0 {
				return err
			}
			if time.Now().After(deadline) {
				break
			}
			for _, pid := range pids {
				p.signal(pid, step.signal, time.Until(deadline))
			}
		}
	}
	pids, err := p.processes()
	if err != nil || len(pids) == 0 {
		return err
	}
	return &stuckError{pids}
}

// signal sends one signal to a process. It returns when the process has ended, or after limit.
func (p processSet) signal(pid int, signal unix.Signal, limit time.Duration) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return // The process has ended.
	}
	defer func() { _ = unix.Close(fd) }()
	if !p.contains(pid) {
		return // The PID belongs to another process now.
	}
	if unix.PidfdSendSignal(fd, signal, nil, 0) == nil {
		awaitExit(fd, max(0, limit))
	}
}

// processes returns the PIDs of the daemon's processes.
func (p processSet) processes() ([]int, error) {
	entries, err := os.ReadDir(p.proc)
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var pids []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil && p.contains(pid) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// contains reports whether the process belongs to the daemon. It compares the control group first
// and reads the environment only if the group matches, because an unrelated process could block
// that read for as long as it likes.
func (p processSet) contains(pid int) bool {
	group, err := groupsOf(p.proc, pid)
	return err == nil && slices.Contains(p.groups, group) && carriesMark(p.proc, pid, p.mark)
}

// groupsOf returns the content of /proc/PID/cgroup: the process's control group in each hierarchy.
// Child processes inherit these control groups.
func groupsOf(proc string, pid int) (string, error) {
	data, err := os.ReadFile(procPath(proc, pid, "cgroup"))
	if err != nil {
		return "", fmt.Errorf("read the control groups of process %d: %w", pid, err)
	}
	return string(data), nil
}

// execGrace is how long carriesMark waits for the complete environment of a process that is in
// execve.
const execGrace = time.Second

// carriesMark reports whether a process has mark in its environment. During execve, a process has
// no environment yet, or only part of it can be read. So carriesMark reads again until the mark
// appears or the environment is complete.
func carriesMark(proc string, pid int, mark string) bool {
	for deadline := time.Now().Add(execGrace); ; {
		environment, err := os.ReadFile(procPath(proc, pid, "environ"))
		if err != nil {
			return false
		}
		if slices.Contains(strings.Split(string(environment), "\x00"), mark) {
			return true
		}
		complete := bytes.HasSuffix(environment, []byte{0})
		if complete || !runsProgram(proc, pid) || time.Now().After(deadline) {
			return false
		}
		<-time.After(time.Millisecond)
	}
}

// runsProgram returns false for a kernel thread and for a process that has ended: they have no
// executable file.
func runsProgram(proc string, pid int) bool {
	_, err := os.Readlink(procPath(proc, pid, "exe"))
	return err == nil
}

// Positions in the result of stat. In proc_pid_stat(5) they are fields 3 and 22.
const (
	statState = 0
	statStart = 19
)

// stat returns the fields of a process's stat file after the program's name.
func stat(proc string, pid int) ([]string, error) {
	data, err := os.ReadFile(procPath(proc, pid, "stat"))
	if err != nil {
		return nil, err
	}
	// The second field is the program's name in parentheses. It may contain spaces and parentheses.
	fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	if len(fields) <= statStart {
		return nil, fmt.Errorf("the stat of process %d has %d fields", pid, len(fields))
	}
	return fields, nil
}

// startTime returns when a process was started, in clock ticks since boot.
func startTime(proc string, pid int) (uint64, error) {
	fields, err := stat(proc, pid)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(fields[statStart], 10, 64)
}

func procPath(proc string, pid int, file string) string {
	return filepath.Join(proc, strconv.Itoa(pid), file)
}
