package supervisor

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/namespace"
)

const (
	// marker is the variable by which the processes of a daemon are known; its value is the daemon's directory.
	marker = "GPU_DRA_MPS_DIRECTORY="
	// maxEnvironment is how much of a process's environment is searched.
	maxEnvironment = 256 << 10

	controlProgram = "nvidia-cuda-mps-control"
	serverProgram  = "nvidia-cuda-mps-server"

	// How long a process may take after each signal.
	terminateWait = 3 * time.Second
	killWait      = 5 * time.Second
)

// process is a control daemon, a child of this process or one that an earlier supervisor has left.
type process struct {
	pid  int
	done chan struct{} // closed when it has ended
	how  string        // it ended; read after done
}

// spawn starts gpu-mps, which becomes the control daemon in the view's mount namespace. What it says is appended to the file.
func spawn(program string, view namespace.View, args, env []string, output *os.File) (*process, error) {
	cmd := exec.Command(program, append([]string{"daemon", view.String()}, args...)...)
	cmd.Env, cmd.Dir = env, "/"
	cmd.Stdout, cmd.Stderr = output, output
	// A session of its own: no signal that a terminal or a shell sends to this process reaches it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", program, err)
	}
	p := &process{pid: cmd.Process.Pid, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		p.how = "exit status 0"
		if err := cmd.Wait(); err != nil {
			p.how = err.Error()
		}
	}()
	return p, nil
}

// adopt finds the process of an earlier supervisor, or nil.
func adopt(record runRecord, of kin) *process {
	fd, err := unix.PidfdOpen(record.PID, 0)
	if err != nil {
		return nil
	}
	started, err := startTime(procRoot, record.PID)
	if err != nil || started != record.StartTime || !of.has(record.PID) || commandOf(record.PID) != controlProgram {
		_ = unix.Close(fd)
		return nil
	}
	p := &process{pid: record.PID, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		defer func() { _ = unix.Close(fd) }()
		p.how = "its status is not known, it was started by an earlier supervisor"
		awaitExit(fd, -1)
	}()
	return p
}

// awaitExit waits until the process behind a descriptor has ended, or the time is over; negative means for ever.
func awaitExit(fd int, limit time.Duration) {
	deadline := time.Now().Add(limit)
	for {
		milliseconds := -1
		if limit >= 0 {
			milliseconds = int(max(0, time.Until(deadline).Milliseconds()))
		}
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, milliseconds) //nolint:gosec // a descriptor is a small number
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// kin is whose processes a daemon's are: those that carry its mark and are in a control group of a supervisor's. The mark alone could be anyone's: an
// environment is what a process says of itself, a control group is what the container runtime has put it into.
type kin struct {
	mark string
	// groups are this supervisor's control groups, and those of the earlier one that started the daemon.
	groups []string
	// proc is where the node's processes are seen; only those in /proc can be ended.
	proc string
}

const procRoot = "/proc"

// waits are how long a process may take after each signal.
type waits struct{ terminate, kill time.Duration }

var (
	patient = waits{terminateWait, killWait}
	// brief is for processes that a signal has not ended already.
	brief = waits{0, 500 * time.Millisecond}
)

// stuckError says that processes have survived being killed.
type stuckError struct{ pids []int }

func (e *stuckError) Error() string {
	return fmt.Sprintf("processes %v cannot be killed: they hang in the NVIDIA driver, look at dmesg, and reset the GPUs or reboot the node", e.pids)
}

// end ends every process, and returns when none is left.
func (k kin) end(w waits) error {
	for _, step := range []struct {
		signal unix.Signal
		wait   time.Duration
	}{{unix.SIGTERM, w.terminate}, {unix.SIGKILL, w.kill}} {
		for deadline := time.Now().Add(step.wait); ; {
			pids, err := k.processes()
			if err != nil || len(pids) == 0 {
				return err
			}
			if time.Now().After(deadline) {
				break
			}
			for _, pid := range pids {
				k.signal(pid, step.signal, time.Until(deadline))
			}
		}
	}
	pids, err := k.processes()
	if err != nil || len(pids) == 0 {
		return err
	}
	return &stuckError{pids}
}

// signal sends one and waits until the process has ended, or the time is over.
func (k kin) signal(pid int, signal unix.Signal, limit time.Duration) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return // It has ended.
	}
	defer func() { _ = unix.Close(fd) }()
	if !k.has(pid) {
		return // The number is someone else's now.
	}
	if unix.PidfdSendSignal(fd, signal, nil, 0) == nil {
		awaitExit(fd, max(0, limit))
	}
}

// processes lists those that have not ended.
func (k kin) processes() ([]int, error) {
	proc, err := os.Open(k.proc)
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	defer func() { _ = proc.Close() }()
	names, err := proc.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var pids []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil && k.has(pid) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// has says whether a process is one of the daemon's. Of a stranger's no memory is looked at, its environment neither: reading that could take as long as the
// stranger likes.
func (k kin) has(pid int) bool {
	group, err := groupsOf(k.proc, pid)
	return err == nil && slices.Contains(k.groups, group) && marked(k.proc, pid, k.mark)
}

// groupsOf are the control groups of a process, one in each hierarchy. They are its children's, too.
func groupsOf(proc string, pid int) (string, error) {
	data, err := os.ReadFile(ofProcess(proc, pid, "cgroup"))
	if err != nil {
		return "", fmt.Errorf("read the control groups of process %d: %w", pid, err)
	}
	return string(data), nil
}

const (
	// replacing is how long a process may be about to become another program, and have no environment.
	replacing = time.Second
	// kernelThread is PF_KTHREAD of Linux's sched.h.
	kernelThread = 0x00200000
)

// marked says whether a process carries the mark. One that has ended and waits for its parent has no environment any more; one that is becoming another
// program has none yet, or what was read of it ends in the middle. So that the mark is not there is believed only of a whole environment.
func marked(proc string, pid int, mark string) bool {
	for deadline := time.Now().Add(replacing); ; {
		environment, err := environmentOf(proc, pid)
		if err != nil {
			return false
		}
		if slices.ContainsFunc(bytes.Split(environment, []byte{0}), func(v []byte) bool { return string(v) == mark }) {
			return true
		}
		if whole(proc, pid, environment) || time.Now().After(deadline) {
			return false
		}
		<-time.After(time.Millisecond)
	}
}

func environmentOf(proc string, pid int) ([]byte, error) {
	f, err := os.Open(ofProcess(proc, pid, "environ"))
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(io.LimitReader(f, maxEnvironment))
}

// whole says whether that is all there is of a process's environment, and all there will be: threads of the kernel and what has ended have none.
func whole(proc string, pid int, environment []byte) bool {
	fields, err := statOf(proc, pid)
	if err != nil {
		return true
	}
	flags, ferr := strconv.ParseUint(fields[statFlags], 10, 64)
	start, serr := strconv.ParseUint(fields[statEnvStart], 10, 64)
	end, eerr := strconv.ParseUint(fields[statEnvEnd], 10, 64)
	if errors.Join(ferr, serr, eerr) != nil || flags&kernelThread != 0 || strings.Contains("ZX", fields[statState]) {
		return true
	}
	// For a moment the new one's place is known, and its size is not.
	return start != 0 && end > start && uint64(len(environment)) == min(end-start, maxEnvironment)
}

// Fields of proc_pid_stat(5), counted from the third.
const (
	statState    = 0
	statFlags    = 9 - 3
	statStart    = 22 - 3
	statEnvStart = 50 - 3
	statEnvEnd   = 51 - 3
)

func statOf(proc string, pid int) ([]string, error) {
	data, err := os.ReadFile(ofProcess(proc, pid, "stat"))
	if err != nil {
		return nil, err
	}
	// The second field is the name in brackets, which may hold anything.
	fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	if len(fields) <= statEnvEnd {
		return nil, fmt.Errorf("the stat of process %d has %d fields", pid, len(fields))
	}
	return fields, nil
}

// startTime is when a process started, in clock ticks since the boot.
func startTime(proc string, pid int) (uint64, error) {
	fields, err := statOf(proc, pid)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(fields[statStart], 10, 64)
}

func ofProcess(proc string, pid int, file string) string {
	return filepath.Join(proc, strconv.Itoa(pid), file)
}

// commandOf is the name by which a process was called.
func commandOf(pid int) string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return ""
	}
	first, _, _ := bytes.Cut(data, []byte{0})
	return filepath.Base(string(first))
}
