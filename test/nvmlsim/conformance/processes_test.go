package conformance

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// Tests with several processes start this test binary again. An environment variable tells the new
// process which role to play.
const (
	roleVariable    = "NVMLSIM_TEST_ROLE"
	libraryVariable = "NVMLSIM_TEST_LIBRARY"
)

// play runs the role of a child process and returns its exit code. It prints its progress on
// standard output.
func play(role string) int {
	runtime.LockOSThread()
	if role == "die-writing" {
		return dieWriting()
	}
	role, without := strings.CutSuffix(role, "-without-rights")
	if without { // root without capabilities, so that file modes apply
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var none [2]unix.CapUserData
		if err := unix.Capset(&header, &none[0]); err != nil {
			fmt.Println("capset", err)
			return 1
		}
	}
	library := nvml.New(nvml.WithLibraryPath(os.Getenv(libraryVariable)))
	if ret := library.Init(); ret != nvml.SUCCESS {
		fmt.Println("init", int(ret))
		return 1
	}
	device, ret := library.DeviceGetHandleByIndex(gpuOfRole())
	if ret != nvml.SUCCESS {
		fmt.Println("handle", int(ret))
		return 1
	}
	switch role {
	case "hold": // initialises NVML, opens a GPU and waits until killed
		fmt.Println("ready")
		select {}
	case "write": // makes one change after the other until killed
		fmt.Println("ready")
		for mode := nvml.FEATURE_DISABLED; ; mode = 1 - mode {
			_ = device.SetPersistenceMode(mode)
		}
	case "wait": // waits for one event
		set, _ := library.EventSetCreate()
		_ = device.RegisterEvents(nvml.EventTypeXidCriticalError, set)
		fmt.Println("ready")
		event, ret := set.Wait(10000)
		fmt.Println("event", int(ret), event.EventData)
	case "version":
		version, ret := library.SystemGetDriverVersion()
		fmt.Println("version", int(ret), version)
	case "cut": // enables MIG mode, creates and destroys MIG instances, and prints each result
		cut(device)
	case "mig": // prints the UUIDs of the MIG devices
		count, _ := device.GetMaxMigDeviceCount()
		for i := range count {
			mig, ret := device.GetMigDeviceHandleByIndex(i)
			if ret != nvml.SUCCESS {
				continue
			}
			uuid, _ := mig.GetUUID()
			fmt.Println(uuid)
		}
		fmt.Println("all")
	case "subscribe": // gets a handle of each GPU instance and compute instance, and waits until killed
		fmt.Println("subscribed", subscribe(device))
		select {}
	case "count": // prints the number of GPUs
		count, _ := library.DeviceGetCount()
		fmt.Println(count)
	case "set": // makes a change and prints the result
		fmt.Println("set", int(device.SetComputeMode(nvml.COMPUTEMODE_EXCLUSIVE_PROCESS)))
	}
	return 0
}

// gpuVariable names the index of the GPU that a child process uses. By default it is the first GPU.
const gpuVariable = "NVMLSIM_TEST_GPU"

func gpuOfRole() int {
	index, err := strconv.Atoi(os.Getenv(gpuVariable))
	if err != nil {
		return 0
	}
	return index
}

func cut(device nvml.Device) {
	activation, ret := device.SetMigMode(nvml.DEVICE_MIG_ENABLE)
	fmt.Println("mode", int(ret), int(activation))
	instance, ret := device.CreateGpuInstanceWithPlacement(&nvml.GpuInstanceProfileInfo{Id: 9}, &nvml.GpuInstancePlacement{Start: 4, Size: 4})
	fmt.Println("instance", int(ret))
	if ret != nvml.SUCCESS {
		return
	}
	compute, ret := instance.CreateComputeInstance(&nvml.ComputeInstanceProfileInfo{Id: 2})
	fmt.Println("compute", int(ret))
	if ret != nvml.SUCCESS {
		return
	}
	fmt.Println("destroy", int(compute.Destroy()), int(instance.Destroy()))
}

// subscribe gets handles of all GPU instances and compute instances, and returns how many there
// are.
func subscribe(device nvml.Device) (count int) {
	for gi := range 15 {
		instance, ret := device.GetGpuInstanceById(gi)
		if ret != nvml.SUCCESS {
			continue
		}
		count++
		for ci := range 8 {
			if _, ret := instance.GetComputeInstanceById(ci); ret == nvml.SUCCESS {
				count++
			}
		}
	}
	return count
}

// dieWriting locks the state file as a process that changes it does, marks the change as begun, and
// then waits until the test kills this process.
func dieWriting() int {
	path := os.Getenv("NVMLSIM_STATE")
	f, err := state.Open(path)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	lock := syscall.Flock_t{Type: syscall.F_WRLCK, Len: 1}
	if err := syscall.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &lock); err != nil {
		fmt.Println(err)
		return 1
	}
	f.Header().Generation |= 1
	fmt.Println("locked")
	select {}
}

// process is a child process that a test started. It runs one of the roles of play.
type process struct {
	t       *testing.T
	command *exec.Cmd
	lines   *bufio.Scanner
}

func start(t *testing.T, role string, environment ...string) *process {
	t.Helper()
	return startWith(t, nil, role, environment...)
}

// startInGroup starts a child process in the process group with this ID. 0 creates a new group.
func startInGroup(t *testing.T, role string, group int) *process {
	t.Helper()
	return startWith(t, &syscall.SysProcAttr{Setpgid: true, Pgid: group}, role)
}

func startWith(t *testing.T, attributes *syscall.SysProcAttr, role string, environment ...string) *process {
	t.Helper()
	command := exec.Command(os.Args[0])
	command.SysProcAttr = attributes
	command.Env = append(os.Environ(), roleVariable+"="+role, libraryVariable+"="+simulated)
	command.Env = append(command.Env, environment...)
	command.Stderr = os.Stderr
	out, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, command: command, lines: bufio.NewScanner(out)}
	t.Cleanup(p.kill)
	return p
}

// kill sends SIGKILL to the process and waits until it is gone.
func (p *process) kill() {
	_ = p.command.Process.Signal(syscall.SIGKILL)
	_ = p.command.Wait()
}

// end waits until the process has ended by itself. It fails the test if the process prints another
// line.
func (p *process) end() {
	p.t.Helper()
	if p.lines.Scan() {
		p.t.Fatalf("the process says more: %q", p.lines.Text())
	}
	if err := p.command.Wait(); err != nil {
		p.t.Fatal(err)
	}
}

// says returns the process's next line of output.
func (p *process) says() string {
	p.t.Helper()
	if !p.lines.Scan() {
		p.t.Fatalf("the process ended: %v", p.lines.Err())
	}
	return p.lines.Text()
}

func (p *process) expect(line string) {
	p.t.Helper()
	if got := p.says(); got != line {
		p.t.Fatalf("the process says %q, want %q", got, line)
	}
}

func TestEventReachesAnotherProcess(t *testing.T) {
	w := newWorld(t, readNode(t, "l40s-x2"))
	p := start(t, "wait")
	p.expect("ready")
	w.must(w.state.XID(0, 48))
	p.expect("event 0 48")
}

func TestChangeIsVisibleToAnotherProcess(t *testing.T) {
	newWorld(t, readNode(t, "l40s-x2"))
	device := devices(t, initialize(t))[0]
	start(t, "set").expect("set 0")
	mode, ret := device.GetComputeMode()
	want(t, "compute mode", ret, nvml.SUCCESS)
	if mode != nvml.COMPUTEMODE_EXCLUSIVE_PROCESS {
		t.Errorf("compute mode %d, want exclusive process", mode)
	}
}

// After a process is killed while it writes and has the driver's lock, other processes must still
// be able to use the state.
func TestKilledProcessLeavesNoLock(t *testing.T) {
	w := newWorld(t, readNode(t, "l40s-x2"))
	for range 20 {
		p := start(t, "write")
		p.expect("ready")
		p.kill()
		w.must(w.state.SetRecovery(0, 0))
		if generation := w.state.Header().Generation; generation%2 != 0 {
			t.Fatalf("generation %d: odd without a writer", generation)
		}
	}
	p := start(t, "hold")
	p.expect("ready")
	if !w.state.InUse() {
		t.Error("a process holds the driver, and the state does not say so")
	}
	p.kill()
	if w.state.InUse() {
		t.Error("the holder is dead, and the state says in use")
	}
	w.must(w.state.Unload(false))
}

// A writer that is killed in the middle of a change leaves an odd generation number. The next
// writer must still get the lock and repair the number.
func TestLockPassesOnAfterKill(t *testing.T) {
	w := newWorld(t, readNode(t, "l40s-x2"))
	device := devices(t, initialize(t))[0]
	p := start(t, "die-writing")
	p.expect("locked")
	done := make(chan nvml.Return)
	go func() { done <- device.SetPersistenceMode(nvml.FEATURE_DISABLED) }()
	p.kill()
	want(t, "the next writer", <-done, nvml.SUCCESS)
	if generation := w.state.Header().Generation; generation%2 != 0 {
		t.Errorf("generation %d is odd after the change", generation)
	}
}

// In a container the state file is read-only. There every read must work, and every change must
// fail.
func TestReadOnlyStateRefusesChanges(t *testing.T) {
	w := newWorld(t, readNode(t, "l40s-x2"))
	w.must(os.Chmod(w.state.Path(), 0o444))
	start(t, "set-without-rights").expect(fmt.Sprintf("set %d", nvml.ERROR_NO_PERMISSION))
}
