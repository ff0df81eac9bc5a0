// Writes hang while a process has the GPU open, and when a fault is ordered.

package sysfs

import (
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// hold opens a GPU, as a process that uses it does.
func (m *machine) hold(gpu int) *state.File {
	m.Helper()
	holder, err := state.Open(m.state.Path())
	if err != nil {
		m.Fatal(err)
	}
	if err := holder.Attach(gpu); err != nil {
		m.Fatal(err)
	}
	return holder
}

func TestUnbindHangsWhileAProcessHasTheGPUOpen(t *testing.T) {
	m := boot(t, "vfio-awkward", nil)
	holder := m.hold(0)
	w := m.start(gpu0, "bus/pci/drivers/nvidia/unbind")
	m.eventually("the links are gone", func() bool { return m.driver(gpu0) == "" })
	if !m.state.GPU(0).Attached() {
		t.Error("NVML no longer lists the GPU: drivers before 595.44.02 keep it until its users have ended")
	}
	if err := w.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	m.eventually("the killed writer is in state D", func() bool { return w.status() == "D" })

	// Nothing that takes the function's lock ends, and other functions are not affected.
	reader := m.startReader(m.device(gpu0, "driver_override"))
	second := m.start("vfio-pci", "bus/pci/devices", gpu0, "driver_override")
	m.probe(gpu0) // the driver is still there, so it succeeds at once
	m.hand(gpu1, "nvidia", "vfio-pci")
	m.has(gpu1, "vfio-pci")
	select {
	case <-reader:
		t.Error("driver_override can be read during the hung unbind")
	case err := <-second.done:
		t.Errorf("driver_override can be written during the hung unbind: %v", err)
	case err := <-w.done:
		t.Errorf("the killed writer ended: %v", err)
	case <-time.After(300 * time.Millisecond):
	}

	if err := holder.Close(); err != nil {
		t.Fatal(err)
	}
	_ = w.ended()
	_ = second.ended()
	<-reader
	m.reads("vfio-pci\n", "bus/pci/devices", gpu0, "driver_override")
	m.probe(gpu0)
	m.has(gpu0, "vfio-pci")
}

// Drivers from 595.44.02 on take the GPU from their list before they wait for its users.
func TestNewDriversUnlistTheGPUBeforeTheyWait(t *testing.T) {
	m := boot(t, "vfio-awkward", func(o *layout.Options) { o.DriverVersion = "595.45.04" })
	holder := m.hold(0)
	w := m.start(gpu0, "bus/pci/drivers/nvidia/unbind")
	m.eventually("the links are gone", func() bool { return m.driver(gpu0) == "" })
	if m.state.GPU(0).Attached() {
		t.Error("NVML still lists the GPU")
	}
	if err := holder.Close(); err != nil {
		t.Fatal(err)
	}
	_ = w.ended()
}

// With modeset=1 nvidia_drm has every GPU open itself, so no process can be ended to end the wait.
func TestModesetKeepsTheGPUOnOldDrivers(t *testing.T) {
	for version, hangs := range map[string]bool{"580.95.05": true, "580.105.08": false, "595.45.04": false} {
		t.Run(version, func(t *testing.T) {
			m := boot(t, "vfio-awkward", func(o *layout.Options) {
				o.DriverVersion, o.Config.Node.DRMNodes, o.Config.Node.DRMModeset = version, true, true
			})
			m.reads("Y\n", "module/nvidia_drm/parameters/modeset")
			m.reads(version+"\n", "module/nvidia/version")
			w := m.start(gpu0, "bus/pci/drivers/nvidia/unbind")
			m.eventually("the links are gone", func() bool { return m.driver(gpu0) == "" })
			if !hangs {
				_ = w.ended()
				return
			}
			select {
			case err := <-w.done:
				t.Errorf("the unbind ended: %v", err)
			case <-time.After(200 * time.Millisecond):
			}
		})
	}
}

func TestUnbindWaitsForUsersOfTheDRMDevices(t *testing.T) {
	m := boot(t, "vfio-awkward", func(o *layout.Options) { o.Config.Node.DRMNodes = true })
	user, err := unix.Open(filepath.Join(m.dev, "dri/renderD160"), unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	w := m.start(gpu0, "bus/pci/drivers/nvidia/unbind")
	select {
	case err := <-w.done:
		t.Errorf("unbind ended while a process has the render node open: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	if err := unix.Close(user); err != nil {
		t.Fatal(err)
	}
	if err := <-w.done; err != nil {
		t.Errorf("unbind: %v: %s", err, &w.output)
	}
}

func TestEndOfTheMountEndsHungWrites(t *testing.T) {
	m := boot(t, "h100-passthrough", nil)
	const gpu = "0000:1b:00.0"
	holder := m.hold(0)
	defer func() { _ = holder.Close() }()
	w := m.start(gpu, "bus/pci/drivers/nvidia/unbind")
	m.eventually("the links are gone", func() bool { return m.driver(gpu) == "" })
	root := filepath.Dir(m.config.SysPath())
	if err := layout.Down(root); err != nil {
		t.Fatal(err)
	}
	if err := w.ended(); err == nil {
		t.Error("the hung write succeeded")
	}
	m.server.Wait()
	if left, _ := filepath.Glob(filepath.Join(root, "*")); len(left) > 0 {
		t.Errorf("files of the node: %v", left)
	}
	if left, _ := filepath.Glob(filepath.Join(m.dev, "*")); len(left) > 0 {
		t.Errorf("device nodes: %v", left)
	}
}

func TestUnbindOfVFIOWaitsForTheVirtualMachine(t *testing.T) {
	m := boot(t, "vfio-awkward", func(o *layout.Options) { o.Config.Node.VFIO.NodeDelay.Duration = 0 })
	m.hand(gpu0, "nvidia", "vfio-pci")
	machine, err := unix.Open(filepath.Join(m.dev, "vfio/40"), unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	w := m.start(gpu0, "bus/pci/drivers/vfio-pci/unbind")
	select {
	case err := <-w.done:
		t.Errorf("unbind ended while a process has the group open: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	if err := unix.Close(machine); err != nil {
		t.Fatal(err)
	}
	if err := <-w.done; err != nil {
		t.Errorf("unbind: %v: %s", err, &w.output)
	}
}

func TestFaultsOfEveryWrite(t *testing.T) {
	m := boot(t, "vfio-awkward", nil)
	for _, write := range []struct {
		name, text string
		file       []string
		prepare    func()
		done       func() bool
	}{
		{state.SysfsOverride, "vfio-pci", []string{"bus/pci/devices", gpu0, "driver_override"},
			func() { m.override(gpu0, "") }, func() bool { return m.read("bus/pci/devices", gpu0, "driver_override") == "vfio-pci\n" }},
		{state.SysfsUnbind, gpu0, []string{"bus/pci/drivers/nvidia/unbind"},
			func() { m.override(gpu0, ""); m.probe(gpu0) }, func() bool { return m.driver(gpu0) == "" }},
		{state.SysfsProbe, gpu0, []string{"bus/pci/drivers_probe"},
			func() { m.rest(gpu0) }, func() bool { return m.driver(gpu0) == "nvidia" }},
		{state.SysfsBind, gpu0, []string{"bus/pci/drivers/nvidia/bind"},
			func() { m.rest(gpu0) }, func() bool { return m.driver(gpu0) == "nvidia" }},
	} {
		t.Run(write.name, func(t *testing.T) {
			for _, fault := range []struct {
				name           string
				fault          state.Fault
				effect, killed bool
			}{
				{"error", state.Fault{Kind: state.FaultFail, Error: uint32(syscall.EIO)}, false, false},
				{"ignored", state.Fault{Kind: state.FaultIgnore}, false, false},
				{"killed before", state.Fault{Kind: state.FaultKill}, false, true},
				{"killed after", state.Fault{Kind: state.FaultKill, After: 1}, true, true},
				{"error after", state.Fault{Kind: state.FaultFail, Error: uint32(syscall.EIO), After: 1}, true, false},
			} {
				write.prepare()
				fault.fault.GPU = state.AnyGPU
				if err := m.state.AddFault(fault.fault, write.name+"@"+gpu0, 1); err != nil {
					t.Fatal(err)
				}
				w := m.start(write.text, write.file...)
				err := <-w.done
				status, _ := w.ProcessState.Sys().(syscall.WaitStatus)
				if write.done() != fault.effect || (status.Signal() == syscall.SIGKILL) != fault.killed || (err == nil) != (fault.name == "ignored") {
					t.Errorf("%s: effect %v, ended with %v", fault.name, write.done(), err)
				}
				if err := m.state.ClearFaults(); err != nil {
					t.Fatal(err)
				}
			}
			m.hangs(t, write.name, write.text, write.file, write.prepare, write.done)
		})
	}
}

// rest leaves the GPU without driver and override.
func (m *machine) rest(address string) {
	m.Helper()
	m.override(address, "")
	if driver := m.driver(address); driver != "" {
		m.unbind(address, driver)
	}
}

func (m *machine) hangs(t *testing.T, name, text string, file []string, prepare func(), done func() bool) {
	t.Helper()
	prepare()
	if err := m.state.AddFault(state.Fault{Kind: state.FaultSlow, DelayMS: 3600_000, GPU: 0}, name, 1); err != nil {
		t.Fatal(err)
	}
	w := m.start(text, file...)
	m.eventually("the write hangs", func() bool { return m.state.Fault(0).Hits == 1 })
	if err := w.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	m.eventually("the killed writer is in state D", func() bool { return w.status() == "D" })
	if err := m.state.ClearFaults(); err != nil {
		t.Fatal(err)
	}
	_ = w.ended()
	m.eventually("the write has its effect", done)
}
