package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/cgroup"
)

// StarterArgument as the first argument makes the program cmd/machine the starter, and InitArgument
// makes it PID 1. The next argument is the machine's folder.
const (
	StarterArgument = "start"
	InitArgument    = "init"
)

// namespaces are the clone flags of the new namespaces that each machine gets.
const namespaces = syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS |
	syscall.CLONE_NEWIPC | syscall.CLONE_NEWPID | syscall.CLONE_NEWCGROUP

// bootRecord is what the host stores when a machine boots: which process is the machine's PID 1.
type bootRecord struct {
	PID       int    `json:"pid"`
	StartTime string `json:"startTime"` // as processStart returns it; with the PID it identifies one process
}

// RunStarter starts the machine whose folder is dir, and returns when the machine has booted or
// failed. It must run in a process of its own. That process enters the machine's cgroup first,
// because a new cgroup namespace has its root at the cgroup of its creator.
func RunStarter(dir string) error {
	spec, err := Load(dir)
	if err != nil {
		return err
	}
	if err := cgroup.Enter(spec.CgroupBases, spec.Name); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cableRead, cableWrite, err := os.Pipe()
	if err != nil {
		return err
	}
	verdictRead, verdictWrite, err := os.Pipe()
	if err != nil {
		return err
	}
	first := exec.Command(self, InitArgument, dir)
	first.Dir = "/"
	first.Stderr = os.Stderr // until PID 1 opens its own log file
	first.ExtraFiles = []*os.File{cableRead, verdictWrite}
	first.SysProcAttr = &syscall.SysProcAttr{Cloneflags: namespaces, Setsid: true}
	if err := first.Start(); err != nil {
		return fmt.Errorf("create the machine's namespaces: %w (root rights are needed)", err)
	}
	_ = cableRead.Close()
	_ = verdictWrite.Close()
	if err := errors.Join(stepAside(spec), plugIn(spec, first.Process.Pid, cableWrite)); err != nil {
		return errors.Join(err, first.Process.Kill())
	}
	var failure string
	if err := json.NewDecoder(verdictRead).Decode(&failure); err != nil {
		return fmt.Errorf("the machine's first process died while booting: %w", noEOF(err))
	}
	if failure != "" {
		return errors.Join(errors.New(failure), first.Process.Kill())
	}
	return nil
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return errors.New("it ended without a report")
	}
	return err
}

// stepAside moves the starter out of the machine's cgroup into a child of that cgroup. With cgroup
// v2 a cgroup can delegate its controllers only when it contains no process. PID 1 leaves the
// cgroup itself, when the network is connected.
func stepAside(spec *Spec) error {
	if !cgroup.Unified() {
		return nil
	}
	aside := filepath.Join(spec.Name, "starter")
	for _, base := range spec.CgroupBases {
		if err := os.MkdirAll(filepath.Join(base, aside), 0o755); err != nil {
			return fmt.Errorf("create cgroup: %w", err)
		}
	}
	return cgroup.Enter(spec.CgroupBases, aside)
}

func plugIn(spec *Spec, pid int, cable io.Closer) error {
	start, err := processStart(pid)
	if err != nil {
		return err
	}
	content, err := json.Marshal(bootRecord{PID: pid, StartTime: start})
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(spec.Dir, bootFile+".json"), content, 0o600); err != nil {
		return fmt.Errorf("record the machine's first process: %w", err)
	}
	if err := connect(spec.Network, pid); err != nil {
		return err
	}
	return cable.Close()
}
