package conformance

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

func TestOpenGPUBlocksModeChange(t *testing.T) {
	w := newWorld(t, readNode(t, "dgx-h100")).onHost()
	gpus := devices(t, initialize(t))
	other := start(t, "hold")
	other.says()
	setMode(t, gpus[0], nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS, nvml.SUCCESS)
	setMode(t, gpus[0], nvml.DEVICE_MIG_DISABLE, nvml.SUCCESS, nvml.SUCCESS)

	w.must(w.state.SetBlock(state.ClientBlocksMode, true))
	setMode(t, gpus[0], nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS, nvml.ERROR_IN_USE)
	expectMode(t, gpus[0], nvml.DEVICE_MIG_DISABLE, nvml.DEVICE_MIG_ENABLE)
	setMode(t, gpus[1], nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS, nvml.SUCCESS) // the other process has not opened this GPU
	other.kill()
	setMode(t, gpus[0], nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS, nvml.SUCCESS)
}

func TestInstanceHandleBlocksDestroy(t *testing.T) {
	for _, blocks := range []bool{true, false} {
		t.Run(fmt.Sprint(blocks), func(t *testing.T) {
			w := newWorld(t, manyOf(t, "h100-sxm5-80gb", 1)).onHost()
			w.must(w.state.SetBlock(state.ClientBlocksDestroy, blocks))
			device := devices(t, initialize(t))[0]
			setMode(t, device, nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS, nvml.SUCCESS)
			first := create(t, device, 9, 0, 4)
			compute, ret := first.CreateComputeInstance(&nvml.ComputeInstanceProfileInfo{Id: 2})
			want(t, "compute instance", ret, nvml.SUCCESS)
			other := start(t, "subscribe")
			if said := other.says(); said != "subscribed 2" {
				t.Fatal(said)
			}
			second := create(t, device, 9, 4, 4) // the other process has no handle of this GPU instance
			want(t, "destroy another", second.Destroy(), nvml.SUCCESS)
			refused := nvml.SUCCESS
			if blocks {
				refused = nvml.ERROR_IN_USE
			}
			want(t, "destroy the compute instance", compute.Destroy(), refused)
			if !blocks {
				want(t, "destroy the GPU instance", first.Destroy(), nvml.SUCCESS)
				return
			}
			other.kill()
			want(t, "destroy the compute instance", compute.Destroy(), nvml.SUCCESS)
			other = start(t, "subscribe")
			if said := other.says(); said != "subscribed 1" {
				t.Fatal(said)
			}
			want(t, "destroy the GPU instance", first.Destroy(), nvml.ERROR_IN_USE)
			other.kill()
			want(t, "destroy the GPU instance", first.Destroy(), nvml.SUCCESS)

			// This GPU instance has the same ID as the one destroyed before. Its destruction must succeed
			// although another process has the GPU itself open.
			again := create(t, device, 9, 0, 4)
			other = start(t, "hold")
			other.says()
			want(t, "destroy the next one", again.Destroy(), nvml.SUCCESS)
		})
	}
}

func TestFirstInstanceIsRefusedOnce(t *testing.T) {
	w := newWorld(t, manyOf(t, "h100-sxm5-80gb", 1)).onHost()
	w.must(w.state.SetBlock(state.CreateInUse, true))
	device := devices(t, initialize(t))[0]
	setMode(t, device, nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS, nvml.SUCCESS)
	for range 2 {
		_, ret := device.CreateGpuInstance(&nvml.GpuInstanceProfileInfo{Id: 19})
		want(t, "the first instance", ret, nvml.ERROR_IN_USE)
		first, second := create(t, device, 19, 0, 1), create(t, device, 19, 1, 1)
		want(t, "destroy", first.Destroy(), nvml.SUCCESS)
		want(t, "destroy", second.Destroy(), nvml.SUCCESS)
	}
}

// As on a real node, /proc/<pid>/fd must show the device nodes of the GPUs that a process has open.
func TestOpenGPUShowsInDescriptors(t *testing.T) {
	newWorld(t, manyOf(t, "h100-sxm5-80gb", 2)).onHost()
	other := start(t, "hold")
	other.says()
	if found := descriptors(t, other.command.Process.Pid); !found["nvidia0"] || found["nvidia1"] {
		t.Errorf("its descriptors are %v", found)
	}
}

// descriptors returns the base names of the device nodes that a process has open.
func descriptors(t *testing.T, pid int) map[string]bool {
	t.Helper()
	found := map[string]bool{}
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		var s unix.Stat_t
		if target, err := os.Readlink(fd); err == nil && unix.Stat(fd, &s) == nil {
			found[filepath.Base(target)] = true
		}
	}
	return found
}
