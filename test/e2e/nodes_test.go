package e2e

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/stand"
)

// The nodes of TestNodes. A chart has one driver root, so three releases share the cluster, each on the nodes whose label says its name.
const (
	nodesLabel = "gpu-driver"

	nodeLate      = "late"      // the driver comes late, piece by piece; then it is reinstalled elsewhere
	nodeNoCDI     = "no-cdi"    // containerd ignores CDI devices
	nodeContained = "contained" // a driver container mounts its root at /run/nvidia/driver
	nodePlain     = "plain"     // driver packages were installed into the root file system

	nodesModel = "l40s-x2"
	nodesGPUs  = 2
	// nodesDevice is one of the model's devices.
	nodesDevice = "gpu-0000-3d-00-0"
)

// TestNodes is the variety of nodes: drivers that come late or are installed in unusual places, and a container runtime that would ignore the plugin.
func TestNodes(t *testing.T) {
	t.Parallel()
	w := bringUpNodes(t)
	// Nothing is shared between these four nodes but the API server, and most of the time is waiting.
	for name, test := range map[string]func(*testing.T){
		"CDISwitchedOff":  w.testCDISwitchedOff,
		"DriverContainer": w.testDriverContainer,
		"PlainHost":       w.testPlainHost,
		"Late": func(t *testing.T) {
			t.Run("DriverComesLate", w.testDriverComesLate)
			t.Run("LibrariesOffTheLinkersPath", w.testLibrariesOffTheLinkersPath)
			t.Run("BareDriverRoot", w.testBareDriverRoot)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t)
		})
	}
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
	w := bringUp(t, "e2e-nodes",
		describe(nodeLate, "own-root", "", "--no-driver", "--no-devices", "--no-uvm"),
		noCDI,
		describe(nodeContained, "container", "mkdir -p /run/nvidia", "--kind", "container", "--no-driver"),
		// As packages do: libraries, tools and firmware among those of the distribution.
		describe(nodePlain, "root", fmt.Sprintf("cp -a %[1]s/driver/usr/. /usr/; cp -a %[1]s/driver/lib/. /lib/; rm -r %[1]s/driver", stand.NodeRoot)),
	)
	w.releaseOn(t, stand.Release, "own-root")
	w.releaseOn(t, "container", "container", "--set", "driverRoot=/run/nvidia/driver", "--set", "deviceClasses.gpu.enabled=false", "--set", "deviceClasses.mig.enabled=false")
	w.releaseOn(t, "root", "root", "--set", "driverRoot=/", "--set", "deviceClasses.gpu.enabled=false", "--set", "deviceClasses.mig.enabled=false")
	return w
}

// releaseOn installs the chart on the nodes of one label, without waiting: a node that cannot serve has no plugin that is ready.
func (w *world) releaseOn(t *testing.T, release, label string, more ...string) {
	t.Helper()
	args := append([]string{
		"install", release, stand.Chart(w.root), "--namespace", stand.Namespace, "--create-namespace", "--values", stand.Values(w.root),
		"--set", "nodeSelector." + nodesLabel + "=" + label,
	}, more...)
	if _, err := w.Helm(t.Context(), args...); err != nil {
		t.Fatalf("install release %s: %v", release, err)
	}
}

func (w *world) testDriverComesLate(t *testing.T) {
	ns := w.namespace(t)
	w.apply(t, ns, podOn("first", nodeLate)) // it waits from now on, and will start the moment the node offers anything
	w.saysWhy(t, nodeLate, "libnvidia-ml.so.1 is not under the driver root")
	before := w.livePlugin(t, nodeLate)

	// The packages are installed and the module is loaded; nobody has made a device node yet.
	w.nvmlsim(t, nodeLate, "driver", "back")
	w.saysWhy(t, nodeLate, "nvidiactl is missing: run nvidia-modprobe -c=255 on the node")

	w.nvmlsim(t, nodeLate, "layout", "devices")
	w.saysWhy(t, nodeLate, "nvidia-uvm is missing: run nvidia-modprobe -u -c=0 on the node")
	if out, err := w.inventoryOf(t, nodeLate); err == nil || !strings.Contains(out, "run nvidia-modprobe -u -c=0") {
		t.Errorf("`inventory` does not say why this node offers nothing: %v\n%s", err, out)
	}

	w.nvmlsim(t, nodeLate, "layout", "devices", "--uvm")
	w.hasEverything(t, ns, nodeLate, stand.NodeRoot+"/driver")
	w.offers(t, nodeLate, nodesGPUs)
	eventually(t, 30*time.Second, "an Event and the readiness say that the node serves", func() (bool, string) {
		events, ready := w.events(t, "default", nodeLate), w.readiness(t, nodeLate)
		return strings.Contains(events, "DevicesAvailable") && ready == "ok", ready + "\n" + events
	})
	w.sameInstance(t, before)
}

// testLibrariesOffTheLinkersPath is about a folder that no linker looks into by itself, as Debian's packages use.
func (w *world) testLibrariesOffTheLinkersPath(t *testing.T) {
	before := w.livePlugin(t, nodeLate)
	w.reinstall(t, "--libdir", "usr/lib/x86_64-linux-gnu/nvidia/current")
	base := w.isFullyUsable(t, nodeLate, stand.NodeRoot+"/driver")
	if !slices.ContainsFunc(base.ContainerEdits.Hooks, func(h *specs.Hook) bool { return slices.Contains(h.Args, "update-ldcache") }) {
		t.Errorf("the base spec has no update-ldcache hook: %+v", base.ContainerEdits.Hooks)
	}
	if at := mountedAt(base, "libcuda.so."); !strings.Contains(at, "/nvidia/current/") {
		t.Errorf("libcuda is mounted at %q: this test shows nothing if the linker finds it there by itself", at)
	}
	w.sameInstance(t, before)
}

func (w *world) testBareDriverRoot(t *testing.T) {
	before := w.livePlugin(t, nodeLate)
	w.reinstall(t, "--kind", "bare")
	root := stand.NodeRoot + "/driver"
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
	// What a driver container does: it loads the module, and mounts its root file system, which has a /dev of its own, long after the plugin's start.
	w.nvmlsim(t, nodeContained, "driver", "back")
	w.on(t, nodeContained, "mkdir", root)
	w.on(t, nodeContained, "mount", "--rbind", stand.NodeRoot+"/driver", root)
	w.offers(t, nodeContained, nodesGPUs)
	base := w.isFullyUsable(t, nodeContained, root)
	for _, n := range base.ContainerEdits.DeviceNodes {
		if n.HostPath != root+n.Path {
			t.Errorf("device node %s is taken from %q on the host, want it from the driver container's /dev", n.Path, n.HostPath)
		}
	}
	// The driver container ends and takes its directory along, whoever still uses it (the plugin listens to the GPUs); its successor makes a new one.
	w.on(t, nodeContained, "umount", "-R", "-l", root)
	w.on(t, nodeContained, "rmdir", root)
	w.nvmlsim(t, nodeContained, "driver", "away", "--force")
	w.saysWhyNot(t, nodeContained, "is not under the driver root")
	w.nvmlsim(t, nodeContained, "driver", "back")
	w.on(t, nodeContained, "mkdir", root)
	w.on(t, nodeContained, "mount", "--rbind", stand.NodeRoot+"/driver", root)
	w.isFullyUsable(t, nodeContained, root)
	w.sameInstance(t, before)
}

func (w *world) testPlainHost(t *testing.T) {
	base := w.isFullyUsable(t, nodePlain, "/usr")
	for _, n := range base.ContainerEdits.DeviceNodes {
		if n.HostPath != "" {
			t.Errorf("device node %s is taken from %q, want it from where it is", n.Path, n.HostPath)
		}
	}
}

const cdiIsOff = "CDI is switched off in the container runtime"

func (w *world) testCDISwitchedOff(t *testing.T) {
	w.saysWhy(t, nodeNoCDI, cdiIsOff)
	ns := w.namespace(t)
	w.apply(t, ns, podOn("wants", nodeNoCDI))
	eventually(t, 30*time.Second, "the Pod is told that there is no GPU for it", func() (bool, string) {
		events := w.events(t, ns, "wants")
		return strings.Contains(events, "FailedScheduling"), events
	})
	// A claim that was allocated all the same (before CDI was switched off, say) is refused: without CDI its Pod would run, and see no GPU.
	w.handAllocate(t, ns, "forced", nodeNoCDI, nodesDevice)
	w.apply(t, ns, podOnClaim("forced", nodeNoCDI, "forced"))
	w.refused(t, ns, "forced", cdiIsOff, "enable_cdi = true")
	w.counts(t, nodeNoCDI, "prepare", "not-ready")
	// The remedy that it names.
	w.on(t, nodeNoCDI, "sed", "-i", "s/enable_cdi = false/enable_cdi = true/", "/etc/containerd/config.toml")
	if err := w.node(t, nodeNoCDI).RestartContainerd(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.running(t, ns, "forced", "wants")
	w.deletePods(t, ns)
	w.isFullyUsable(t, nodeNoCDI, stand.NodeRoot+"/driver")
}

// reinstall takes the driver of the late node away, with its files and device nodes, and installs it in another way, under the running plugin.
func (w *world) reinstall(t *testing.T, how ...string) {
	t.Helper()
	w.nvmlsim(t, nodeLate, "driver", "away", "--files", "--force")
	w.saysWhyNot(t, nodeLate, "libnvidia-ml.so.1 is not under the driver root")
	w.on(t, nodeLate, w.sim.LayoutUp(stand.NodeRoot, nodesModel, append([]string{"--seed", nodeLate}, how...)...)...)
	eventually(t, 30*time.Second, "the plugin is ready again", func() (bool, string) {
		ready := w.readiness(t, nodeLate)
		return ready == "ok", ready
	})
}

// isFullyUsable runs a Pod on the node and returns the base spec that it was given.
func (w *world) isFullyUsable(t *testing.T, node, driverRoot string) specs.Spec {
	t.Helper()
	w.offers(t, node, nodesGPUs)
	ns := w.namespace(t)
	w.apply(t, ns, podOn("first", node))
	return w.hasEverything(t, ns, node, driverRoot)
}

// hasEverything waits for the Pod called first and returns the base spec that it was given, which must be complete. driverRoot is where the libraries lie.
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
		t.Log("SKIPPED in part: without the real nvidia-smi nobody looked through NVML in the container")
		return base
	}
	if got, want := w.visible(t, ns, "first", ""), w.uuids(t, w.claimOf(t, ns, "first", "gpu")); !slices.Equal(got, want) {
		t.Errorf("nvidia-smi sees %q, allocated is %q", got, want)
	}
	return base
}

// mountedAt is where the base spec mounts the file whose name begins so.
func mountedAt(spec specs.Spec, name string) string {
	for _, m := range spec.ContainerEdits.Mounts {
		if strings.HasPrefix(m.ContainerPath[strings.LastIndex(m.ContainerPath, "/")+1:], name) {
			return m.ContainerPath
		}
	}
	return ""
}

// saysWhy waits until a node that has never served says why not, everywhere where someone may look, and makes sure that it publishes nothing.
func (w *world) saysWhy(t *testing.T, node, reason string) {
	t.Helper()
	w.saysWhyNot(t, node, reason)
	if s := w.slices(t, node); len(s) > 0 {
		t.Errorf("node %s has published %d slices although it cannot serve: %s", node, len(s), reason)
	}
}

// saysWhyNot waits until readiness, log and an Event of the node say why it cannot serve.
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
		return strings.Contains(events, "DevicesUnavailable: No claim is prepared on this node: ") && strings.Contains(events, reason), "Events: " + events
	})
}

// livePlugin is the node's plugin, ready or not, and not one that is going.
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

// sameInstance makes sure that the plugin's process has not been started again since.
func (w *world) sameInstance(t *testing.T, before corev1.Pod) {
	t.Helper()
	now := w.livePlugin(t, before.Spec.NodeName)
	if now.UID != before.UID || now.Status.ContainerStatuses[0].RestartCount != before.Status.ContainerStatuses[0].RestartCount {
		t.Errorf("the plugin of node %s was restarted: %+v", before.Spec.NodeName, now.Status.ContainerStatuses)
	}
}

// readiness is what the node's plugin answers to the kubelet's probe.
func (w *world) readiness(t *testing.T, node string) string {
	t.Helper()
	return strings.TrimSpace(w.get(t, node, "readyz"))
}

// get is what the node's plugin serves on a path.
func (w *world) get(t *testing.T, node, path string) string {
	t.Helper()
	p := w.livePlugin(t, node)
	out, _ := w.node(t, node).Exec(t.Context(), "curl", "--silent", "--show-error", "--max-time", "5", "http://"+p.Status.PodIP+":8080/"+path)
	return out
}

// counts makes sure that the plugin's metrics tell of a failed prepare or unprepare by its cause.
func (w *world) counts(t *testing.T, node, operation, cause string) {
	t.Helper()
	series := fmt.Sprintf("gpu_dra_request_errors_total{cause=%q,operation=%q} ", cause, operation)
	if metrics := w.get(t, node, "metrics"); !strings.Contains(metrics, series) {
		t.Errorf("the metrics have no %s: %s", series, metrics)
	}
}

func (w *world) logOf(t *testing.T, node string) string {
	t.Helper()
	out, err := w.Kubectl(t.Context(), "-n", stand.Namespace, "logs", w.livePlugin(t, node).Name)
	if err != nil {
		return err.Error()
	}
	return out
}

// inventoryOf is what the subcommand prints that an operator runs first.
func (w *world) inventoryOf(t *testing.T, node string) (string, error) {
	t.Helper()
	return w.exec(t, stand.Namespace, w.livePlugin(t, node).Name, "", "gpu-kubelet-plugin", "inventory")
}
