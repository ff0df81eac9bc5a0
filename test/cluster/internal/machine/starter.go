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

// Arguments by which the machine's program knows its part. The machine's folder follows.
const (
	StarterArgument = "start"
	InitArgument    = "init"
)

// namespaces are those that make a process tree a machine.
const namespaces = syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC | syscall.CLONE_NEWPID | syscall.CLONE_NEWCGROUP

// bootRecord is what the host knows of a boot.
type bootRecord struct {
	PID       int    `json:"pid"`
	StartTime string `json:"startTime"` // as the kernel counts; with the PID it names one process
}

// RunStarter starts the machine whose folder is dir, and returns when it has booted or failed to. It must be a process of its own: it moves
// itself into the machine's cgroup, because the root of a new cgroup namespace is where its maker is.
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
	first.Stderr = os.Stderr // until PID 1 has a log of its own
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
		return errors.New("no word from it")
	}
	return err
}

// stepAside moves this process out of the root of the machine's cgroup namespace: with cgroup v2 the root hands its controllers down only if
// no process is in it. PID 1 does so when the cable is there.
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
		return fmt.Errorf("note the machine's first process: %w", err)
	}
	if err := connect(spec.Network, pid); err != nil {
		return err
	}
	return cable.Close()
}
