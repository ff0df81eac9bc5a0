package tool

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
)

// script returns a tool that runs a shell script instead of nvidia-smi.
func script(t *testing.T, text string) Tool {
	t.Helper()
	path := filepath.Join(t.TempDir(), "nvidia-smi")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o700); err != nil {
		t.Fatal(err)
	}
	return Tool{Program: driverroot.Program{Path: path, LibraryDir: t.TempDir()}, Limit: time.Minute}
}

func TestToolIsKilledWithItsChildren(t *testing.T) {
	gate := filepath.Join(t.TempDir(), "gate")
	if err := unix.Mkfifo(gate, 0o600); err != nil {
		t.Fatal(err)
	}
	// The script's child process has the pipe open for writing, so a read of the pipe ends only
	// when the child is dead.
	hangs := script(t, "sleep 3600 >'"+gate+"' & wait")
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error)
	go func() {
		_, err := hangs.Run(ctx)
		result <- err
	}()
	opened, err := os.Open(gate) // returns when the child runs
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := <-result; !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "nvidia-smi failed") {
		t.Error(err)
	}
	if n, err := opened.Read(make([]byte, 1)); n != 0 {
		t.Error(n, err)
	}
	_ = opened.Close()

	hangs.Limit = 200 * time.Millisecond
	hangs.Program = script(t, "exec sleep 3600").Program
	if _, err := hangs.Run(t.Context()); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

func TestToolOutputIsTruncated(t *testing.T) {
	flood := script(t, "i=0; while [ $i -lt 5000 ]; do echo 'a line of output that is dropped'; i=$((i+1)); done; echo the last; exit 3")
	out, err := flood.Run(t.Context())
	if err == nil || len(out) > keptOutput || len(err.Error()) > 2*shownOutput || !strings.Contains(err.Error(), "the last") ||
		!strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("%d bytes; %v", len(out), err)
	}
	if out, err := script(t, `echo "$LD_LIBRARY_PATH"`).Run(t.Context()); err != nil || !strings.HasPrefix(out, "/") {
		t.Error(out, err)
	}
}

// While the other GPUs are hidden, a failure is about the tool's own GPU.
func TestToolThatFailsRunsOnce(t *testing.T) {
	runs := filepath.Join(t.TempDir(), "runs")
	fails := script(t, "echo x >> "+runs+"; exit 3")
	fails.Hidden = []string{"/dev/full"} // stands for a GPU
	if out, err := fails.Run(t.Context()); err == nil {
		t.Error(out)
	}
	if got, err := os.ReadFile(runs); err != nil || string(got) != "x\n" {
		t.Errorf("ran %q times (%v)", got, err)
	}
}
