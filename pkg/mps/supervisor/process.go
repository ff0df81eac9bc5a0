package supervisor

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
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
func adopt(record runRecord, mark string) *process {
	fd, err := unix.PidfdOpen(record.PID, 0)
	if err != nil {
		return nil
	}
	started, err := startTime(record.PID)
	if err != nil || started != record.StartTime || !marked(record.PID, mark) || commandOf(record.PID) != controlProgram {
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

// endMarked ends every process that carries the mark, and returns when none is left.
func endMarked(mark string) error {
	for _, step := range []struct {
		signal unix.Signal
		wait   time.Duration
	}{{unix.SIGTERM, terminateWait}, {unix.SIGKILL, killWait}} {
		deadline := time.Now().Add(step.wait)
		for {
			pids, err := markedProcesses(mark)
			if err != nil || len(pids) == 0 {
				return err
			}
			if time.Now().After(deadline) {
				break
			}
			for _, pid := range pids {
				signalMarked(pid, mark, step.signal, time.Until(deadline))
			}
		}
	}
	pids, err := markedProcesses(mark)
	if err != nil || len(pids) == 0 {
		return err
	}
	return fmt.Errorf("processes %v cannot be killed: they hang in the NVIDIA driver, look at dmesg, and reset the GPUs or reboot the node", pids)
}

// signalMarked sends a signal and waits until the process has ended, or the time is over.
func signalMarked(pid int, mark string, signal unix.Signal, limit time.Duration) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return // It has ended.
	}
	defer func() { _ = unix.Close(fd) }()
	if !marked(pid, mark) {
		return // The number is someone else's now.
	}
	if unix.PidfdSendSignal(fd, signal, nil, 0) == nil {
		awaitExit(fd, max(0, limit))
	}
}

// markedProcesses lists the processes that carry the mark and have not ended.
func markedProcesses(mark string) ([]int, error) {
	proc, err := os.Open("/proc")
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
		if pid, err := strconv.Atoi(name); err == nil && marked(pid, mark) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// marked says whether a process carries the mark. One that has ended and waits for its parent has no environment any more.
func marked(pid int, mark string) bool {
	f, err := os.Open(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }()
	environment, err := io.ReadAll(io.LimitReader(f, maxEnvironment))
	if err != nil {
		return false
	}
	for variable := range bytes.SplitSeq(environment, []byte{0}) {
		if string(variable) == mark {
			return true
		}
	}
	return false
}

// startTime is when a process started, in clock ticks since the boot.
func startTime(pid int) (uint64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The second field is the name in brackets, which may hold anything; starttime is the 22nd (proc_pid_stat(5)).
	fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	const index = 22 - 3
	if len(fields) <= index {
		return 0, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	return strconv.ParseUint(fields[index], 10, 64)
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

// bootID names the boot of the kernel.
func bootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot ID: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}
