package conformance

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// The driver must say whether a GPU changes its MIG mode without a reset. A GPU without MIG has no
// answer.
func TestFieldSaysWhetherMIGNeedsReset(t *testing.T) {
	for name, wanted := range map[string]struct {
		ret   nvml.Return
		value byte
	}{
		"h100-sxm5-80gb": {nvml.SUCCESS, 1},
		"a100-sxm4-40gb": {nvml.SUCCESS, 0},
		"l4-24gb":        {nvml.ERROR_NOT_SUPPORTED, 0},
	} {
		t.Run(name, func(t *testing.T) {
			newWorld(t, manyOf(t, name, 1))
			field := []nvml.FieldValue{{FieldId: nvml.FI_DEV_IS_RESETLESS_MIG_SUPPORTED}}
			want(t, "fields", devices(t, initialize(t))[0].GetFieldValues(field), nvml.SUCCESS)
			want(t, "the field", nvml.Return(field[0].NvmlReturn), wanted.ret) //nolint:gosec // NVML's own number
			if field[0].Value[0] != wanted.value {
				t.Errorf("the field is %d, want %d", field[0].Value[0], wanted.value)
			}
		})
	}
}

func TestConfidentialComputingHasReadyState(t *testing.T) {
	w := newWorld(t, manyOf(t, "h100-sxm5-80gb", 1))
	library := initialize(t)
	expect := func(enabled, ready bool) {
		t.Helper()
		s, ret := library.SystemGetConfComputeState()
		want(t, "state", ret, nvml.SUCCESS)
		accepts, ret := library.SystemGetConfComputeGpusReadyState()
		want(t, "ready state", ret, nvml.SUCCESS)
		if on := s.CcFeature == nvml.CC_SYSTEM_FEATURE_ENABLED; on != enabled {
			t.Errorf("confidential computing is on: %v, want %v", on, enabled)
		}
		if is := accepts == nvml.CC_ACCEPTING_CLIENT_REQUESTS_TRUE; is != ready {
			t.Errorf("the GPUs are ready: %v, want %v", is, ready)
		}
	}
	expect(false, false)
	w.must(w.state.SetConfCompute(state.ConfComputeNotReady))
	expect(true, false)
	w.must(w.state.SetConfCompute(state.ConfComputeReady))
	expect(true, true)
}

// On a node without nvidia-modprobe the library creates no capability device nodes, and removes
// none that another program created.
func TestNodeWithoutCapabilityNodes(t *testing.T) {
	s := newSite(t, "awkward", layout.Host, "")
	s.change(func(_ *layout.Config, f *state.File) error {
		return errors.Join(f.SetBlock(state.CreateInUse, false), f.SetAttachCost(0))
	})
	s.fault(state.Fault{Kind: state.FaultKill}, "nvmlComputeInstanceDestroy")
	p := start(t, "cut", s.environment()...)
	for _, line := range []string{"mode 0 0", "instance 0", "compute 0"} {
		p.expect(line)
	}
	found, err := filepath.Glob(filepath.Join(s.deviceFolder(), "nvidia-caps/nvidia-cap*"))
	if err != nil || len(found) != 2 {
		t.Errorf("the device nodes are %v (%v), want only those of config and monitor", found, err)
	}
	p.died()
	files, err := filepath.Glob(filepath.Join(s.root, "proc/driver/nvidia/capabilities/gpu0/mig/gi*/access"))
	if err != nil || len(files) != 1 {
		t.Errorf("the capability files are %v (%v), want one", files, err)
	}
	if _, err := os.Stat(filepath.Join(s.deviceFolder(), "nvidia-uvm-tools")); err == nil {
		t.Error("nvidia-uvm-tools exists")
	}
}

func TestTopologySurvivesReset(t *testing.T) {
	for _, stays := range []bool{false, true} {
		t.Run(fmt.Sprint(stays), func(t *testing.T) {
			node := manyOf(t, "h100-sxm5-80gb", 1)
			node.TopologyStays = stays
			w := newWorld(t, node).onHost()
			library := initialize(t)
			device := devices(t, library)[0]
			setMode(t, device, nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS, nvml.SUCCESS)
			create(t, device, 9, 4, 4)
			want(t, "shutdown", library.Shutdown(), nvml.SUCCESS)
			w.must(w.state.Reset(0, false))
			mode, instances := nvml.DEVICE_MIG_DISABLE, 0
			if stays {
				mode, instances = nvml.DEVICE_MIG_ENABLE, 1
			}
			device = devices(t, initialize(t))[0]
			expectMode(t, device, mode, mode)
			if stays {
				there, ret := device.GetGpuInstances(&nvml.GpuInstanceProfileInfo{Id: 9, InstanceCount: 7})
				want(t, "list", ret, nvml.SUCCESS)
				if len(there) != instances {
					t.Errorf("%d instances, want %d", len(there), instances)
				}
			}
		})
	}
}

// nvml.h: without the privilege a process gets only the events of the whole GPU. The privilege is
// access to the capability of the instance, or to one that covers all instances.
func TestEventsOfInstancesNeedPrivilege(t *testing.T) {
	w := newWorld(t, manyOf(t, "h100-sxm5-80gb", 1))
	w.give("nvidia-caps/nvidia-cap2")
	library := initialize(t)
	device := devices(t, library)[0]
	setMode(t, device, nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS, nvml.SUCCESS)
	create(t, device, 9, 4, 4)
	for _, privileged := range []bool{true, false} {
		if !privileged {
			w.take("nvidia-caps/nvidia-cap2")
		}
		set := listen(t, library, device, nvml.EventTypeXidCriticalError)
		w.must(w.state.XIDOn(0, 2, 0, 94))
		w.must(w.state.XID(0, 79))
		data, ret := set.Wait(1000)
		want(t, "wait", ret, nvml.SUCCESS)
		if privileged != (data.EventData == 94) {
			t.Errorf("privileged: %v: the first event is XID %d", privileged, data.EventData)
		}
	}
}
