package conformance

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// migUUIDs returns the UUIDs of a GPU's MIG devices, ordered by instance IDs.
func (s *service) migUUIDs(gpu int) []string {
	var all []string
	s.change(func(_ *layout.Config, f *state.File) error {
		g := f.GPU(gpu)
		for _, instance := range g.GPUInstances() {
			for _, compute := range g.OfInstance(instance.ID) {
				all = append(all, g.MIGUUID(instance.ID, compute.ID))
			}
		}
		return nil
	})
	return all
}

// An MPS daemon on a MIG device must serve that MIG device. Given several MIG devices, it must
// serve only the first, because a CUDA process gets only one.
func TestMPSOnMIGDevices(t *testing.T) {
	s := newService(t, "static-mig", layout.Host)
	uuids := s.migUUIDs(0)
	if len(uuids) < 3 {
		t.Fatalf("MIG devices %v", uuids)
	}
	s.startDaemon(uuids[2] + "," + uuids[0])
	p := s.compute(0, []string{"--hold"})
	got := p.attached()
	if got.Mode != "mps" || len(got.Devices) != 1 || got.Devices[0].UUID != uuids[2] || got.Devices[0].MemoryMiB > 30000 {
		t.Errorf("attached: %+v, want %s", got, uuids[2])
	}
	alone := s.compute(0, []string{"--hold"}, "CUDA_MPS_PIPE_DIRECTORY="+s.pipes+"-none", "CUDA_VISIBLE_DEVICES="+uuids[0])
	if got := alone.attached(); got.Mode != "direct" || len(got.Devices) != 1 || got.Devices[0].UUID != uuids[0] {
		t.Errorf("attached: %+v, want %s", got, uuids[0])
	}
}

// While a process computes on a compute instance, the compute instance must not be destroyed and
// the GPU must not be reset. After the process is killed, both must work.
func TestInstanceWithComputingProcessIsInUse(t *testing.T) {
	s := newService(t, "static-mig", layout.Host)
	t.Setenv("NVMLSIM_STATE", layout.StatePath(s.root))
	t.Setenv("NVMLSIM_DEV", s.dev)
	uuids := s.migUUIDs(0)
	p := s.compute(0, []string{"--hold"}, "CUDA_MPS_PIPE_DIRECTORY="+s.pipes, "CUDA_VISIBLE_DEVICES="+uuids[2])
	p.attached()
	device := devices(t, initialize(t))[0]
	destroy := func(gi int) nvml.Return {
		t.Helper()
		instance, ret := device.GetGpuInstanceById(gi)
		want(t, "GPU instance", ret, nvml.SUCCESS)
		compute, ret := instance.GetComputeInstanceById(0)
		want(t, "compute instance", ret, nvml.SUCCESS)
		return compute.Destroy()
	}
	reset := func() (err error) {
		s.change(func(_ *layout.Config, f *state.File) error { err = f.Reset(0, false); return nil })
		return err
	}
	want(t, "destroy the one that is computed on", destroy(5), nvml.ERROR_IN_USE)
	want(t, "destroy another", destroy(1), nvml.SUCCESS)
	if err := reset(); !errors.Is(err, state.ErrBusy) {
		t.Errorf("reset: %v, want ErrBusy", err)
	}
	p.kill()
	want(t, "destroy it when the process is gone", destroy(5), nvml.SUCCESS)
	if err := reset(); err != nil {
		t.Error(err)
	}
}

// The MPS server must fail to start unless all of its devices exist and can be opened.
func TestServerNeedsAllItsDevices(t *testing.T) {
	for name, spoil := range map[string]func(*service) string{
		"a GPU that does not exist": func(*service) string { return "GPU-00000000-1111-2222-3333-444444444444" },
		"a GPU whose node is missing": func(s *service) string {
			if err := os.Remove(filepath.Join(s.dev, "nvidia1")); err != nil {
				s.t.Fatal(err)
			}
			return s.uuid(1)
		},
		"a GPU that is lost": func(s *service) string {
			s.change(func(_ *layout.Config, f *state.File) error { return f.Lose(1) })
			return s.uuid(1)
		},
		"no unified memory device": func(s *service) string {
			if err := os.Remove(filepath.Join(s.dev, "nvidia-uvm")); err != nil {
				s.t.Fatal(err)
			}
			return s.uuid(1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newService(t, "l40s-x2", layout.Host)
			devices := spoil(s)
			s.startDaemon(devices)
			s.expect("", "start_server -uid 0", "get_server_list")
			if log, err := os.ReadFile(filepath.Join(s.logs, "control.log")); err != nil || !strings.Contains(string(log), "CUDA_ERROR_") {
				t.Errorf("control.log does not say why there is no server: %s (%v)", log, err)
			}
			if out, _ := s.command("nvmlsim-cuda", nil).Output(); !strings.Contains(string(out), `"failed"`) {
				t.Errorf("a client: %s", out)
			}
		})
	}
}

// A container has a read-only state file and only the injected programs and device nodes. Even
// there compute modes must apply, and a client must find its MPS daemon.
func TestClientInContainer(t *testing.T) {
	needRoot(t)
	if _, err := exec.LookPath("unshare"); err != nil {
		t.Skip("no unshare here")
	}
	s := newService(t, "l40s-x2", layout.Host)
	root := t.TempDir()
	firmware := "lib/firmware/nvidia/580.95.05"
	for _, folder := range []string{"usr/bin", "dev/shm", "tmp/nvidia-mps", firmware} {
		if err := os.MkdirAll(filepath.Join(root, folder), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{"usr/bin/nvidia-cuda-mps-control", firmware + "/gsp_nvmlsim.bin", "dev/nvidiactl", "dev/nvidia-uvm",
		"dev/nvidia1"} {
		if err := os.WriteFile(filepath.Join(root, file), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	script := fmt.Sprintf(`set -e
bind() { mount --bind "$1" "%[1]s/$2"; }
bind %[2]s usr/bin/nvidia-cuda-mps-control
bind %[3]s %[4]s/gsp_nvmlsim.bin && mount -o remount,ro,bind %[1]s/%[4]s/gsp_nvmlsim.bin
for n in nvidiactl nvidia-uvm nvidia1; do bind %[5]s/$n dev/$n; done
bind /dev/shm dev/shm
[ ! -d %[6]s ] || bind %[6]s tmp/nvidia-mps
exec chroot %[1]s /usr/bin/nvidia-cuda-mps-control nvmlsim-cuda --fill`,
		root, s.program("nvidia-cuda-mps-control"), layout.StatePath(s.root), firmware, s.dev, s.pipes)
	inside := func() (mode, uuid, failure string) {
		t.Helper()
		command := exec.Command("unshare", "-m", "sh", "-c", script)
		command.Env = []string{"PATH=" + os.Getenv("PATH") + ":/usr/sbin:/sbin"}
		out, _ := command.CombinedOutput()
		for line := range strings.Lines(string(out)) {
			var l said
			if err := json.Unmarshal([]byte(line), &l); err != nil {
				t.Fatalf("%s", out)
			}
			switch l.Event {
			case "attached":
				mode, uuid = l.Mode, l.Devices[0].UUID
			case "failed":
				failure = l.Error
			}
		}
		return mode, uuid, failure
	}
	if mode, uuid, failure := inside(); mode != "direct" || uuid != s.uuid(1) {
		t.Errorf("without a daemon: %s %s %s", mode, uuid, failure)
	}
	s.setComputeMode(1, nvml.COMPUTEMODE_EXCLUSIVE_PROCESS)
	holder := s.compute(0, []string{"--hold"}, "CUDA_VISIBLE_DEVICES="+s.uuid(1))
	holder.attached()
	if _, _, failure := inside(); failure != "CUDA_ERROR_DEVICE_UNAVAILABLE" {
		t.Errorf("with another process on the exclusive GPU: %s", failure)
	}
	holder.kill()
	s.startDaemon(s.uuid(1), "-multiuser-server")
	if mode, uuid, failure := inside(); mode != "mps" || uuid != s.uuid(1) {
		t.Errorf("with a daemon: %s %s %s", mode, uuid, failure)
	}
}
