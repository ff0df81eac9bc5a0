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

// background is the build of the programs that the cluster needs. It runs while the demo shows the
// simulated node.
type background struct {
	cancel context.CancelFunc
	done   chan struct{}
	err    error // valid after done is closed
}

// buildInBackground starts the build of the cluster's programs. It runs at the lowest priority, so
// that the build does not slow down the demo.
func (d *demo) buildInBackground(ctx context.Context) *background {
	ctx, cancel := context.WithCancel(ctx)
	b := &background{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(b.done)
		// Build and run the program in two steps, because `go run` ends on SIGTERM without ending its
		// child process.
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

// stop ends the build. It returns after the build's last process has ended.
func (b *background) stop() {
	b.cancel()
	<-b.done
}

// patience is how long a cancelled build may take to end before it is killed.
const patience = 10 * time.Second

// runGroup runs a command in its own process group, and signals the whole group when ctx ends. The
// command starts compilers, which start more processes.
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
		// The command has ended, but processes that it started may still run.
		_ = signal(syscall.SIGKILL)
	}
	if err == nil || errors.Is(err, exec.ErrWaitDelay) && ctx.Err() == nil {
		return nil
	}
	return fmt.Errorf("build the cluster's programs: %w", err)
}
