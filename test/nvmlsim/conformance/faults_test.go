package conformance

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// first describes the first GPU: its MIG mode, and its numbers of GPU instances and compute
// instances.
func (w *world) first() string {
	gpu := w.state.GPU(0)
	compute := 0
	for _, instance := range gpu.GPUInstances() {
		compute += len(gpu.OfInstance(instance.ID))
	}
	return fmt.Sprintf("mode %d, %d instances, %d compute instances", gpu.MIGCurrent, len(gpu.GPUInstances()), compute)
}

// died waits until the process has ended and returns the signal that ended it.
func (p *process) died() syscall.Signal {
	p.t.Helper()
	for p.lines.Scan() {
	}
	_ = p.command.Wait()
	status, ok := p.command.ProcessState.Sys().(syscall.WaitStatus)
	if !ok || !status.Signaled() {
		p.t.Fatalf("the process ended with %v", p.command.ProcessState)
	}
	return status.Signal()
}

// A process that is killed before a call's effect must have changed nothing; one that is killed
// after it must have changed everything. The next process must be able to continue.
func TestKilledCallerLeavesAllOrNothing(t *testing.T) {
	steps := []struct {
		function      string
		before, after string
	}{
		{"nvmlDeviceSetMigMode", "mode 0, 0 instances, 0 compute instances", "mode 1, 0 instances, 0 compute instances"},
		{"nvmlDeviceCreateGpuInstanceWithPlacement", "mode 1, 0 instances, 0 compute instances", "mode 1, 1 instances, 0 compute instances"},
		{"nvmlGpuInstanceCreateComputeInstance", "mode 1, 1 instances, 0 compute instances", "mode 1, 1 instances, 1 compute instances"},
		{"nvmlComputeInstanceDestroy", "mode 1, 1 instances, 1 compute instances", "mode 1, 1 instances, 0 compute instances"},
		{"nvmlGpuInstanceDestroy", "mode 1, 1 instances, 0 compute instances", "mode 1, 0 instances, 0 compute instances"},
	}
	for _, step := range steps {
		for _, after := range []uint32{0, 1} {
			t.Run(fmt.Sprintf("%s, after: %d", step.function, after), func(t *testing.T) {
				w := newWorld(t, manyOf(t, "h100-sxm5-80gb", 1)).onHost()
				w.must(w.state.AddFault(state.Fault{Kind: state.FaultKill, GPU: state.AnyGPU, After: after}, step.function, 1))
				if signal := start(t, "cut").died(); signal != syscall.SIGKILL {
					t.Errorf("the caller died of %v", signal)
				}
				expected := step.before
				if after != 0 {
					expected = step.after
				}
				if got := w.first(); got != expected {
					t.Errorf("%s, want %s", got, expected)
				}
				w.must(w.state.Reset(0, true))
				p := start(t, "cut")
				for _, line := range []string{"mode 0 0", "instance 0", "compute 0", "destroy 0 0"} {
					p.expect(line)
				}
			})
		}
	}
}

// An injected fault with After set makes a call return an error after the call has had its effect,
// as if only the answer were lost.
func TestLostAnswerHasEffect(t *testing.T) {
	w := newWorld(t, inMIG(t, "h100-sxm5-80gb", 1)).onHost()
	device := devices(t, initialize(t))[0]
	fault := state.Fault{Kind: state.FaultFail, Error: uint32(nvml.ERROR_TIMEOUT), GPU: state.AnyGPU, After: 1}
	w.must(w.state.AddFault(fault, "nvmlDeviceCreateGpuInstanceWithPlacement", 1))
	_, ret := createAt(device, shapesOf(readModels(t)["h100-sxm5-80gb"])[0])
	want(t, "create", ret, nvml.ERROR_TIMEOUT)
	if left := w.state.GPU(0).GPUInstances(); len(left) != 1 {
		t.Errorf("instances %v, want one", left)
	}
	// A call that fails without a fault must return its own error, even if a fault is due after the
	// call's effect.
	fault.Error = uint32(nvml.ERROR_UNKNOWN)
	w.must(w.state.AddFault(fault, "nvmlDeviceCreateGpuInstanceWithPlacement", 1))
	_, ret = createAt(device, shapesOf(readModels(t)["h100-sxm5-80gb"])[0])
	want(t, "create where one is", ret, nvml.ERROR_INSUFFICIENT_RESOURCES)
}

// waitsForALock reports whether a thread of the process waits in the kernel for an
// open-file-description lock.
func (p *process) waitsForALock() bool {
	p.t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", p.command.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	for _, thread := range threads {
		text, err := os.ReadFile(thread)
		if errors.Is(err, os.ErrPermission) {
			p.t.Skip("not allowed to see what another process waits for")
		}
		fields := strings.Fields(string(text))
		if len(fields) > 2 && fields[0] == fmt.Sprint(unix.SYS_FCNTL) && fields[2] == fmt.Sprintf("%#x", unix.F_OFD_SETLKW) {
			return true
		}
	}
	return false
}

// While a process partitions one GPU, changes of other GPUs must wait if the simulated driver has
// one lock for all GPUs, as real drivers have. If it has one lock for each GPU, or none, they must
// not wait.
func TestDriverLock(t *testing.T) {
	for _, lock := range []struct {
		name        string
		kind        uint32
		serialising bool
	}{{"driver", state.CutLockDriver, true}, {"all", state.CutLockAll, true}, {"gpu", state.CutLockGPU, false},
		{"none", state.CutLockNone, false}} {
		t.Run(lock.name, func(t *testing.T) {
			w := newWorld(t, manyOf(t, "h100-sxm5-80gb", 2)).onHost()
			w.must(w.state.SetCutLock(lock.kind))
			w.must(w.state.AddFault(state.Fault{Kind: state.FaultSlow, DelayMS: 3600000, GPU: 0}, "nvmlDeviceCreateGpuInstanceWithPlacement", 0))
			slow := start(t, "cut", gpuVariable+"=0")
			slow.expect("mode 0 0")
			waitFor(t, "the first cut to arrive", func() bool { return atomic.LoadUint64(&w.state.Fault(0).Hits) == 1 })
			other := start(t, "cut", gpuVariable+"=1")
			if lock.serialising {
				waitFor(t, "the other cut to wait", other.waitsForALock)
				slow.kill() // the kernel drops the lock of a dead process
			}
			for _, line := range []string{"mode 0 0", "instance 0", "compute 0", "destroy 0 0"} {
				other.expect(line)
			}
			if !lock.serialising {
				w.must(w.state.ClearFaults())
				slow.expect("instance 0")
			}
		})
	}
}

// With CutLockAll, even a process that only reads another GPU must wait while one GPU is
// partitioned.
func TestGlobalLockBlocksReadsToo(t *testing.T) {
	w := newWorld(t, manyOf(t, "h100-sxm5-80gb", 2)).onHost()
	w.must(w.state.SetCutLock(state.CutLockAll))
	w.must(w.state.AddFault(state.Fault{Kind: state.FaultSlow, DelayMS: uint64(time.Hour.Milliseconds()), GPU: 0}, "nvmlDeviceSetMigMode", 0))
	slow := start(t, "cut")
	waitFor(t, "the cut to arrive", func() bool { return atomic.LoadUint64(&w.state.Fault(0).Hits) == 1 })
	look := start(t, "version")
	waitFor(t, "the look to wait", look.waitsForALock)
	w.must(w.state.ClearFaults())
	slow.expect("mode 0 0")
	look.expect("version 0 550.163.01")
}

// An injected kill fault with Group set must kill every process in the process group of the process
// that makes the call.
func TestKillOfProcessGroup(t *testing.T) {
	w := newWorld(t, manyOf(t, "h100-sxm5-80gb", 1)).onHost()
	leader := startInGroup(t, "hold", 0)
	leader.expect("ready")
	w.must(w.state.AddFault(state.Fault{Kind: state.FaultKill, GPU: state.AnyGPU, Group: 1}, "nvmlDeviceSetMigMode", 1))
	member := startInGroup(t, "cut", leader.command.Process.Pid)
	for _, p := range []*process{member, leader} {
		if signal := p.died(); signal != syscall.SIGKILL {
			t.Errorf("died of %v", signal)
		}
	}
}
