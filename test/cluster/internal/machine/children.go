package machine

import (
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// children starts processes for PID 1 and reaps every process that dies as its child, the orphans of containers too. os/exec cannot be used
// beside it: it would find its children reaped.
type children struct {
	mu      sync.Mutex
	waiting map[int]chan syscall.WaitStatus
}

// newChildren starts to reap.
func newChildren() *children {
	c := &children{waiting: map[int]chan syscall.WaitStatus{}}
	died := make(chan os.Signal, 1)
	signal.Notify(died, unix.SIGCHLD)
	go func() {
		for range died {
			c.reap()
		}
	}()
	return c
}

func (c *children) reap() {
	for {
		// A child that dies at once must not be reaped before start has noted it: hence the lock.
		c.mu.Lock()
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if err == nil && pid > 0 {
			if waiter := c.waiting[pid]; waiter != nil {
				waiter <- status
				delete(c.waiting, pid)
			}
		}
		c.mu.Unlock()
		if pid <= 0 && err != syscall.EINTR {
			return
		}
	}
}

// process is a child that start began.
type process struct {
	pid  int
	exit <-chan syscall.WaitStatus
}

// start runs a program with its output appended to the log file.
func (c *children) start(argv, env []string, logFile string) (*process, error) {
	log, err := os.OpenFile(logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	defer func() { _ = log.Close() }()
	null, err := os.Open("/dev/null")
	if err != nil {
		return nil, err
	}
	defer func() { _ = null.Close() }()
	c.mu.Lock()
	defer c.mu.Unlock()
	pid, err := syscall.ForkExec(argv[0], argv, &syscall.ProcAttr{
		Dir: "/", Env: env, Files: []uintptr{null.Fd(), log.Fd(), log.Fd()}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", argv[0], err)
	}
	exit := make(chan syscall.WaitStatus, 1)
	c.waiting[pid] = exit
	return &process{pid: pid, exit: exit}, nil
}

// describeExit says how a process ended, and whether well.
func describeExit(status syscall.WaitStatus) (description string, success bool) {
	if status.Signaled() {
		return fmt.Sprintf("killed by signal %d (%s)", status.Signal(), status.Signal()), false
	}
	return fmt.Sprintf("exit status %d", status.ExitStatus()), status.ExitStatus() == 0
}
