package nvidiatest

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
)

// foreignGPUVariable names the environment variable with the index of the GPU that
// runForeignProcess opens.
const foreignGPUVariable = "NVIDIA_TEST_HOLDS"

// runForeignProcess runs a process of another tool, such as a monitor, that has NVML open until it
// is killed. If subscribes is set, the process also opens the GPU's MIG instances.
func runForeignProcess(subscribes bool) {
	library := nvml.New(nvml.WithLibraryPath(os.Getenv("NVIDIA_TEST_LIBRARY")))
	_ = library.Init()
	index, _ := strconv.Atoi(os.Getenv(foreignGPUVariable))
	card, ret := library.DeviceGetHandleByIndex(index)
	for id := 0; subscribes && id < 15; id++ {
		if instance, ret := card.GetGpuInstanceById(id); ret == nvml.SUCCESS {
			_, _ = instance.GetComputeInstanceById(0)
		}
	}
	_, _ = fmt.Fprintln(os.Stdout, int(ret))
	select {}
}

// Foreign starts a child process that has the GPU with this index open, like a process of another
// tool, and adds it to the site's /proc. role selects what else the process opens. end kills it.
func (s Site) Foreign(role string, index int) (pid int, end func()) {
	s.T.Helper()
	library, ok := driverroot.Library(s.Paths().DriverRoot)
	if !ok {
		s.T.Fatal("the site has no NVML library")
	}
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), RoleVariable+"="+role, fmt.Sprint(foreignGPUVariable, "=", index), "NVIDIA_TEST_LIBRARY="+library)
	out, err := command.StdoutPipe()
	if err == nil {
		err = command.Start()
	}
	if err != nil {
		s.T.Fatal(err)
	}
	end = sync.OnceFunc(func() {
		_ = command.Process.Kill()
		_ = command.Wait()
	})
	s.T.Cleanup(end)
	if said, _ := bufio.NewReader(out).ReadString('\n'); said != "0\n" {
		s.T.Fatal(said)
	}
	pid = command.Process.Pid
	if err := os.Symlink(fmt.Sprintf("/proc/%d", pid), filepath.Join(s.Root, "proc", fmt.Sprint(pid))); err != nil {
		s.T.Fatal(err)
	}
	return pid, end
}

// RefusedBy expects an error that says that the process with this PID has the GPU open.
func RefusedBy(t *testing.T, err error, pid int) {
	t.Helper()
	var refusal interface{ FailureCode() device.FailureCode }
	if !errors.As(err, &refusal) || refusal.FailureCode() != device.FailureInUse ||
		!strings.Contains(err.Error(), fmt.Sprintf("(process %d)", pid)) {
		t.Errorf("the error is %v, want one that names process %d", err, pid)
	}
}
