package conformance

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// A GPU that is unbound from NVIDIA's driver is gone for a process that initialises NVML later. A
// process that had it open keeps the driver from letting go, and still gets its answers.
func TestUnboundGPU(t *testing.T) {
	w := newWorld(t, readNode(t, "l40s-x2"))
	holder := start(t, "hold", gpuVariable+"=0")
	holder.expect("ready")
	library := initialize(t)
	other, ret := library.DeviceGetHandleByIndex(1)
	want(t, "handle", ret, nvml.SUCCESS)
	if !w.state.Opened(0) || !w.state.Opened(1) {
		t.Error("the GPUs count as closed")
	}
	w.must(w.state.SetBinding(0, state.Away))
	w.must(w.state.SetBinding(1, state.Unbound))
	_, ret = library.DeviceGetHandleByIndex(0)
	want(t, "handle of an unbound GPU", ret, nvml.ERROR_GPU_IS_LOST)
	_, ret = other.GetUUID()
	want(t, "question to an unbound GPU that this process has open", ret, nvml.SUCCESS)

	want(t, "shutdown", library.Shutdown(), nvml.SUCCESS)
	holder.kill()
	if w.state.Opened(0) || w.state.Opened(1) {
		t.Error("the GPUs count as open")
	}
	want(t, "init", library.Init(), nvml.SUCCESS)
	if count, _ := library.DeviceGetCount(); count != 0 {
		t.Errorf("NVML lists %d GPUs", count)
	}
	w.must(w.state.Bind(1, state.Bound))
	want(t, "shutdown", library.Shutdown(), nvml.SUCCESS)
	want(t, "init", library.Init(), nvml.SUCCESS)
	if count, _ := library.DeviceGetCount(); count != 1 || w.state.GPU(1).Minor != 0 {
		t.Errorf("NVML lists %d GPUs, and the one that came back has the minor %d", count, w.state.GPU(1).Minor)
	}
}
