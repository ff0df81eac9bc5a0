package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// background is a build that goes on while other things are shown.
type background struct {
	cancel context.CancelFunc
	done   chan struct{}
	err    error // to be read when done is closed
}

// buildInBackground builds the cluster's programs at the lowest priority, so that what is shown meanwhile does not wait for it.
func (d *demo) buildInBackground(ctx context.Context) *background {
	ctx, cancel := context.WithCancel(ctx)
	b := &background{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(b.done)
		// Built and then run, not by `go run`: that one ends on SIGTERM without its child.
		tool := filepath.Join(d.folder(), "cluster")
		if b.err = d.runGroup(ctx, "go", "build", "-o", tool, "./test/cluster/cmd/cluster"); b.err == nil {
			b.err = d.runGroup(ctx, "nice", "-n", "19", tool, "build")
		}
	}()
	return b
}

func (b *background) wait() error {
	<-b.done
	return b.err
}

// stop ends the build and returns when no process of it is left.
func (b *background) stop() {
	b.cancel()
	<-b.done
}

// patience is how long a cancelled build may take to end in order.
const patience = 10 * time.Second

// runGroup runs a command in a process group of its own, which ends as a whole when the context does: the command starts compilers, which start more.
func (d *demo) runGroup(ctx context.Context, argv ...string) error {
	cmd := command(ctx, d.root, nil, argv...)
	output := d.screen.background("cluster")
	cmd.Stdout, cmd.Stderr = output, output
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	signal := func(s syscall.Signal) error {
		if err := syscall.Kill(-cmd.Process.Pid, s); !errors.Is(err, syscall.ESRCH) {
			return err
		}
		return os.ErrProcessDone
	}
	cmd.Cancel = func() error { return signal(syscall.SIGTERM) }
	cmd.WaitDelay = patience
	err := cmd.Run()
	if ctx.Err() != nil && cmd.Process != nil {
		// The command has ended; what it started may have not.
		_ = signal(syscall.SIGKILL)
	}
	if err == nil || errors.Is(err, exec.ErrWaitDelay) && ctx.Err() == nil {
		return nil
	}
	return fmt.Errorf("build the cluster's programs: %w", err)
}
