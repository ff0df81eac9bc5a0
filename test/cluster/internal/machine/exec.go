package machine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// Streams are a command's standard streams; nil ones are empty or discarded.
type Streams struct {
	In       io.Reader
	Out, Err io.Writer
}

// streamGrace is how long a command's streams may stay open after its end, by what it left running.
const streamGrace = 5 * time.Second

// Exec runs a command in the running machine. A command name without a slash is looked up in the machine's PATH.
func (s *Spec) Exec(ctx context.Context, streams Streams, argv ...string) error {
	pid, running := s.PID()
	if !running {
		return fmt.Errorf("run %v on machine %s: the machine is off", argv, s.Name)
	}
	finished := make(chan error, 1)
	go onOwnThread(func() {
		command, err := s.startInside(ctx, pid, streams, argv)
		if err == nil {
			err = command.Wait()
		}
		finished <- err
	})
	if err := <-finished; err != nil {
		return fmt.Errorf("run %v on machine %s: %w", argv, s.Name, errors.Join(err, context.Cause(ctx)))
	}
	return nil
}

// onOwnThread runs a function that changes its thread, on one that ends with it. It must be called in a goroutine of its own.
//
// The process's first thread is not fit for that: it never ends, and it is the one by which /proc/self shows the process.
func onOwnThread(run func()) {
	runtime.LockOSThread()
	if unix.Gettid() != unix.Getpid() {
		run()
		return // locked: the thread ends with the goroutine
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		onOwnThread(run) // on another thread, since this one is taken
	}()
	<-done
	runtime.UnlockOSThread()
}

// startInside moves the calling thread into the machine's namespaces, which its children inherit.
func (s *Spec) startInside(ctx context.Context, pid int, streams Streams, argv []string) (*exec.Cmd, error) {
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	defer func() { _ = unix.Close(process) }()
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return nil, fmt.Errorf("prepare to enter the machine: %w", err)
	}
	if err := unix.Setns(process, namespaces); err != nil {
		return nil, fmt.Errorf("enter the machine: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return nil, err
	}
	command := exec.CommandContext(ctx, "/usr/bin/env", append([]string{"--"}, argv...)...)
	command.Env = append([]string{"PATH=" + searchPath, "HOME=/root", "NODE_NAME=" + s.Name}, s.Env...)
	command.Stdin, command.Stdout, command.Stderr = streams.In, streams.Out, streams.Err
	command.WaitDelay = streamGrace
	return command, command.Start()
}
