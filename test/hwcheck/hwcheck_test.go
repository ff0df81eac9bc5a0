package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/smi"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

const simulator = "../nvmlsim"

// built is the path of the folder that `make hwcheck` builds. It is empty until the first test
// builds the folder.
var built string

var folder = sync.OnceValues(func() (string, error) {
	var err error
	if built, err = os.MkdirTemp("", "hwcheck-folder-"); err != nil {
		return "", err
	}
	if out, err := exec.Command("../../hack/hwcheck.sh", built).CombinedOutput(); err != nil { //nolint:gosec // our own script
		return "", fmt.Errorf("build the folder: %w\n%s", err, out)
	}
	return built, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if built != "" {
		_ = os.RemoveAll(built)
	}
	os.Exit(code)
}

// machine is a simulated machine with GPUs. The tests run hwcheck from the built folder in a mount
// namespace in which that machine's driver is installed.
type machine struct {
	t      *testing.T
	folder string
	root   string // folder of the simulated machine
	temp   string // folder for hwcheck's temporary files
	scans  string // the value of --scans
	setup  []string
}

// newMachine creates the simulated machine of the node file node. Its driver root is mounted at
// /usr/local/nvidia, in the mount namespace only. change may change the layout's options.
func newMachine(t *testing.T, node string, kind layout.Kind, change func(*layout.Options)) *machine {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes, mounts, containers")
	}
	program, err := smi.Fetch(t.Context(), smi.DefaultSuite)
	if errors.Is(err, smi.ErrUnavailable) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{t: t, root: t.TempDir(), temp: t.TempDir(), scans: "3"}
	// The root user of a user namespace must reach the containers' files.
	if err := os.Chmod(filepath.Dir(m.temp), 0o755); err != nil { //nolint:gosec // as /tmp
		t.Fatal(err)
	}
	if m.folder, err = folder(); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("make", "-s", "-C", simulator, "library").CombinedOutput(); err != nil {
		t.Fatalf("build the simulated library: %v\n%s", err, out)
	}
	models, err := model.ReadGPUs(filepath.Join(simulator, "models"))
	if err != nil {
		t.Fatal(err)
	}
	described, err := model.ReadNode(filepath.Join(simulator, "nodes", node+".yaml"), t.Name())
	if err != nil {
		t.Fatal(err)
	}
	described.AttachCost.Duration = min(described.AttachCost.Duration, 100*time.Millisecond)
	config := layout.Config{Kind: kind, Node: described}
	if kind != layout.Container || described.HostNodesInPart {
		config.Dev = t.TempDir()
	}
	o := layout.Options{
		Root: m.root, Models: models, Seed: t.Name(), Config: config,
		Sources: layout.Sources{Library: "../../build/nvmlsim/libnvidia-ml.so.1", SMI: program},
	}
	if change != nil {
		change(&o)
	}
	if _, err := layout.Up(o); err != nil {
		t.Fatal(err)
	}
	m.setup = []string{
		"mount -t tmpfs tmpfs /usr/local", // this also hides Go
		"mkdir /usr/local/nvidia",
		"mount --bind " + filepath.Join(m.root, "driver") + " /usr/local/nvidia",
	}
	if config.Dev != "" {
		// Give the namespace a /dev of its own, with the simulated GPUs' device nodes.
		m.setup = append(m.setup, "mkdir /usr/local/dev",
			"cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty "+config.Dev+"/. /usr/local/dev",
			"mount --bind /usr/local/dev /dev")
	}
	return m
}

// in returns the flags that make hwcheck read the sysfs and procfs of the simulated machine m.
func (m *machine) in() []string {
	return []string{"--sysfs-root", filepath.Join(m.root, "sys"), "--proc-root", filepath.Join(m.root, "proc")}
}

// result is what a run of hwcheck returned and wrote.
type result struct {
	code        int
	out, errOut string
	facts       facts.Report
	report      string
}

// command returns the command that runs hwcheck as a user would, without Go: with a minimal
// environment, and in the folder kept.
func (m *machine) command(kept string, argv ...string) *exec.Cmd {
	argv = append(argv, "--out", filepath.Join(kept, "report"), "--scans", m.scans)
	script := "set -e\n" + strings.Join(m.setup, "\n") + "\ncd \"$1\"; shift\n" +
		"exec /usr/bin/env -i PATH=/nonexistent TMPDIR=" + m.temp + " \"$@\"\n"
	cmd := exec.Command("/bin/sh", append([]string{"-c", script, "sh", kept}, argv...)...) //nolint:gosec // our own
	// Mounts in a namespace that Go creates are private, so the script's mounts do not appear on the
	// host.
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
	return cmd
}

// check runs hwcheck to its end and returns what it wrote.
func (m *machine) check(argv ...string) result {
	m.t.Helper()
	kept := m.t.TempDir()
	cmd := m.command(kept, argv...)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		m.t.Fatal(err)
	}
	r := result{code: cmd.ProcessState.ExitCode(), out: out.String(), errOut: errOut.String()}
	if data, err := os.ReadFile(filepath.Join(kept, "report/facts.json")); err == nil {
		if err := json.Unmarshal(data, &r.facts); err != nil {
			m.t.Fatal(err)
		}
	}
	if data, err := os.ReadFile(filepath.Join(kept, "report/report.md")); err == nil {
		r.report = string(data)
	}
	m.wantNothingLeft(cmd)
	return r
}

// wantNothingLeft fails the test if the ended hwcheck cmd left files or cgroups on the machine.
func (m *machine) wantNothingLeft(cmd *exec.Cmd) {
	m.t.Helper()
	if left, err := os.ReadDir(m.temp); err != nil || len(left) > 0 {
		m.t.Errorf("left behind in the temporary folder: %v (%v)", left, err)
	}
	if left := cgroupsOf(m.t, cmd); len(left) > 0 {
		m.t.Errorf("left behind: %v", left)
	}
}

// cgroupsOf lists the cgroups of the containers that the hwcheck process cmd created. Their names
// contain its process ID.
func cgroupsOf(t *testing.T, cmd *exec.Cmd) []string {
	t.Helper()
	name := fmt.Sprintf("hwcheck-%d-*", cmd.Process.Pid)
	var found []string
	for _, pattern := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/*/"} {
		paths, err := filepath.Glob(pattern + name)
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, paths...)
	}
	return found
}

func TestInterruptedCheckLeavesNothing(t *testing.T) {
	m := newMachine(t, "t4-x1", layout.Container, nil)
	kept := t.TempDir()
	cmd := m.command(kept, m.in0()...)
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	// Wait until hwcheck creates a container, to interrupt it at that time.
	for len(cgroupsOf(t, cmd)) == 0 {
		select {
		case err := <-ended:
			t.Fatalf("it ended before it created a container: %v\n%s", err, errOut.String())
		case <-time.After(time.Millisecond):
		}
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil || !strings.Contains(errOut.String(), "interrupted") {
		t.Errorf("%v\n%s", err, errOut.String())
	}
	m.wantNothingLeft(cmd)
	if left, err := os.ReadDir(kept); err != nil || len(left) > 0 {
		t.Errorf("half a report was written: %v (%v)", left, err)
	}
}

func (m *machine) hwcheck() string { return filepath.Join(m.folder, "hwcheck") }

func (r result) wantVerdicts(t *testing.T, want map[string]facts.Verdict) {
	t.Helper()
	got := map[string]facts.Verdict{}
	for _, c := range r.facts.Checks {
		got[c.Name] = c.Verdict
	}
	for name, verdict := range want {
		if got[name] != verdict {
			t.Errorf("%s: %q, want %q", name, got[name], verdict)
		}
	}
	if t.Failed() {
		t.Logf("exit code %d\n%s\n%s", r.code, r.errOut, r.out)
	}
}

const (
	driverCheck    = "a driver is found"
	nvmlCheck      = "NVML says what the model's file says"
	inventoryCheck = "the plugin offers what NVML lists"
	missingCheck   = "the plugin leaves nothing out"
	specCheck      = "the CDI specs can be used"
	noneCheck      = "a container with the base spec alone sees no GPU"
	oneCheck       = "a container with one GPU sees only that GPU"
	allCheck       = "a container with all GPUs sees all"
	tableCheck     = "nvidia-smi prints its table in a container"
	gettersCheck   = "NVML answers a privileged reader"
	librariesCheck = "the C library suffices for the driver"
	attachCheck    = "the watcher reaches every GPU"
	restCheck      = "the watcher holds no MIG instance"
	scansCheck     = "repeated scans leak nothing"
	endCheck       = "the watcher ends and releases the GPUs"
	cudaWithout    = "CUDA sees no GPU in a container without one"
	cudaWith       = "CUDA computes in a container with one GPU"
	mpsWith        = "MPS clients have a pinned memory limit"
)

// recordedChecks are the checks whose answer is compared with nothing.
var recordedChecks = []string{
	"the kernel modules and the reset methods", "the DRM device nodes", "the names that the NVML library exports",
	"the files for graphics and the device nodes in a container", "MPS clients of a daemon with a PID namespace of its own",
	"CUDA IPC between containers with namespaces of their own", "CUDA IPC between containers with the host's PID and IPC namespaces",
	"how many MPS clients a daemon takes", "what an MPS client's fault does to its neighbour",
}

// all returns a map from each of the names of comparisons to the same verdict v.
func all(v facts.Verdict, names ...string) map[string]facts.Verdict {
	verdicts := map[string]facts.Verdict{}
	for _, name := range names {
		verdicts[name] = v
	}
	return verdicts
}

// driverState returns the simulated driver's state. Two states are equal if nothing changed a GPU,
// because the counter of lock operations is cleared.
func driverState(t *testing.T, m *machine) []byte {
	t.Helper()
	raw, err := os.ReadFile(layout.StatePath(m.root))
	if err != nil {
		t.Fatal(err)
	}
	clear(raw[unsafe.Offsetof(state.Header{}.Generation):][:8])
	return raw
}

func TestMatchingMachineAgrees(t *testing.T) {
	for name, kind := range map[string]layout.Kind{
		"dgx-h100": layout.Container, "t4-x1": layout.Bare, "mixed": layout.Bare, "awkward": layout.Container,
	} {
		t.Run(fmt.Sprintf("%s, %s", name, kind), func(t *testing.T) {
			m := newMachine(t, name, kind, nil)
			if name == "t4-x1" {
				m.scans = "100" // the default
			}
			before := driverState(t, m)
			r := m.check(append(m.in0(), "--fault")...)
			r.wantVerdicts(t, all(facts.Agreed, driverCheck, nvmlCheck, inventoryCheck, missingCheck, specCheck, noneCheck, oneCheck,
				tableCheck, timeSliceCheck, gettersCheck, librariesCheck, attachCheck, restCheck, scansCheck, endCheck))
			r.wantVerdicts(t, all(facts.NotProven, cudaWithout, cudaWith, mpsWith))
			described, err := model.ReadNode(filepath.Join(simulator, "nodes", name+".yaml"), t.Name())
			if err != nil {
				t.Fatal(err)
			}
			if r.code != exitNotProven || r.facts.Driver == nil || !r.facts.Driver.Simulated || r.facts.Driver.Root != "/usr/local/nvidia" ||
				r.facts.NVML == nil || len(r.facts.NVML.GPUs) != len(described.GPUs) || r.facts.NVML.DriverVersion != described.DriverVersion {
				t.Errorf("exit code %d, facts %+v", r.code, r.facts)
			}
			if r.report != r.out || !strings.Contains(r.report, "This check only reads") || !strings.Contains(r.report, "kind: ResourceSlice") ||
				!strings.Contains(r.report, "k8s.gpu.nvidia.com/claim") || !strings.Contains(r.report, "| NVIDIA-SMI") {
				t.Errorf("the report lacks something:\n%s", r.report)
			}
			if got := strings.Count(r.report, " could not be offered: "); got != len(described.GPUs) { // no IOMMU here
				t.Errorf("%d GPUs are described as unfit for passthrough", got)
			}
			r.wantOnlyCUDANotProven(t)
			r.wantMeasured(t, m)
			if !bytes.Equal(before, driverState(t, m)) {
				t.Error("the check changed the driver's state")
			}
		})
	}
}

// wantOnlyCUDANotProven fails the test unless the simulated CUDA library is all that was not
// proven.
func (r result) wantOnlyCUDANotProven(t *testing.T) {
	t.Helper()
	for _, c := range r.facts.Checks {
		if c.Name == mpsWith && c.Verdict == facts.NotProven && strings.HasPrefix(c.Detail, "simulated library: the daemon started and ended;") {
			continue
		}
		isCUDA := strings.HasPrefix(c.Name, "CUDA computes") || c.Name == cudaWithout
		inDriverRoot := r.facts.Driver.DevRoot != "/" && strings.Contains(c.Detail, "creating device nodes")
		isNew := slices.Contains(recordedChecks, c.Name) && c.Verdict == facts.Recorded && c.Answer != ""
		switch {
		case isCUDA && strings.HasPrefix(c.Detail, "simulated library: CUDA error 100 in cuInit"):
		case c.Name == "CUDA computes in a user namespace" && inDriverRoot: // runc takes device nodes from the host's /dev alone
		case c.Name == "MPS clients in other containers than their daemon" && strings.HasPrefix(c.Detail, "simulated library: "):
		case c.Name == "the driver's parameters are read-only in a container" && strings.HasSuffix(c.Detail, "no such file or directory"):
		case !isCUDA && c.Verdict == facts.Agreed || isNew:
		default:
			t.Errorf("%+v", c)
		}
	}
	for _, name := range recordedChecks {
		if !slices.ContainsFunc(r.facts.Checks, func(c facts.Check) bool { return c.Name == name }) {
			t.Errorf("%s was not asked", name)
		}
	}
	if !strings.Contains(r.report, "The driver is simulated") {
		t.Error("the report does not say that the driver is simulated")
	}
}

// wantMeasured fails the test unless the facts have what the newer checks measured.
func (r result) wantMeasured(t *testing.T, m *machine) {
	t.Helper()
	w := r.facts.Watcher
	if w == nil || w.Descriptors["nvidiactl"] == 0 && w.Descriptors["nvidia0"] == 0 || fmt.Sprint(w.Scans.Count) != m.scans ||
		w.Start.Descriptors == 0 || w.Start.MemoryKiB == 0 || w.AnswerMillis == 0 || w.Polls == 0 {
		t.Errorf("watcher: %+v", w)
	}
	g := r.facts.Getters
	if g == nil || len(g.Privileged) < 40 || len(g.Privileged) != len(g.Unprivileged) {
		t.Errorf("getters: %+v", g)
	}
	k := r.facts.Machine.KernelDriver
	if k == nil || !strings.HasPrefix(k.Version, "NVRM version") || len(k.Majors) == 0 || !slices.Contains(k.Capabilities, "mig/config") {
		t.Errorf("kernel driver: %+v", k)
	}
	l := r.facts.Libraries
	if l == nil || len(l.Files) != 5 || !strings.HasPrefix(l.GLIBC, "2.") || !strings.HasPrefix(l.Files[0].GLIBC, "2.") {
		t.Errorf("libraries: %+v", l)
	}
}

func TestDifferenceFromModelIsReported(t *testing.T) {
	m := newMachine(t, "dgx-h100", layout.Container, nil)
	const key = "h100-sxm5-80gb"
	content, err := os.ReadFile(filepath.Join(simulator, "models", key+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	changed := strings.Replace(strings.Replace(string(content), "{value: 81559,", "{value: 81558,", 1), "sm: 16", "sm: 18", 1)
	models := t.TempDir()
	if err := os.WriteFile(filepath.Join(models, key+".yaml"), []byte(changed), 0o600); err != nil {
		t.Fatal(err)
	}
	r := m.check(append(m.in0(), "--models", models)...)
	r.wantVerdicts(t, map[string]facts.Verdict{nvmlCheck: facts.Differed, allCheck: facts.Agreed})
	if r.code != exitDiffered || r.facts.Agreed || r.facts.NVML == nil || len(r.facts.NVML.GPUs) != 8 {
		t.Fatalf("exit code %d\n%s", r.code, r.errOut)
	}
	differences := map[string]facts.Difference{}
	for _, d := range r.facts.NVML.GPUs[7].Differences {
		differences[d.What] = d
	}
	if d := differences["memoryTotalMiB"]; d.Want != "81558" || d.Got != "81559" {
		t.Errorf("differences: %v", differences)
	}
	if d := differences["MIG 1g.10gb: sm"]; d.Want != "18" || d.Got != "16" {
		t.Errorf("differences: %v", differences)
	}
	if !strings.Contains(r.report, "the model file says 81558, NVML 81559") {
		t.Errorf("the report does not say it:\n%s", r.report)
	}
}

func TestGPUWithoutModelFileIsDescribed(t *testing.T) {
	m := newMachine(t, "dgx-h100", layout.Container, nil)
	models := t.TempDir()
	content, err := os.ReadFile(filepath.Join(simulator, "models/t4-16gb.yaml"))
	if err := errors.Join(err, os.WriteFile(filepath.Join(models, "t4-16gb.yaml"), content, 0o600)); err != nil {
		t.Fatal(err)
	}
	r := m.check(append(m.in0(), "--models", models)...)
	r.wantVerdicts(t, map[string]facts.Verdict{nvmlCheck: facts.Differed})
	if gpus := r.facts.NVML.GPUs; r.code != exitDiffered || len(gpus) != 8 ||
		len(gpus[0].Profiles) != 7 || gpus[0].Profiles[0].SM != 16 {
		t.Errorf("exit code %d, %+v", r.code, r.facts.NVML)
	}
}

func (m *machine) in0() []string { return append([]string{m.hwcheck()}, m.in()...) }

func TestCheckEndsAtItsLimitWithWhatItHas(t *testing.T) {
	m := newMachine(t, "t4-x1", layout.Container, nil)
	r := m.check(append(m.in0(), "--limit", (endReserve + 300*time.Millisecond).String())...)
	r.wantVerdicts(t, map[string]facts.Verdict{"the DRM device nodes": facts.Recorded, "all checks ran": facts.Failed})
	if r.code != exitDiffered || !strings.Contains(r.report, "s of 30.3s.\n") {
		t.Errorf("exit code %d\n%s", r.code, r.report)
	}
}

func TestCheckWithoutRuncNamesTheGap(t *testing.T) {
	m := newMachine(t, "l40s-x2", layout.Container, nil)
	containers := []string{noneCheck, oneCheck, allCheck, tableCheck}
	t.Run("without cgroups nvidia-smi runs in a chroot", func(t *testing.T) {
		n := *m
		n.t, n.setup = t, append(m.setup, "mount -t tmpfs tmpfs /sys/fs/cgroup")
		r := n.check(n.in0()...)
		r.wantVerdicts(t, all(facts.NotProven, containers...))
		r.wantVerdicts(t, all(facts.Agreed, driverCheck, nvmlCheck, inventoryCheck, specCheck))
		r.wantNoDaemon(t, "runc made no container")
		if r.code != exitNotProven || !strings.Contains(r.report, "ran in a chroot") || !strings.Contains(r.report, "runc made no container") {
			t.Errorf("exit code %d\n%s", r.code, r.errOut)
		}
	})
	t.Run("without privileges nvidia-smi runs on the machine", func(t *testing.T) {
		n := *m
		n.t = t
		r := n.check(append([]string{m.hwcheck(), stageWithoutCapabilities}, n.in0()...)...)
		r.wantVerdicts(t, all(facts.NotProven, containers...))
		r.wantVerdicts(t, all(facts.Agreed, driverCheck, nvmlCheck, inventoryCheck, specCheck))
		r.wantNoDaemon(t, "no mount namespace")
		r.wantVerdicts(t, all(facts.NotProven, gettersCheck))
		r.wantVerdicts(t, all(facts.Agreed, librariesCheck, attachCheck, restCheck, scansCheck, endCheck))
		if r.code != exitNotProven || !strings.Contains(r.report, "ran on the machine itself") ||
			!strings.Contains(r.report, "no mount namespace") {
			t.Errorf("exit code %d\n%s", r.code, r.errOut)
		}
	})
}

// wantNoDaemon fails the test unless the report says that no MPS daemon was started, and why.
func (r result) wantNoDaemon(t *testing.T, why string) {
	t.Helper()
	for _, c := range r.facts.Checks {
		if c.Name == mpsWith && c.Verdict == facts.NotProven && r.facts.MPS == nil &&
			strings.Contains(c.Detail, "no daemon was started") && strings.Contains(c.Detail, why) {
			return
		}
	}
	t.Errorf("want no MPS daemon because of %q: %+v, %+v", why, r.facts.MPS, r.facts.Checks)
}

func TestUnusableDriverIsReported(t *testing.T) {
	for name, x := range map[string]struct {
		change func(*layout.Options)
		want   string
		nvml   facts.Verdict
	}{
		"no uvm":          {func(o *layout.Options) { o.Config.NoUVM = true }, "nvidia-modprobe -u", facts.Agreed},
		"no device nodes": {func(o *layout.Options) { o.Config.NoDevices = true }, "no device node nvidiactl", ""},
		"no driver":       {func(o *layout.Options) { o.NoDriver = true }, "is below none of", ""},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, "t4-x1", layout.Container, x.change)
			r := m.check(m.in0()...)
			r.wantVerdicts(t, map[string]facts.Verdict{driverCheck: facts.Failed, nvmlCheck: x.nvml})
			if r.code != exitDiffered || !strings.Contains(r.report, x.want) {
				t.Errorf("exit code %d, the report lacks %q:\n%s\n%s", r.code, x.want, r.errOut, r.report)
			}
		})
	}
}

func TestMachineWithoutGPUIsReported(t *testing.T) {
	m := newMachine(t, "t4-x1", layout.Container, nil)
	m.setup = nil
	r := m.check(m.hwcheck(), "--sysfs-root", t.TempDir(), "--driver-root", t.TempDir())
	if r.code != exitNoGPU || !strings.Contains(r.out, "There is no NVIDIA GPU on this machine") || r.report != "" {
		t.Errorf("exit code %d: %s%s", r.code, r.out, r.errOut)
	}
}
