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

// Streams are a command's standard streams. If In is nil, the command's input is empty. If Out or
// Err is nil, that output is discarded.
type Streams struct {
	In       io.Reader
	Out, Err io.Writer
}

// streamGrace is how long Exec waits for a command's streams to close after the command's end.
// Processes that the command left running may hold them open.
const streamGrace = 5 * time.Second

// Exec runs a command in the running machine. It finds a name without a slash in the machine's
// PATH.
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

// onOwnThread calls run on an OS thread that ends afterwards, because run changes the thread's
// namespaces. Call onOwnThread in a goroutine of its own.
//
// It does not use the process's first thread, because that thread never ends and /proc/self shows
// its namespaces.
func onOwnThread(run func()) {
	runtime.LockOSThread()
	if unix.Gettid() != unix.Getpid() {
		run()
		return // the thread is locked, so it ends with the goroutine
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		onOwnThread(run) // on another thread, since this goroutine has locked the first one
	}()
	<-done
	runtime.UnlockOSThread()
}

// startInside moves the calling OS thread into the machine's namespaces and starts the command
// there.
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
