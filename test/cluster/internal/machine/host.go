package machine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/cgroup"
)

// cleanupTimeout bounds how long PowerCut takes. PowerCut continues after the caller's context has
// ended.
const cleanupTimeout = 60 * time.Second

// Boot starts the machine and returns when its services are ready. program is the path of the built
// cmd/machine.
func (s *Spec) Boot(ctx context.Context, program string) error {
	if _, running := s.PID(); running {
		return fmt.Errorf("machine %s is running already", s.Name)
	}
	if err := cgroup.Create(s.CgroupBases, s.Name); err != nil {
		return err
	}
	starter := exec.CommandContext(ctx, program, StarterArgument, s.Dir)
	starter.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // a Ctrl-C at the terminal reaches only the caller
	var output bytes.Buffer
	starter.Stderr = &output
	starter.WaitDelay = time.Second
	if err := starter.Run(); err != nil {
		err = fmt.Errorf("boot machine %s: %w: %s (logs: %s)", s.Name, err, strings.TrimSpace(output.String()), s.LogDir())
		return errors.Join(err, context.Cause(ctx), s.PowerCut(ctx))
	}
	return nil
}

// PowerCut kills every process of the machine at once, as a loss of power does. The machine's disk
// stays as it is.
func (s *Spec) PowerCut(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	if pid, running := s.PID(); running {
		// The kernel kills the whole PID namespace with its PID 1. So no process has time to react to the
		// death of another.
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("cut the power of machine %s: %w", s.Name, err)
		}
	}
	var dirs []string
	for _, base := range s.CgroupBases {
		dirs = append(dirs, filepath.Join(base, s.Name))
	}
	if err := cgroup.Destroy(ctx, dirs); err != nil {
		return fmt.Errorf("cut the power of machine %s: %w", s.Name, err)
	}
	if err := disconnect(s.Network.HostLink); err != nil {
		return err
	}
	if err := os.Remove(filepath.Join(s.Dir, bootFile+".json")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// PID returns the process ID of the machine's first process, and whether that process is alive.
func (s *Spec) PID() (int, bool) {
	content, err := os.ReadFile(filepath.Join(s.Dir, bootFile+".json"))
	if err != nil {
		return 0, false
	}
	var record bootRecord
	if err := json.Unmarshal(content, &record); err != nil {
		return 0, false
	}
	start, err := processStart(record.PID)
	return record.PID, err == nil && start == record.StartTime
}

// processStart returns the start time of a living process, in the kernel's units. Process IDs are
// reused, but a process ID together with its start time names one process only.
func processStart(pid int) (string, error) {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", fmt.Errorf("read the start time of process %d: %w", pid, err)
	}
	// The second field is the program's name in parentheses. The name may itself contain parentheses
	// and spaces, so the fields are counted from the last parenthesis.
	_, rest, _ := strings.Cut(string(content[bytes.LastIndexByte(content, ')')+1:]), " ")
	fields := strings.Fields(rest)
	const state, start = 0, 19
	if len(fields) <= start {
		return "", fmt.Errorf("read the start time of process %d: unexpected format", pid)
	}
	if fields[state] == "Z" || fields[state] == "X" {
		return "", fmt.Errorf("process %d is dead", pid)
	}
	return fields[start], nil
}
