package conformance

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"

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

// open-gpu-kernel-modules, nvidia-drm-drv.c: with the kernel module nvidia-drm each GPU has a card
// and a render node, whatever the module's parameter modeset. The kernel creates them in the
// machine's /dev, also for a driver container.
func TestDRMNodesOfEachGPU(t *testing.T) {
	for _, kind := range []layout.Kind{layout.Host, layout.Container} {
		t.Run(string(kind), func(t *testing.T) {
			s := newSite(t, "awkward", kind, "")
			for i, card := range s.options.Config.Node.GPUs {
				listed, err := filepath.Glob(filepath.Join(s.root, "sys/bus/pci/devices", card.PCI, "drm/*/dev"))
				if err != nil || len(listed) != 2 {
					t.Errorf("GPU %d has the DRM devices %v (%v), want a card and a render node", i, listed, err)
				}
				for _, file := range listed {
					node := filepath.Join(s.dev, "dri", filepath.Base(filepath.Dir(file)))
					if _, err := os.Stat(node); err != nil {
						t.Error(err)
					}
				}
				for _, what := range []string{"card", "render"} {
					link := filepath.Join(s.dev, "dri/by-path", "pci-"+card.PCI+"-"+what)
					if _, err := os.Stat(link); err != nil {
						t.Error(err)
					}
				}
			}
			s.change(func(c *layout.Config, f *state.File) error { return c.DriverAway(f, false, false) })
			if _, err := os.Lstat(filepath.Join(s.dev, "dri")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("without the driver there are DRM device nodes: %v", err)
			}
		})
	}
}

// The validator of NVIDIA's GPU operator: the host's /dev may have some of a driver container's
// device nodes. The library uses all GPUs, because run by root it makes the missing nodes.
func TestHostHasSomeDeviceNodesOfDriverContainer(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: mounts")
	}
	s := newSite(t, "awkward", layout.Container, "")
	expectNodes := func(want ...string) {
		t.Helper()
		nodes, err := filepath.Glob(filepath.Join(s.dev, "nvidia*"))
		for i := range nodes {
			nodes[i] = filepath.Base(nodes[i])
		}
		if err != nil || !slices.Equal(nodes, want) {
			t.Errorf("the host has %v (%v), want %v", nodes, err, want)
		}
	}
	expectNodes("nvidia0", "nvidiactl")
	s.change(func(_ *layout.Config, f *state.File) error { return f.SetAttachCost(0) })
	const script = `mount --bind "$1" /dev; exec "$2"`
	command := exec.Command("unshare", "-m", "sh", "-ec", script, "sh", s.dev, os.Args[0]) //nolint:gosec // our own
	command.Env = append(os.Environ(), append(s.environment(), roleVariable+"=count")...)
	if out, err := command.CombinedOutput(); err != nil || string(out) != "8\n" {
		t.Errorf("with the host's /dev NVML lists %q (%v), want 8 GPUs", out, err)
	}
	s.change(func(c *layout.Config, f *state.File) error { return c.DriverAway(f, false, false) })
	expectNodes()
}

// siderolabs/extensions#940: some hosts have ldconfig elsewhere, or not at all.
func TestNodeWithoutLdconfig(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: mounts")
	}
	s := newSite(t, "awkward", layout.Host, "")
	s.options.Config.MountRoot = true
	works := func(path string) bool { return exec.Command(path, "--version").Run() == nil }
	var before, hidden, moved, after bool
	inOwnThread(t, func() error {
		before = works("/sbin/ldconfig")
		_, err := layout.Up(s.options)
		hidden, moved = !works("/sbin/ldconfig"), works(filepath.Join(s.root, "bin/ldconfig"))
		err = errors.Join(err, layout.Down(s.root))
		after = works("/sbin/ldconfig")
		return err
	})
	if !before || !hidden || !moved || !after {
		t.Errorf("ldconfig works %v, is hidden %v, works elsewhere %v, works after the layout %v", before, hidden, moved, after)
	}
}

// inOwnThread runs do in a thread with its own mount namespace. The thread ends afterwards.
func inOwnThread(t *testing.T, do func() error) {
	t.Helper()
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked
		result <- func() error {
			if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
				return fmt.Errorf("unshare: %w", err)
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return fmt.Errorf("make the mounts private: %w", err)
			}
			return do()
		}()
	}()
	if err := <-result; err != nil {
		t.Fatal(err)
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
			library = initialize(t)
			device = devices(t, library)[0]
			expectMode(t, device, mode, mode)
			if stays {
				there, ret := device.GetGpuInstances(&nvml.GpuInstanceProfileInfo{Id: 9, InstanceCount: 7})
				want(t, "list", ret, nvml.SUCCESS)
				if len(there) != instances {
					t.Errorf("%d instances, want %d", len(there), instances)
				}
			}
			want(t, "shutdown", library.Shutdown(), nvml.SUCCESS)
			w.must(w.state.Boot(node))
			w.must(w.state.Load("", "", true))
			expectMode(t, devices(t, initialize(t))[0], nvml.DEVICE_MIG_DISABLE, nvml.DEVICE_MIG_DISABLE)
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

// open-gpu-kernel-modules, gpu_uuid.c: the UUID of a MIG device is a hash of the chip, the GPU
// instance and the physical syspipe, which depends on what else exists. Some versions may differ.
func TestMIGUUIDMayFollowSyspipe(t *testing.T) {
	for _, bySyspipe := range []bool{true, false} {
		t.Run(fmt.Sprint(bySyspipe), func(t *testing.T) {
			node := manyOf(t, "h100-sxm5-80gb", 1)
			node.UUIDBySyspipe = bySyspipe
			w := newWorld(t, node).onHost()
			device := devices(t, initialize(t))[0]
			setMode(t, device, nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS, nvml.SUCCESS)
			uuidAt := func(start uint32) string {
				instance := create(t, device, 19, start, 1)
				divide(t, instance, 0)
				info, ret := instance.GetInfo()
				want(t, "instance", ret, nvml.SUCCESS)
				return w.state.GPU(0).MIGUUID(info.Id, 0)
			}
			first, second := uuidAt(0), uuidAt(1)
			listed := migUUIDs(t, device)
			if !slices.Equal(listed, []string{first, second}) {
				t.Fatalf("NVML lists %v, want %s and %s", listed, first, second)
			}
			destroyAll(t, device)
			again, other := uuidAt(1), uuidAt(0)
			if again == other || first == second {
				t.Errorf("two MIG devices have the UUID %s", again)
			}
			if changed := again != second && other != first; changed != bySyspipe {
				t.Errorf("in another order the UUIDs %s, %s became %s, %s", first, second, other, again)
			}
		})
	}
}

// destroyAll destroys all instances of profile 19.
func destroyAll(t *testing.T, device nvml.Device) {
	t.Helper()
	all, ret := device.GetGpuInstances(&nvml.GpuInstanceProfileInfo{Id: 19, InstanceCount: 7})
	want(t, "instances", ret, nvml.SUCCESS)
	for _, instance := range all {
		compute, ret := instance.GetComputeInstances(&nvml.ComputeInstanceProfileInfo{Id: 0, InstanceCount: 7})
		want(t, "compute instances", ret, nvml.SUCCESS)
		for _, c := range compute {
			want(t, "destroy", c.Destroy(), nvml.SUCCESS)
		}
		want(t, "destroy", instance.Destroy(), nvml.SUCCESS)
	}
}

// open-gpu-kernel-modules, kmigmgr_ga100.c: the driver suspends its fabric probe with the first GPU
// instance and resumes it after the last. What NVML answers meanwhile is inferred.
func TestFabricMayFollowInstances(t *testing.T) {
	node := readNode(t, "awkward")
	node.CreateInUse, node.ClientBlocksMode = false, false
	w := newWorld(t, node).onHost()
	w.must(w.state.SetFabricSettle(time.Minute))
	device := devices(t, initialize(t))[0]
	expect := func(when string, state uint8) {
		t.Helper()
		info, ret := device.GetGpuFabricInfo()
		want(t, "fabric", ret, nvml.SUCCESS)
		if info.State != state {
			t.Errorf("%s the fabric state is %d, want %d", when, info.State, state)
		}
	}
	setMode(t, device, nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS, nvml.SUCCESS)
	expect("without instances", nvml.GPU_FABRIC_STATE_COMPLETED)
	first, second := create(t, device, 19, 0, 1), create(t, device, 19, 1, 1)
	expect("with instances", nvml.GPU_FABRIC_STATE_NOT_STARTED)
	want(t, "destroy", first.Destroy(), nvml.SUCCESS)
	expect("with an instance", nvml.GPU_FABRIC_STATE_NOT_STARTED)
	want(t, "destroy", second.Destroy(), nvml.SUCCESS)
	expect("after the last instance", nvml.GPU_FABRIC_STATE_IN_PROGRESS)
	w.must(w.state.SetFabric(0, nvml.GPU_FABRIC_STATE_COMPLETED, 0))
	setMode(t, device, nvml.DEVICE_MIG_DISABLE, nvml.SUCCESS, nvml.SUCCESS)
	expect("after MIG mode", nvml.GPU_FABRIC_STATE_COMPLETED)
}

// nvml.h does not promise that a wait lasts as long as its timeout. It must not be endless work
// either, and loses no event.
func TestWaitForEventsMayEndEarly(t *testing.T) {
	for _, early := range []bool{true, false} {
		t.Run(fmt.Sprint(early), func(t *testing.T) {
			node := manyOf(t, "h100-sxm5-80gb", 1)
			node.EarlyWait = early
			w := newWorld(t, node)
			library := initialize(t)
			set := listen(t, library, devices(t, library)[0], nvml.EventTypeXidCriticalError)
			start := time.Now()
			_, ret := set.Wait(1000)
			want(t, "wait", ret, nvml.ERROR_TIMEOUT)
			if took := time.Since(start); (took < time.Second) != early || took < 100*time.Millisecond {
				t.Errorf("early %v: the wait took %s", early, took)
			}
			w.must(w.state.XID(0, 999)) // nvml.h: the number of an XID that NVML does not know
			data, ret := set.Wait(1000)
			want(t, "wait", ret, nvml.SUCCESS)
			if data.EventData != 999 {
				t.Errorf("XID %d, want 999", data.EventData)
			}
		})
	}
}

// dcgm-exporter#604 and the driver's log: a lost GPU may answer UNKNOWN, or let every call run into
// a timeout and report XID 119 each time.
func TestLostGPUAnswersInSeveralWays(t *testing.T) {
	const timeout = 200 * time.Millisecond
	for answer, wanted := range map[state.LostAnswer]struct {
		ret nvml.Return
		xid uint64
	}{
		state.LostGone:    {nvml.ERROR_GPU_IS_LOST, 79},
		state.LostUnknown: {nvml.ERROR_UNKNOWN, 79},
		state.LostSilent:  {nvml.ERROR_UNKNOWN, 119},
	} {
		t.Run(fmt.Sprint(answer), func(t *testing.T) {
			w := newWorld(t, manyOf(t, "h100-sxm5-80gb", 2))
			w.must(w.state.SetGSPTimeout(timeout))
			library := initialize(t)
			all := devices(t, library)
			set := listen(t, library, all[0], nvml.EventTypeXidCriticalError)
			w.must(w.state.LoseAs(0, answer))
			start := time.Now()
			_, ret := all[0].GetPersistenceMode()
			want(t, "a call", ret, wanted.ret)
			if waited := time.Since(start) >= timeout; waited != (answer == state.LostSilent) {
				t.Errorf("answer %d took %s", answer, time.Since(start))
			}
			data, ret := set.Wait(1000)
			want(t, "wait", ret, nvml.SUCCESS)
			if data.EventData != wanted.xid {
				t.Errorf("answer %d: XID %d, want %d", answer, data.EventData, wanted.xid)
			}
			_, ret = all[1].GetPersistenceMode()
			want(t, "another GPU", ret, nvml.SUCCESS)
			w.must(w.state.Restore(0))
			_, ret = all[0].GetPersistenceMode()
			want(t, "the GPU again", ret, nvml.SUCCESS)
		})
	}
}
