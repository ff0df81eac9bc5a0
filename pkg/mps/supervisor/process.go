package supervisor

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/namespace"
)

const (
	controlProgram = "nvidia-cuda-mps-control"
	serverProgram  = "nvidia-cuda-mps-server"
	// processName is the kernel's name of both programs: it keeps 15 characters.
	processName = "nvidia-cuda-mps"

	// terminateWait is how long a process may take to end after SIGTERM, and killWait how long after
	// SIGKILL.
	terminateWait = 3 * time.Second
	killWait      = 5 * time.Second
	// endPause is how long to wait between two looks for processes that should end. Each look reads
	// all processes of the node.
	endPause = 100 * time.Millisecond
)

// process is a control daemon, a child process of the supervisor.
type process struct {
	runRecord
	done chan struct{} // closed when the process has ended
	how  string        // how the process ended, valid after done is closed
}

// spawn starts the program gpu-mps, which makes the mounts that view describes and then becomes the
// control daemon. args and env are the daemon's. Its output goes to the end of the file output.
func spawn(program string, view namespace.View, args, env []string, output *os.File) (*process, error) {
	cmd := exec.Command(program, append([]string{"daemon", view.String()}, args...)...)
	cmd.Env, cmd.Dir = env, "/"
	cmd.Stdout, cmd.Stderr = output, output
	// The daemon gets a session of its own, in which the supervisor finds its servers. It dies with
	// this supervisor, because only a parent can watch it and the next supervisor starts another.
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
			var st stat
			if st, err = readStat(procRoot, cmd.Process.Pid); err != nil {
				_ = cmd.Process.Kill() // Stop finds a daemon by its start time.
				_ = cmd.Wait()
			}
			p.runRecord = runRecord{PID: cmd.Process.Pid, StartTime: st.startTime}
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

// processSet selects the processes of one daemon: the control daemon in run, and the MPS programs
// in its session. Only descendants of the control daemon can be in that session.
type processSet struct {
	run runRecord
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
	var pids []int
	for _, step := range []struct {
		signal os.Signal
		wait   time.Duration
	}{{syscall.SIGTERM, w.terminate}, {syscall.SIGKILL, w.kill}} {
		for deadline := time.Now().Add(step.wait); ; <-time.After(endPause) {
			var err error
			if pids, err = p.processes(); err != nil || len(pids) == 0 {
				return err
			}
			if time.Now().After(deadline) {
				break
			}
			for _, pid := range pids {
				p.signal(pid, step.signal)
			}
		}
	}
	return &stuckError{pids}
}

// signal sends a signal to a process of the daemon.
func (p processSet) signal(pid int, signal os.Signal) {
	process, err := os.FindProcess(pid) // opens a pidfd
	if err != nil {
		return
	}
	defer func() { _ = process.Release() }()
	if p.contains(pid) { // Else the PID belongs to another process now.
		_ = process.Signal(signal) // This fails if the process has ended.
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

// contains reports whether the process runs and belongs to the daemon. A process that has given up
// its memory still counts: if it hangs in the NVIDIA driver, it holds the GPU.
func (p processSet) contains(pid int) bool {
	st, err := readStat(p.proc, pid)
	if err != nil || st.state == "Z" || st.state == "X" {
		return false
	}
	if pid == p.run.PID {
		return st.startTime == p.run.StartTime
	}
	return p.run.PID != 0 && st.session == strconv.Itoa(p.run.PID) && st.name == processName
}

// stat is a part of /proc/PID/stat. startTime is in clock ticks since boot.
type stat struct{ name, state, session, startTime string }

func readStat(proc string, pid int) (stat, error) {
	data, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "stat"))
	if err != nil {
		return stat{}, err
	}
	// The second field is the program's name in parentheses. It may contain spaces and parentheses.
	begin, end := bytes.IndexByte(data, '('), bytes.LastIndexByte(data, ')')
	fields := strings.Fields(string(data[end+1:]))
	if begin < 0 || end < begin || len(fields) < 20 {
		return stat{}, fmt.Errorf("the stat of process %d has an unknown format: %.100q", pid, data)
	}
	// In proc_pid_stat(5), fields[0] is field 3.
	return stat{name: string(data[begin+1 : end]), state: fields[0], session: fields[3], startTime: fields[19]}, nil
}
