package e2e

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
)

// realNode is the node that has this machine's GPUs.
const realNode = "real"

// TestRealGPU installs the chart on a node that has this machine's real GPUs, and runs Pods with
// claims there. It needs an idle GPU and NVIDIA's driver, and changes no setting of a GPU: the node
// has the MIG policy static, and no claim asks for a partition, a time-slice or MPS.
// E2E_DRIVER_ROOT names the driver's root on this machine.
func TestRealGPU(t *testing.T) {
	driverRoot := os.Getenv("E2E_DRIVER_ROOT")
	if driverRoot == "" {
		t.Skip("SKIPPED: needs a real GPU: make test-gpu DRIVER_ROOT=/")
	}
	root, err := clusterharness.Root()
	if err != nil {
		t.Fatal(err)
	}
	host := realHost{driverRoot: driverRoot, programs: filepath.Join(root, "build", "gpu")}
	host.build(t, root)
	settings := host.settings(t)
	t.Cleanup(func() {
		if now := host.settings(t); now != settings {
			t.Errorf("the settings of the GPUs were\n%s\nand are now\n%s", settings, now)
		}
	})
	before := host.users(t)
	w := bringUpPlain(t, root, cluster.Options{Name: "e2e-real", Nodes: []cluster.NodeOptions{host.node(t)}, RestartPause: time.Second})
	w.install(t, "--set", "mig.policy=static,hostPaths.sys=/sys,hostPaths.proc=/proc,driverRoot="+driverRoot)

	g := realGPUs{world: w, host: host, uuids: uuidForm.FindAllString(host.run(t, "-L"), -1), before: before}
	if slices.Sort(g.uuids); len(g.uuids) == 0 {
		t.Fatal("nvidia-smi lists no GPU")
	}
	t.Run("the slices list the GPUs that nvidia-smi lists", g.testSlices)
	t.Run("a Pod computes on its GPU alone", g.testComputes)
	t.Run("a Pod without a claim finds no GPU", g.testStranger)
	t.Run("a Pod waits until a GPU is free", g.testWaits)
	t.Run("the plugin is killed while a Pod uses its GPU", g.testKilled)
	t.Run("an XID of an application taints nothing", g.testXID)
	t.Run("the driver is released and taken again", g.testReleased)
	t.Run("an uninstallation leaves no process with a GPU open", g.testUninstalled)
}

// realHost is this machine, with a real driver.
type realHost struct {
	driverRoot string
	// programs is the folder of the programs that Pods run. It must exist before the node boots, which
	// sees the host's files of that moment.
	programs string
}

const (
	cudaProgram = "cudacheck"
	nvmlName    = "libnvidia-ml.so.1"
)

// build compiles the CUDA program, and copies nvidia-smi and the NVML library, for a container that
// gets neither from the driver.
func (h realHost) build(t *testing.T, root string) {
	t.Helper()
	if err := os.MkdirAll(h.programs, 0o755); err != nil {
		t.Fatal(err)
	}
	compile := exec.CommandContext(t.Context(), "gcc", "-std=gnu11", "-O2", "-o", filepath.Join(h.programs, cudaProgram),
		filepath.Join(root, "test", "hwcheck", "cudacheck", "cudacheck.c"), "-ldl")
	if out, err := compile.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	program, libraries := h.smi(t)
	for _, path := range []string{program, filepath.Join(libraries, nvmlName)} {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(h.programs, filepath.Base(path)), data, 0o755); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
}

// smi returns the path of nvidia-smi and the folder of the libraries below a driver root.
func (h realHost) smi(t *testing.T) (program, libraries string) {
	t.Helper()
	for _, folder := range []string{"bin", "usr/bin"} {
		if path := filepath.Join(h.driverRoot, folder, "nvidia-smi"); isFile(path) {
			program = path
		}
	}
	for _, folder := range []string{"lib64", "usr/lib64", "usr/lib/aarch64-linux-gnu", "usr/lib/x86_64-linux-gnu"} {
		if path := filepath.Join(h.driverRoot, folder); isFile(filepath.Join(path, nvmlName)) {
			libraries = path
		}
	}
	if program == "" || libraries == "" {
		t.Fatalf("no nvidia-smi or no %s below %s", nvmlName, h.driverRoot)
	}
	return program, libraries
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// run runs nvidia-smi on this machine.
func (h realHost) run(t *testing.T, args ...string) string {
	t.Helper()
	program, libraries := h.smi(t)
	cmd := exec.Command(program, args...) //nolint:gosec // the machine's nvidia-smi
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+libraries)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("nvidia-smi %q: %v\n%s", args, err, out)
	}
	return string(out)
}

// settings returns the settings of the GPUs that no test may change.
func (h realHost) settings(t *testing.T) string {
	t.Helper()
	return h.run(t, "--format=csv", "--query-gpu=uuid,mig.mode.current,mig.mode.pending,persistence_mode,compute_mode,power.limit,"+
		"clocks.applications.graphics,ecc.mode.current,ecc.mode.pending") + h.run(t, "compute-policy", "--list")
}

// node returns a node with the host's device nodes of NVIDIA and the driver's files.
func (h realHost) node(t *testing.T) cluster.NodeOptions {
	t.Helper()
	commands := []string{"set -e"}
	err := filepath.WalkDir("/dev", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !strings.HasPrefix(path, "/dev/nvidia") || entry.IsDir() {
			return err
		}
		var stat unix.Stat_t
		if err := unix.Stat(path, &stat); err != nil || stat.Mode&unix.S_IFMT != unix.S_IFCHR {
			return err
		}
		commands = append(commands, fmt.Sprintf("mkdir -p %s; mknod -m %o %s c %d %d",
			filepath.Dir(path), stat.Mode&0o777, path, unix.Major(stat.Rdev), unix.Minor(stat.Rdev)))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	options := cluster.NodeOptions{Name: realNode, BootHook: []string{"/bin/sh", "-c", strings.Join(commands, "\n")}}
	if h.driverRoot != "/" { // it may be a mount of its own, which a node does not see
		options.Mounts = []cluster.Mount{{Source: h.driverRoot}}
	}
	return options
}

// realGPUs are the GPUs of the real node.
type realGPUs struct {
	*world
	host realHost
	// uuids are those that nvidia-smi lists, sorted.
	uuids []string
	// before are the processes that had a GPU open before the installation.
	before []string
}

func (g realGPUs) testSlices(t *testing.T) {
	g.offers(t, realNode, len(g.uuids))
	var published []string
	for _, d := range g.gpus(t, realNode) {
		published = append(published, *d.Attributes["uuid"].StringValue)
		if len(d.Taints) > 0 {
			t.Errorf("device %s has the taints %v", d.Name, d.Taints)
		}
	}
	if slices.Sort(published); !slices.Equal(published, g.uuids) {
		t.Errorf("the slices list %v, nvidia-smi %v", published, g.uuids)
	}
}

// user starts a Pod with a GPU that has the CUDA program, and waits until it runs.
func (g realGPUs) user(u tenant, name string) {
	u.t.Helper()
	start := time.Now()
	u.pod(name, onNode(realNode), fromTemplate("gpu", "one"), container("main", "gpu"), hostPath("programs", g.host.programs))
	u.running(name)
	u.t.Logf("Pod %s was ready after %s", name, time.Since(start).Round(time.Millisecond))
}

// computes runs the CUDA program in a Pod and checks that it computes on the Pod's GPU.
func (g realGPUs) computes(u tenant, pod string) {
	u.t.Helper()
	got := g.cuda(u, pod)
	allocated := u.allocated(pod, "gpu")
	if got.Step != "done" || got.Error != 0 || got.Correct != 1024 || got.Devices != 1 || got.UUID != allocated[0] {
		u.t.Errorf("CUDA in Pod %s: %+v, and its claim was allocated %v", pod, got, allocated)
	}
}

// cuda runs the CUDA program in a Pod.
func (g realGPUs) cuda(u tenant, pod string, args ...string) facts.CUDAResult {
	u.t.Helper()
	line := strings.Join(append([]string{filepath.Join(g.host.programs, cudaProgram)}, args...), " ")
	out := u.sh(pod, "main", line)
	var result facts.CUDAResult
	if err := json.Unmarshal([]byte(out), &result); err != nil {
		u.t.Fatalf("%v: %s", err, out)
	}
	return result
}

func (g realGPUs) testComputes(t *testing.T) {
	u := g.tenant(t)
	u.template("one", oneGPU)
	g.user(u, "user")
	u.sees("user", "", u.allocated("user", "gpu"))
	t.Log(u.sh("user", "", "nvidia-smi; ls -l /dev/nvidia*"))
	g.computes(u, "user")
	// As root with the right to create device nodes, nvidia-smi has created that of the MIG
	// configuration. The device cgroup must not let the container open it.
	const configuration = "/dev/nvidia-caps/nvidia-cap1"
	line := "test ! -e " + configuration + " || cat " + configuration
	if out, err := u.exec(t, u.namespace, "user", "", "sh", "-c", line); err != nil && !strings.Contains(out, "Operation not permitted") {
		t.Errorf("%s in the container: %v\n%s", configuration, err, out)
	} else if err == nil {
		t.Logf("%s is not in the container", configuration)
	}
}

func (g realGPUs) testStranger(t *testing.T) {
	u := g.tenant(t)
	u.template("one", oneGPU)
	smi := "LD_LIBRARY_PATH=" + g.host.programs + " " + g.host.programs + "/nvidia-smi -L"
	u.pod("mate", onNode(realNode), fromTemplate("gpu", "one"), container("main", "gpu"), container("side"),
		hostPath("programs", g.host.programs))
	u.running("mate")
	if out := u.sh("mate", "main", smi); !strings.Contains(out, u.allocated("mate", "gpu")[0]) {
		t.Errorf("nvidia-smi of the node in the container with the claim says:\n%s", out)
	}
	// The device cgroup must keep the container away even from a device node that it makes itself.
	u.sh("mate", "side", "mknod /tmp/n c 195 0")
	if out, err := u.exec(t, u.namespace, "mate", "side", "sh", "-c", "cat /tmp/n; "+smi); err == nil || strings.Contains(out, "UUID") ||
		!strings.Contains(out, "Operation not permitted") {
		t.Errorf("in the container without the claim (%v):\n%s", err, out)
	}
}

func (g realGPUs) testWaits(t *testing.T) {
	u := g.tenant(t)
	u.template("one", oneGPU)
	for i := range g.uuids {
		g.user(u, fmt.Sprintf("user-%d", i))
	}
	u.pod("last", onNode(realNode), fromTemplate("gpu", "one"), container("main", "gpu"), hostPath("programs", g.host.programs))
	u.waits("last")
	freed := u.allocated("user-0", "gpu")
	g.deletePods(t, u.namespace, "user-0")
	u.running("last")
	u.sees("last", "", freed)
	g.computes(u, "last")
}

func (g realGPUs) testKilled(t *testing.T) {
	u := g.tenant(t)
	u.template("one", oneGPU)
	g.user(u, "user")
	plugin := g.livePlugin(t, realNode)
	if _, err := g.Kubectl(t.Context(), "-n", plugin.Namespace, "delete", "pod", plugin.Name, "--grace-period=0", "--force"); err != nil {
		t.Fatal(err)
	}
	g.computes(u, "user")
	g.instance(t, realNode)
	g.computes(u, "user")
	g.deletePods(t, u.namespace, "user")
	g.user(u, "next")
	g.computes(u, "next")
}

// testXID lets an application write to an address that it does not have. NVML reports XID 31, which
// says nothing about the GPU.
func (g realGPUs) testXID(t *testing.T) {
	u := g.tenant(t)
	u.template("one", oneGPU)
	g.user(u, "user")
	const illegalAddress = 700 // CUDA_ERROR_ILLEGAL_ADDRESS
	if got := g.cuda(u, "user", "fault"); got.Error != illegalAddress {
		t.Errorf("the faulty program: %+v, want error %d", got, illegalAddress)
	}
	counted := regexp.MustCompile(`(?m)^gpu_dra_health_events_total\{code="xid-31",.*\} 1$`)
	took := eventually(t, 5*time.Second, "the metrics count the XID", func() (bool, string) {
		return counted.MatchString(g.get(t, realNode, "metrics")), ""
	})
	t.Logf("the plugin's metrics counted the XID after %s", took.Round(time.Millisecond))
	if all := g.taints(t, realNode); len(all) > 0 {
		t.Errorf("the XID of an application made the taints %v", all)
	}
	g.computes(u, "user")
}

// testReleased releases the driver as an admin does before an upgrade. Then only processes from
// before the installation may have a GPU open.
func (g realGPUs) testReleased(t *testing.T) {
	annotate := func(value string) {
		t.Helper()
		if _, err := g.Kubectl(t.Context(), "annotate", "node", realNode, "gpu.nvidia.com/release-driver"+value); err != nil {
			t.Fatal(err)
		}
	}
	if slices.Equal(g.host.users(t), g.before) {
		t.Error("the serving plugin has no GPU open, so this test would prove nothing")
	}
	annotate("=true")
	took := eventually(t, 20*time.Second, "the plugin has no GPU open", func() (bool, string) {
		users := g.host.users(t)
		return slices.Equal(users, g.before), fmt.Sprint(users)
	})
	t.Logf("the plugin released the GPUs after %s", took.Round(time.Millisecond))
	annotate("-")
	g.offers(t, realNode, len(g.uuids))
	eventually(t, 60*time.Second, "no device has a taint", func() (bool, string) {
		all := g.taints(t, realNode)
		return len(all) == 0, fmt.Sprint(all)
	})
	u := g.tenant(t)
	u.template("one", oneGPU)
	g.user(u, "user")
	g.computes(u, "user")
}

func (g realGPUs) testUninstalled(t *testing.T) {
	log, err := g.Kubectl(t.Context(), "-n", clusterharness.Namespace, "logs", g.instance(t, realNode).Name)
	if err != nil {
		t.Error(err)
	}
	for name, text := range map[string]string{"metrics.txt": g.get(t, realNode, "metrics"), "plugin.log": log} {
		if err := os.WriteFile(filepath.Join(g.host.programs, name), []byte(text), 0o644); err != nil { //nolint:gosec // for a reader
			t.Error(err)
		}
	}
	g.clean(t, realNode)
	if out, err := g.uninstall(t); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if users := g.host.users(t); !slices.Equal(users, g.before) {
		t.Errorf("GPUs are open in %v, before the installation in %v", users, g.before)
	}
	if n := len(g.slices(t, realNode)); n != 0 {
		t.Errorf("%d ResourceSlices are left", n)
	}
}

// users returns the processes that have a GPU open, with their names.
func (h realHost) users(t *testing.T) []string {
	t.Helper()
	descriptors, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	var users []string
	for _, d := range descriptors {
		var stat unix.Stat_t
		const frontend = 195 // the major number of NVIDIA's GPUs
		if unix.Stat(d, &stat) == nil && stat.Mode&unix.S_IFMT == unix.S_IFCHR && unix.Major(stat.Rdev) == frontend {
			process := strings.Split(d, "/")[2]
			name, _ := os.ReadFile(filepath.Join("/proc", process, "comm"))
			users = append(users, process+" "+strings.TrimSpace(string(name)))
		}
	}
	slices.Sort(users)
	return slices.Compact(users)
}
