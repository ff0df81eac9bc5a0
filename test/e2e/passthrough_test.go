package e2e

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// mountModules shows the simulated node's list of VFIO drivers where a host has it.
const mountModules = "mkdir -p /lib/modules\nmount --bind " + clusterharness.NodeRoot + "/lib/modules /lib/modules"

// TestPassthrough gives GPUs to virtual machines while other Pods use the rest of the node's GPUs.
// The sysfs of the node is simulated. No virtual machine runs.
func TestPassthrough(t *testing.T) {
	t.Parallel()
	node := passthroughNode(t)
	probe := buildProgram(t, "probe")
	if b, err := built(); err == nil { // otherwise simulator has ended the test
		addMetadataReader(t, b.root, probe)
	}
	node.Mounts = []cluster.Mount{{Source: probe, Target: probeDir}}
	w := bringUp(t, "e2e-vfio", node)
	w.needSMI(t)
	w.nvmlsim(t, h100, "vfio", "load")
	bare, functions := w.simulated(t), w.pciFunctions(t)
	values := []string{
		"--set", "passthrough.enabled=true",
		"--set-json", `shares=[{"gpus":"0000:9d:00.0","kind":"shares","count":4}]`,
	}
	w.install(t, values...)
	t.Run("together with a whole GPU, 14 partitions and a share", func(t *testing.T) {
		w.testPassthrough(t, functions, "0000:61:00.0", "0000:c3:00.0")
	})
	t.Run("manifests for NVIDIA's DRA driver, and the example", w.testPassthroughManifests)
	t.Run("a process that has a GPU open", w.testForeignHolder)
	t.Run("an admin unbinds a GPU and binds it again", w.testUnboundByHand)
	t.Run("without partitions, and while nvidia-persistenced runs", func(t *testing.T) {
		w.install(t, append(values, "--set", "mig.policy=static")...)
		w.persistenced(t)
		w.testPassthrough(t, functions)
	})
	t.Run("the GPUs serve whole again and are as they were", func(t *testing.T) { w.isBare(t, bare) })
}

// passthroughNode is a node with a simulated sysfs. more are arguments for the simulator.
func passthroughNode(t *testing.T, more ...string) cluster.NodeOptions {
	t.Helper()
	node := simulator(t).Node(h100, "h100-passthrough", more...)
	node.BootHook = append([]string{"/bin/sh", "-ec", `"$@"; ` + mountModules, "boot"}, node.BootHook...)
	return node
}

// TestPassthroughWithoutDriver gives a GPU of a node that has no NVIDIA driver to a virtual
// machine, also after a power cut and while the plugin is killed.
func TestPassthroughWithoutDriver(t *testing.T) {
	t.Parallel()
	w := bringUp(t, "e2e-nodriver", passthroughNode(t, "--no-driver"))
	w.nvmlsim(t, h100, "vfio", "load")
	before := w.pciFunctions(t)
	w.install(t, "--set", "passthrough.enabled=true")
	eventually(t, 30*time.Second, "the node offers 8 devices", func() (bool, string) {
		devices := w.devices(t, h100)
		return len(devices) == 8, fmt.Sprint(len(devices))
	})
	u := w.tenant(t)
	u.template("vm", device("vfio.gpu.nvidia.com", "0000:1b:00.0", ""))
	u.pod("vm", onNode(h100), fromTemplate("gpu", "vm"), container("main", "gpu"), lasting)
	u.running("vm")
	group := w.on(t, h100, "sh", "-c", "basename $(readlink "+functionPath("0000:1b:00.0")+"/iommu_group)")
	hasGPU := func() {
		t.Helper()
		if got := u.sh("vm", "main", "ls -d /dev/nvidia* /dev/vfio/* 2>/dev/null || true"); got != "/dev/vfio/"+group {
			t.Errorf("the Pod has %q, want group %s", got, group)
		}
	}
	hasGPU()

	containers, node := u.containers([]string{"vm"}), w.node(t, h100)
	if err := node.PowerCut(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := node.Boot(t.Context()); err != nil {
		t.Fatal(err)
	}
	u.inNewContainers(containers)
	hasGPU()

	w.deletePlugin(t, w.livePlugin(t, h100))
	w.endPods(t, u.namespace)
	eventually(t, time.Minute, "all PCI functions are as before", func() (bool, string) {
		now := w.pciFunctions(t)
		return now == before, "was\n" + before + "is\n" + now
	})
}

// testPassthrough runs two Pods of virtual machines together with others. Each of the GPUs in cut
// serves seven partitions. In the end the PCI functions must be as before.
func (w *world) testPassthrough(t *testing.T, before string, cut ...string) {
	u := w.tenant(t)
	machines := map[string]string{"vm1": "0000:1b:00.0", "vm2": "0000:43:00.0"}
	u.template("vm1", device("vfio.gpu.nvidia.com", machines["vm1"], ""))
	u.claim("vm2", device("vfio.gpu.nvidia.com", machines["vm2"], ""))
	u.pod("vm1", onNode(h100), fromTemplate("gpu", "vm1"), container("main", "gpu"), hostPath("probe", probeDir))
	u.pod("vm2", onNode(h100), fromClaim("gpu", "vm2"), container("main", "gpu"), hostPath("probe", probeDir))
	u.template("whole", device("gpu.nvidia.com", "0000:52:00.0", ""))
	u.pod("whole", onNode(h100), fromTemplate("gpu", "whole"))
	u.template("share", shared("shared.gpu.nvidia.com", "0000:9d:00.0", "", ""))
	u.pod("share", onNode(h100), fromTemplate("gpu", "share"))
	u.running("vm1", "vm2", "whole", "share")
	for i, address := range cut {
		name := fmt.Sprint("cut", i)
		u.template(name, fmt.Sprintf(
			`requests: [{name: mig, exactly: {deviceClassName: mig.nvidia.com, count: 7, selectors: [{cel: {expression: %q}}]}}]`,
			fmt.Sprintf(`device.attributes["resource.kubernetes.io"].pciBusID == %q && device.attributes["gpu.nvidia.com"].profile == "1g.10gb"`,
				address)))
		u.pod(name, onNode(h100), fromTemplate("mig", name))
		u.running(name)
		if given := u.seesPartitions(name, "mig"); len(given) != 7 {
			t.Errorf("Pod %s has the partitions %v, want 7", name, given)
		}
	}
	for name, address := range machines {
		group := w.on(t, h100, "sh", "-c", "basename $(readlink "+functionPath(address)+"/iommu_group)")
		want := "void\n/dev/vfio/" + group
		if got := u.sh(name, "main", "echo $NVIDIA_VISIBLE_DEVICES; ls -d /dev/nvidia* /dev/vfio/* 2>/dev/null || true"); got != want {
			t.Errorf("Pod %s has\n%s, want\n%s", name, got, want)
		}
		if driver := w.on(t, h100, "sh", "-c", "basename $(readlink "+functionPath(address)+"/driver)"); driver != "vfio-pci\n" {
			t.Errorf("GPU %s has driver %s while a virtual machine may use it", address, driver)
		}
	}
	u.readsMetadata("vm1", "template", "gpu")
	u.readsMetadata("vm2", "claim", "vm2")
	u.sees("whole", "", u.allocated("whole", "gpu"))
	if taints := w.taints(t, h100); len(taints) > 0 {
		t.Errorf("devices are tainted: %v", taints)
	}
	w.endPods(t, u.namespace)
	eventually(t, 30*time.Second, "all PCI functions have their drivers again", func() (bool, string) {
		now := w.pciFunctions(t)
		return now == before, "was\n" + before + "is\n" + now
	})
}

// readsMetadata checks what a virtual machine's Pod reads about its GPU, as KubeVirt does: with
// upstream's reader, and as a program that knows only v1alpha1. name is that of the claim, or of
// the Pod's entry for a template.
func (u tenant) readsMetadata(pod, kind, name string) {
	u.t.Helper()
	r := u.claimOf(u.t, u.namespace, pod, "gpu").Status.Allocation.Devices.Results[0]
	a := u.devices(u.t, r.Pool)[r.Device].Attributes
	line := fmt.Sprintln(r.Device, *a["uuid"].StringValue, *a["resource.kubernetes.io/pciBusID"].StringValue)
	got := u.mustExec(u.t, u.namespace, pod, "main", probeDir+"/metadatareader", kind, name, "gpu")
	if want := line + "v1alpha1\n" + line; got != want {
		u.t.Errorf("Pod %s reads\n%s, want\n%s", pod, got, want)
	}
}

// testPassthroughManifests applies a manifest of the shapes that NVIDIA's DRA driver and KubeVirt
// document, and the example of our documentation.
func (w *world) testPassthroughManifests(t *testing.T) {
	u := w.tenant(t)
	u.applyTo(h100, referenceFile(t, "passthrough.yaml"))
	u.examples(func(name string) bool { return name == passthroughExample }, map[string]func(tenant){
		passthroughExample: func(u tenant) { u.running("passthrough-example") },
	})
	for pod, want := range map[string]string{
		"passthrough": "/dev/vfio/[0-9]+", "passthrough-kubevirt": "/dev/vfio/[0-9]+ /dev/vfio/vfio",
		"passthrough-iommufd": "/dev/iommu /dev/vfio/devices/vfio[0-9]+", "passthrough-example": "/dev/vfio/[0-9]+ /dev/vfio/vfio",
	} {
		u.running(pod)
		got := strings.TrimSpace(u.sh(pod, "", "ls -d /dev/nvidia* /dev/iommu /dev/vfio/[0-9v]* /dev/vfio/devices/* 2>/dev/null | xargs"))
		if !regexp.MustCompile("^" + want + "$").MatchString(got) {
			t.Errorf("Pod %s has %q, want %q", pod, got, want)
		}
	}
	w.endPods(t, u.namespace)
}

const passthroughExample = "passthrough.yaml"

// testForeignHolder lets a process of the node have a GPU open. Meanwhile the GPU's device for
// virtual machines is tainted, and no other. The node's /proc is simulated, so the process is, too.
// It has the name of the plugin, as the plugin of NVIDIA's DRA driver has.
func (w *world) testForeignHolder(t *testing.T) {
	const held, process = "gpu-0000-d1-00-0-vfio", clusterharness.NodeRoot + "/proc/4242"
	w.on(t, h100, "sh", "-ec", "mkdir -p "+process+"/fd; echo gpu-kubelet-plu >"+process+"/comm; ln -s /dev/nvidia6 "+process+"/fd/3")
	w.becomes(t, held, "gpu.nvidia.com/in-use=:NoSchedule")
	if taints := w.taints(t, h100); len(taints) != 1 {
		t.Errorf("devices are tainted: %v", taints)
	}
	w.on(t, h100, "rm", "-r", process)
	w.becomes(t, held)
}

// testUnboundByHand unbinds a GPU from NVIDIA's driver, which waits until no process has it open.
// The plugin's watcher must close it, and a new one must watch the GPU after it is bound again.
func (w *world) testUnboundByHand(t *testing.T) {
	const address, name = "0000:df:00.0", "gpu-0000-df-00-0"
	driver := clusterharness.NodeRoot + "/sys/bus/pci/drivers/nvidia/"
	w.on(t, h100, "timeout", "60", "sh", "-c", "echo "+address+" > "+driver+"unbind")
	w.becomes(t, name, "gpu.nvidia.com/gpu-lost=:NoSchedule")
	w.on(t, h100, "timeout", "60", "sh", "-c", "echo "+address+" > "+driver+"bind")
	w.becomes(t, name)
	eventually(t, 30*time.Second, "the watcher receives the GPU's events", func() (bool, string) {
		w.nvmlsim(t, h100, "xid", address, "31")
		metrics := w.get(t, h100, "metrics")
		return strings.Contains(metrics, fmt.Sprintf(`gpu_dra_health_events_total{code="xid-31",gpu=%q} `, name)), metrics
	})
}

// persistenced starts nvidia-persistenced on the node for the rest of the test. It has all GPUs
// open.
func (w *world) persistenced(t *testing.T) {
	t.Helper()
	const script = `setsid "$@" </dev/null >/run/persistenced 2>&1 & echo $!`
	pid := strings.TrimSpace(w.on(t, h100, "sh", "-c", script, "sh", w.sim.Tool, "--root", clusterharness.NodeRoot, "persistenced"))
	t.Cleanup(func() { _, _ = w.node(t, h100).Exec(context.WithoutCancel(t.Context()), "kill", pid) })
	eventually(t, 30*time.Second, "nvidia-persistenced has the GPUs open", func() (bool, string) {
		out := w.on(t, h100, "cat", "/run/persistenced")
		return out == "open\n", out
	})
}

func functionPath(address string) string {
	return clusterharness.NodeRoot + "/sys/bus/pci/devices/" + address
}

// pciFunctions returns the driver and the driver_override of each PCI function of the node.
func (w *world) pciFunctions(t *testing.T) string {
	t.Helper()
	return w.on(t, h100, "sh", "-c", `for f in `+functionPath("*")+`; do
		echo "$(basename $f) $(basename "$(readlink $f/driver)") $(cat $f/driver_override)"
	done`)
}
