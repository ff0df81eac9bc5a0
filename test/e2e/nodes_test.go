package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// The nodes of TestNodes, and the label that assigns each node to a release. A chart has one driver
// root, so several releases of the chart share the cluster.
const (
	nodesLabel = "gpu-driver"

	nodeLate      = "late"      // the driver comes late, piece by piece; then it is reinstalled elsewhere
	nodeNoCDI     = "no-cdi"    // containerd ignores CDI devices
	nodeContained = "contained" // a driver container mounts its root at /run/nvidia/driver
	nodePlain     = "plain"     // driver packages were installed into the root file system
	nodeDeep      = "deep"      // the kubelet's root is that of MicroK8s

	nodesModel = "l40s-x2"
	nodesGPUs  = 2
	// nodesDevice is the device name of a GPU that each of these nodes has.
	nodesDevice = "gpu-0000-3d-00-0"
)

// TestNodes covers NVIDIA drivers that come late or are installed in unusual places, and a
// container runtime with CDI disabled.
func TestNodes(t *testing.T) {
	t.Parallel()
	w := bringUpNodes(t)
	// Each uses a node of its own.
	sideBySide(t, map[string]func(*testing.T){
		"CDISwitchedOff":  w.testCDISwitchedOff,
		"DriverContainer": w.testDriverContainer,
		"PlainHost":       w.testPlainHost,
		"DeepKubeletRoot": w.testDeepKubeletRoot,
		"Late": func(t *testing.T) {
			t.Run("DriverComesLate", w.testDriverComesLate)
			t.Run("LibrariesOffTheLinkersPath", w.testLibrariesOffTheLinkersPath)
			t.Run("BareDriverRoot", w.testBareDriverRoot)
		},
	})
}

func bringUpNodes(t *testing.T) *world {
	sim := simulator(t)
	describe := func(name, release, after string, more ...string) cluster.NodeOptions {
		o := sim.Node(name, nodesModel, more...)
		o.Labels = map[string]string{nodesLabel: release}
		if after != "" {
			o.BootHook = []string{"/bin/sh", "-ec", `"$@"; ` + after, "boot"}
			o.BootHook = append(o.BootHook, sim.Node(name, nodesModel, more...).BootHook...)
		}
		return o
	}
	noCDI := describe(nodeNoCDI, "own-root", "")
	noCDI.DisableCDI = true
	deep := describe(nodeDeep, "deep", "")
	deep.KubeletRoot = deepRoot
	w := bringUp(
		t,
		"e2e-nodes",
		describe(nodeLate, "own-root", "", "--no-driver", "--no-devices", "--no-uvm"),
		noCDI,
		deep,
		describe(nodeContained, "container", "mkdir -p /run/nvidia", "--kind", "container", "--no-driver"),
		// This node has the driver installed as packages do: libraries, tools and firmware among those of
		// the distribution.
		describe(
			nodePlain,
			"root",
			fmt.Sprintf("cp -a %[1]s/driver/usr/. /usr/; cp -a %[1]s/driver/lib/. /lib/; rm -r %[1]s/driver", clusterharness.NodeRoot),
		),
	)
	w.releaseOn(t, clusterharness.Release, "own-root")
	w.releaseOn(
		t,
		"container",
		"container",
		"--set",
		"driverRoot=/run/nvidia/driver",
		"--set",
		"deviceClasses.gpu.enabled=false",
		"--set",
		"deviceClasses.mig.enabled=false",
	)
	w.releaseOn(
		t,
		"root",
		"root",
		"--set",
		"driverRoot=/",
		"--set",
		"deviceClasses.gpu.enabled=false",
		"--set",
		"deviceClasses.mig.enabled=false",
	)
	w.releaseOn(
		t,
		"deep",
		"deep",
		"--set",
		"kubeletRootDir="+deepRoot,
		"--set",
		"deviceClasses.gpu.enabled=false",
		"--set",
		"deviceClasses.mig.enabled=false",
	)
	return w
}

// releaseOn installs a release of the chart on the nodes with this label. It does not wait, because
// a node that cannot serve has no ready plugin.
func (w *world) releaseOn(t *testing.T, release, label string, more ...string) {
	t.Helper()
	args := append([]string{
		"install", release, clusterharness.Chart(w.root), "--namespace", clusterharness.Namespace, "--create-namespace", "--values",
		clusterharness.Values(w.root),
		"--set", "nodeSelector." + nodesLabel + "=" + label,
	}, more...)
	if _, err := w.Helm(t.Context(), args...); err != nil {
		t.Fatalf("install release %s: %v", release, err)
	}
}

func (w *world) testDriverComesLate(t *testing.T) {
	ns := w.namespace(t)
	w.apply(t, ns, podOn("first", nodeLate)) // the Pod starts as soon as the node offers a GPU
	w.saysWhy(t, nodeLate, "libnvidia-ml.so.1 is not under the driver root")
	before := w.livePlugin(t, nodeLate)

	// Now the packages are installed and the kernel module is loaded, but the device nodes are still
	// missing.
	w.nvmlsim(t, nodeLate, "driver", "back")
	w.saysWhy(t, nodeLate, "nvidiactl is missing: run nvidia-modprobe -c=255 on the node")

	w.nvmlsim(t, nodeLate, "layout", "devices")
	w.saysWhy(t, nodeLate, "nvidia-uvm is missing: run nvidia-modprobe -u -c=0 on the node")
	if out, err := w.inventoryOf(t, nodeLate); err == nil || !strings.Contains(out, "run nvidia-modprobe -u -c=0") {
		t.Errorf("`inventory` does not say why this node offers nothing: %v\n%s", err, out)
	}

	w.nvmlsim(t, nodeLate, "layout", "devices", "--uvm")
	w.hasEverything(t, ns, nodeLate, clusterharness.NodeRoot+"/driver")
	w.offers(t, nodeLate, nodesGPUs)
	eventually(t, 30*time.Second, "an Event and the readiness say that the node serves", func() (bool, string) {
		events, ready := w.events(t, "default", nodeLate), w.readiness(t, nodeLate)
		return strings.Contains(events, "DevicesAvailable") && ready == "ok", ready + "\n" + events
	})
	w.sameInstance(t, before)
}

// testLibrariesOffTheLinkersPath installs the driver's libraries, as Debian's packages do, in a
// folder that the linker does not search by itself. The base CDI spec must update the linker's
// cache.
func (w *world) testLibrariesOffTheLinkersPath(t *testing.T) {
	before := w.livePlugin(t, nodeLate)
	w.reinstall(t, "--libdir", "usr/lib/x86_64-linux-gnu/nvidia/current")
	base := w.isFullyUsable(t, nodeLate, clusterharness.NodeRoot+"/driver")
	if !slices.ContainsFunc(base.ContainerEdits.Hooks, func(h *specs.Hook) bool { return slices.Contains(h.Args, "update-ldcache") }) {
		t.Errorf("the base spec has no update-ldcache hook: %+v", base.ContainerEdits.Hooks)
	}
	if at := mountedAt(base, "libcuda.so."); !strings.Contains(at, "/nvidia/current/") {
		t.Errorf("libcuda is mounted at %q, where the linker finds it by itself, so this test proves nothing", at)
	}
	w.sameInstance(t, before)
}

func (w *world) testBareDriverRoot(t *testing.T) {
	before := w.livePlugin(t, nodeLate)
	w.reinstall(t, "--kind", "bare")
	root := clusterharness.NodeRoot + "/driver"
	for _, absent := range []string{"/dev", "/usr", "/bin/sh"} {
		if _, err := w.node(t, nodeLate).Exec(t.Context(), "test", "-e", root+absent); err == nil {
			t.Fatalf("the driver root has %s: it is not bare", absent)
		}
	}
	w.isFullyUsable(t, nodeLate, root)
	w.sameInstance(t, before)
}

func (w *world) testDriverContainer(t *testing.T) {
	const root = "/run/nvidia/driver"
	w.saysWhy(t, nodeContained, "is not under the driver root")
	before := w.livePlugin(t, nodeContained)
	// Long after the plugin's start, a driver container loads the module and mounts its root file
	// system, with its own /dev.
	w.nvmlsim(t, nodeContained, "driver", "back")
	w.on(t, nodeContained, "mkdir", root)
	w.on(t, nodeContained, "mount", "--rbind", clusterharness.NodeRoot+"/driver", root)
	w.offers(t, nodeContained, nodesGPUs)
	base := w.isFullyUsable(t, nodeContained, root)
	for _, n := range base.ContainerEdits.DeviceNodes {
		if n.HostPath != root+n.Path {
			t.Errorf("device node %s is taken from %q on the host, want it from the driver container's /dev", n.Path, n.HostPath)
		}
	}
	// The driver container ends and removes its directory, although the plugin's watcher process still
	// uses it. The next driver container creates a new directory.
	w.on(t, nodeContained, "umount", "-R", "-l", root)
	w.on(t, nodeContained, "rmdir", root)
	w.nvmlsim(t, nodeContained, "driver", "away", "--force")
	w.saysWhyNot(t, nodeContained, "is not under the driver root")
	w.nvmlsim(t, nodeContained, "driver", "back")
	w.on(t, nodeContained, "mkdir", root)
	w.on(t, nodeContained, "mount", "--rbind", clusterharness.NodeRoot+"/driver", root)
	w.isFullyUsable(t, nodeContained, root)
	w.sameInstance(t, before)
}

func (w *world) testPlainHost(t *testing.T) {
	base := w.isFullyUsable(t, nodePlain, "/usr")
	for _, n := range base.ContainerEdits.DeviceNodes {
		if n.HostPath != "" {
			t.Errorf("device node %s is taken from %q, want the same path on the host", n.Path, n.HostPath)
		}
	}
	t.Run("a Pod with its own user namespace", w.testUserNamespace)
}

// testUserNamespace starts a Pod whose CDI hooks the runtime runs as an ordinary user of the host.
func (w *world) testUserNamespace(t *testing.T) {
	ns := w.namespace(t)
	w.apply(t, ns, strings.Replace(podOn("first", nodePlain), "restartPolicy: Never", "restartPolicy: Never\n  hostUsers: false", 1))
	w.hasEverything(t, ns, nodePlain, "/usr")
	if ids := strings.Fields(w.mustExec(t, ns, "first", "", "cat", "/proc/self/uid_map")); len(ids) < 2 || ids[1] == "0" {
		t.Errorf("the container's root is user %v of the host, so this test proves nothing", ids)
	}
}

const deepRoot = "/var/snap/microk8s/common/var/lib/kubelet"

// testDeepKubeletRoot covers a kubelet root below which a socket's path with a Pod's UID would be
// too long. A restarted plugin must also remove the sockets of killed instances there.
func (w *world) testDeepKubeletRoot(t *testing.T) {
	w.isFullyUsable(t, nodeDeep, clusterharness.NodeRoot+"/driver")
	dirs := map[string]string{
		"dra-0123abcd.sock":                deepRoot + "/plugins/gpu.nvidia.com",
		"gpu.nvidia.com-0123abcd-reg.sock": deepRoot + "/plugins_registry",
	}
	for name, dir := range dirs {
		leaveSocket(t, w.hostDir(t, nodeDeep, dir), name)
	}
	before := w.instance(t, nodeDeep)
	kill(t, mainProcess(t, "GPU_DRA_POD_UID", string(before.UID)))
	eventually(t, 90*time.Second, "the killed plugin runs again", func() (bool, string) {
		now := w.instance(t, nodeDeep).Status.ContainerStatuses[0]
		return now.ContainerID != before.Status.ContainerStatuses[0].ContainerID && now.Ready, fmt.Sprintf("%+v", now)
	})
	for name, dir := range dirs {
		pattern, _, _ := strings.Cut(name, "0123abcd")
		if sockets := w.on(t, nodeDeep, "find", dir, "-maxdepth", "1", "-name", pattern+"*", "-type", "s"); len(strings.Fields(sockets)) != 1 ||
			strings.Contains(sockets, name) {
			t.Errorf("want only the socket of the running plugin, found %s", sockets)
		}
	}
	w.isFullyUsable(t, nodeDeep, clusterharness.NodeRoot+"/driver")
}

// leaveSocket creates a socket on which no process listens, as a killed process leaves it.
func leaveSocket(t *testing.T, dir, name string) {
	t.Helper()
	open, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = open.Close() }()
	// The folder's path on the host is too long for a socket.
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d/%s", open.Fd(), name), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

const cdiIsOff = "CDI is switched off in the container runtime"

func (w *world) testCDISwitchedOff(t *testing.T) {
	w.saysWhy(t, nodeNoCDI, cdiIsOff)
	ns := w.namespace(t)
	w.apply(t, ns, podOn("wants", nodeNoCDI))
	eventually(t, 30*time.Second, "the Pod's Event says that there is no GPU for it", func() (bool, string) {
		events := w.events(t, ns, "wants")
		return strings.Contains(events, "FailedScheduling"), events
	})
	// A claim that was allocated before CDI was disabled must be refused, because without CDI its Pod
	// would run without a GPU.
	w.handAllocate(t, ns, "forced", nodeNoCDI, nodesDevice)
	w.apply(t, ns, podOnClaim("forced", nodeNoCDI, "forced"))
	w.refused(t, ns, "forced", cdiIsOff, "enable_cdi = true")
	w.counts(t, nodeNoCDI, "prepare", "not-ready")
	// Do what the error message tells the admin to do.
	w.on(t, nodeNoCDI, "sed", "-i", "s/enable_cdi = false/enable_cdi = true/", "/etc/containerd/config.toml")
	if err := w.node(t, nodeNoCDI).RestartContainerd(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.running(t, ns, "forced", "wants")
	w.deletePods(t, ns)
	w.isFullyUsable(t, nodeNoCDI, clusterharness.NodeRoot+"/driver")
}

// reinstall removes the driver of the node late with its files and device nodes, and installs it
// again while the plugin runs. how are the simulator's options for the new installation.
func (w *world) reinstall(t *testing.T, how ...string) {
	t.Helper()
	w.nvmlsim(t, nodeLate, "driver", "away", "--files", "--force")
	w.saysWhyNot(t, nodeLate, "libnvidia-ml.so.1 is not under the driver root")
	w.on(t, nodeLate, w.sim.LayoutUp(clusterharness.NodeRoot, nodesModel, append([]string{"--seed", nodeLate}, how...)...)...)
	eventually(t, 30*time.Second, "the plugin is ready again", func() (bool, string) {
		ready := w.readiness(t, nodeLate)
		return ready == "ok", ready
	})
}

// isFullyUsable runs a Pod with a GPU on the node, and returns the node's base CDI spec. It fails
// the test if the Pod lacks its GPU or the spec is incomplete.
func (w *world) isFullyUsable(t *testing.T, node, driverRoot string) specs.Spec {
	t.Helper()
	w.offers(t, node, nodesGPUs)
	ns := w.namespace(t)
	w.apply(t, ns, podOn("first", node))
	return w.hasEverything(t, ns, node, driverRoot)
}

// hasEverything waits for the Pod named first, checks its GPU and that the node's base CDI spec is
// complete, and returns the spec. The libraries in the spec must come from below driverRoot.
func (w *world) hasEverything(t *testing.T, ns, node, driverRoot string) specs.Spec {
	t.Helper()
	w.running(t, ns, "first")
	var base specs.Spec
	if err := json.Unmarshal([]byte(w.on(t, node, "cat", baseSpec)), &base); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"} {
		if !slices.ContainsFunc(base.ContainerEdits.DeviceNodes, func(n *specs.DeviceNode) bool { return n.Path == name }) {
			t.Errorf("the base spec lacks device node %s", name)
		}
	}
	for _, name := range []string{"libnvidia-ml.so.", "libcuda.so.", "libnvidia-ptxjitcompiler.so.", "nvidia-smi"} {
		if name == "nvidia-smi" && w.sim.SMI == "" {
			continue
		}
		if mountedAt(base, name) == "" {
			t.Errorf("the base spec lacks %s", name)
		}
	}
	for _, m := range base.ContainerEdits.Mounts {
		if strings.HasPrefix(m.ContainerPath, "/usr/lib") && !strings.HasPrefix(m.HostPath, driverRoot) {
			t.Errorf("%s comes from %s on the host, want it from below %s", m.ContainerPath, m.HostPath, driverRoot)
		}
	}
	cards := w.mustExec(t, ns, "first", "", "sh", "-c", "ls -d /dev/nvidia[0-9]*")
	if len(strings.Fields(cards)) != 1 {
		t.Errorf("the container has the cards %q, want one", cards)
	}
	if w.sim.SMI == "" {
		t.Log("SKIPPED in part: no NVML check in the container without the real nvidia-smi")
		return base
	}
	if got, want := w.visible(t, ns, "first", ""), w.uuids(t, w.claimOf(t, ns, "first", "gpu")); !slices.Equal(got, want) {
		t.Errorf("nvidia-smi lists %q, allocated is %q", got, want)
	}
	return base
}

// mountedAt returns the container path at which the base CDI spec mounts the file whose name begins
// with name, or the empty string.
func mountedAt(spec specs.Spec, name string) string {
	for _, m := range spec.ContainerEdits.Mounts {
		if strings.HasPrefix(m.ContainerPath[strings.LastIndex(m.ContainerPath, "/")+1:], name) {
			return m.ContainerPath
		}
	}
	return ""
}

// saysWhy waits until a node that never served claims reports the reason in the readiness probe,
// the log and an Event. It fails the test if the node has published anything.
func (w *world) saysWhy(t *testing.T, node, reason string) {
	t.Helper()
	w.saysWhyNot(t, node, reason)
	if s := w.slices(t, node); len(s) > 0 {
		t.Errorf("node %s has published %d slices although it cannot serve: %s", node, len(s), reason)
	}
}

// saysWhyNot waits until readiness, log and a Node Event give the reason why the node cannot serve.
func (w *world) saysWhyNot(t *testing.T, node, reason string) {
	t.Helper()
	eventually(t, 60*time.Second, fmt.Sprintf("readiness, log and an Event of node %s say %q", node, reason), func() (bool, string) {
		ready := w.readiness(t, node)
		if !strings.Contains(ready, reason) {
			return false, "readiness: " + ready
		}
		if log := w.logOf(t, node); !strings.Contains(log, reason) {
			return false, "log: " + log
		}
		events := w.events(t, "default", node)
		return strings.Contains(events, "DevicesUnavailable: This node refuses to prepare claims: ") &&
			strings.Contains(events, reason), "Events: " + events
	})
}

// livePlugin returns the node's running plugin Pod, ready or not, but not one that is terminating.
func (w *world) livePlugin(t *testing.T, node string) corev1.Pod {
	t.Helper()
	var found corev1.Pod
	eventually(t, 60*time.Second, "node "+node+" has a plugin", func() (bool, string) {
		pods := w.instances(t, node)
		i := slices.IndexFunc(pods, func(p corev1.Pod) bool { return p.DeletionTimestamp == nil && p.Status.Phase == corev1.PodRunning })
		if i >= 0 {
			found = pods[i]
		}
		return i >= 0, fmt.Sprint(len(pods), " Pods, none running")
	})
	return found
}

// sameInstance checks that the plugin's Pod and its process are the same as before.
func (w *world) sameInstance(t *testing.T, before corev1.Pod) {
	t.Helper()
	now := w.livePlugin(t, before.Spec.NodeName)
	if now.UID != before.UID || now.Status.ContainerStatuses[0].RestartCount != before.Status.ContainerStatuses[0].RestartCount {
		t.Errorf("the plugin of node %s was restarted: %+v", before.Spec.NodeName, now.Status.ContainerStatuses)
	}
}

// readiness returns the plugin's answer to the kubelet's readiness probe.
func (w *world) readiness(t *testing.T, node string) string {
	t.Helper()
	return strings.TrimSpace(w.get(t, node, "readyz"))
}

// get returns what the node's plugin serves over HTTP on a path.
func (w *world) get(t *testing.T, node, path string) string {
	t.Helper()
	p := w.livePlugin(t, node)
	out, _ := w.node(t, node).Exec(t.Context(), "curl", "--silent", "--show-error", "--max-time", "5", "http://"+p.Status.PodIP+":8080/"+path)
	return out
}

// counts fails the test unless the plugin's metrics count an error with this cause for this
// operation, which is prepare or unprepare.
func (w *world) counts(t *testing.T, node, operation, cause string) {
	t.Helper()
	series := fmt.Sprintf("gpu_dra_request_errors_total{cause=%q,operation=%q} ", cause, operation)
	if metrics := w.get(t, node, "metrics"); !strings.Contains(metrics, series) {
		t.Errorf("the metrics have no %s: %s", series, metrics)
	}
}

func (w *world) logOf(t *testing.T, node string) string {
	t.Helper()
	out, err := w.Kubectl(t.Context(), "-n", clusterharness.Namespace, "logs", w.livePlugin(t, node).Name)
	if err != nil {
		return err.Error()
	}
	return out
}

// inventoryOf returns the output of the plugin's inventory subcommand on a node.
func (w *world) inventoryOf(t *testing.T, node string) (string, error) {
	t.Helper()
	return w.exec(t, clusterharness.Namespace, w.livePlugin(t, node).Name, "", "gpu-kubelet-plugin", "inventory")
}
