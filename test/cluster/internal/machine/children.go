package machine

import (
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// children starts processes for PID 1 and reaps every child, including containers' orphans. A
// process that uses children must not use os/exec, whose children would be reaped too.
type children struct {
	mu      sync.Mutex
	waiting map[int]chan syscall.WaitStatus
}

// newChildren also starts a goroutine that reaps dead children.
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
		// start holds c.mu from before the child starts until the child is stored in c.waiting. So the
		// reaping goroutine does not reap a child that dies at once before start has stored it.
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

// process is a running child that children.start began.
type process struct {
	pid  int
	exit <-chan syscall.WaitStatus
}

// start runs the program argv[0] and appends its output to logFile.
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

// describeExit describes how a process ended. success means that it exited with code 0.
func describeExit(status syscall.WaitStatus) (description string, success bool) {
	if status.Signaled() {
		return fmt.Sprintf("killed by signal %d (%s)", status.Signal(), status.Signal()), false
	}
	return fmt.Sprintf("exit status %d", status.ExitStatus()), status.ExitStatus() == 0
}
