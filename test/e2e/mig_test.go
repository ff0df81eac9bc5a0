package e2e

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// followedWithin limits the time until the plugin publishes a change of MIG instances by an admin.
const followedWithin = 10 * time.Second

// TestMIG uses GPUs that are offered whole and in every partition. The driver partitions them for
// claims, and must leave them as they were before.
func TestMIG(t *testing.T) {
	t.Parallel()
	w := start(t, "e2e-mig", simulator(t).Node(h100, *nodeFile))
	w.needSMI(t)
	w.offersShapes(t, h100, 8, 200)

	t.Run("56 Pods take the smallest partitions of eight GPUs", w.testEveryPartition)
	t.Run("device nodes have links by number, those of a new partition too", w.testDeviceLinks)
	t.Run("a mix of partitions and whole GPUs fills the node", w.testMix)
	t.Run("a claim holds several partitions and a GPU", w.testSeveralPartitions)
	t.Run("an admin's partitions are offered unchanged", w.testStatic)
	t.Run("a partition is completed after a kill of the plugin", w.testKilledCut)
	t.Run("running claims get their partitions again after a GPU reset", w.testReset)
	t.Run("a failed partition is reported to the user and leaves nothing", w.testFailedCut)
	t.Run("nothing is left on the node", func(t *testing.T) {
		w.uncut(t, h100)
		w.clean(t, h100)
	})
}

// partitions returns a claim for count partitions of a profile.
func partitions(count int, profile string) string {
	return fmt.Sprintf(`requests: [{name: mig, exactly: {deviceClassName: mig.nvidia.com, count: %d, selectors: [{cel: {expression: %q}}]}}]`,
		count, fmt.Sprintf(`device.attributes["gpu.nvidia.com"].profile == %q`, profile))
}

// offersShapes waits until a node offers this many whole GPUs and this many partitions.
func (w *world) offersShapes(t *testing.T, node string, whole, partitions int) {
	t.Helper()
	eventually(t, 30*time.Second, fmt.Sprintf("node %s offers %d GPUs and %d partitions", node, whole, partitions), func() (bool, string) {
		count := map[string]int{}
		for _, d := range w.devices(t, node) {
			count[*d.Attributes["type"].StringValue]++
		}
		return count["gpu"] == whole && count["mig"] == partitions, fmt.Sprint(count)
	})
}

var migUUID = regexp.MustCompile(`UUID: (MIG-[0-9a-f-]+)\)`)

// migVisible returns the UUIDs of the MIG devices that nvidia-smi lists in a Pod's container,
// sorted.
func (u tenant) migVisible(pod string) []string {
	u.t.Helper()
	var uuids []string
	for _, m := range migUUID.FindAllStringSubmatch(u.sh(pod, "", "nvidia-smi -L"), -1) {
		uuids = append(uuids, m[1])
	}
	slices.Sort(uuids)
	return uuids
}

// migAllocated returns the UUIDs of the MIG devices in the status of a Pod's claim, sorted. It
// waits until the status has one for each allocated partition.
func (u tenant) migAllocated(pod, entry string) []string {
	u.t.Helper()
	var uuids []string
	eventually(u.t, 30*time.Second, "the status of the claim of Pod "+pod+" names its MIG devices", func() (bool, string) {
		claim := u.claimOf(u.t, u.namespace, pod, entry)
		uuids = nil
		for _, r := range claim.Status.Allocation.Devices.Results {
			if !strings.Contains(r.Device, "-mig-") {
				continue
			}
			i := slices.IndexFunc(claim.Status.Devices, func(s resourceapi.AllocatedDeviceStatus) bool {
				return s.Driver == r.Driver && s.Pool == r.Pool && s.Device == r.Device && s.Data != nil
			})
			if i < 0 {
				return false, fmt.Sprintf("%s is not in %+v", r.Device, claim.Status.Devices)
			}
			found := regexp.MustCompile(`"uuid":"(MIG-[0-9a-f-]+)"`).FindSubmatch(claim.Status.Devices[i].Data.Raw)
			if found == nil {
				return false, string(claim.Status.Devices[i].Data.Raw)
			}
			uuids = append(uuids, string(found[1]))
		}
		return len(uuids) > 0, "no partition is allocated"
	})
	slices.Sort(uuids)
	return uuids
}

// seesPartitions checks that nvidia-smi in a Pod lists exactly the MIG devices of the Pod's claim,
// and returns their UUIDs.
func (u tenant) seesPartitions(pod, entry string) []string {
	u.t.Helper()
	given := u.migAllocated(pod, entry)
	if seen := u.migVisible(pod); !slices.Equal(seen, given) {
		u.t.Errorf("Pod %s sees the MIG devices %v, its claim was given %v", pod, seen, given)
	}
	return given
}

// uncut waits until no GPU of the node has a GPU instance.
func (w *world) uncut(t *testing.T, node string) {
	t.Helper()
	eventually(t, 60*time.Second, "no GPU of node "+node+" has a GPU instance", func() (bool, string) {
		out := w.smi(t, node, "mig", "-lgi")
		return strings.Contains(out, "No GPU instances found") || strings.Contains(out, "No MIG-enabled devices found"), out
	})
}

// smi runs nvidia-smi on a node, as its admin does, and returns the output. It ignores the exit
// code, because some answers come with an error code.
func (w *world) smi(t *testing.T, node string, args ...string) string {
	t.Helper()
	root := "/var/lib/nvmlsim/driver"
	argv := append([]string{"env", "LD_LIBRARY_PATH=" + root + "/usr/lib/x86_64-linux-gnu", root + "/usr/bin/nvidia-smi"}, args...)
	out, err := w.node(t, node).Exec(t.Context(), argv...)
	if err != nil {
		return out + err.Error()
	}
	return out
}

func (w *world) testEveryPartition(t *testing.T) {
	long(t) // TestAwkwardNode does the same while XIDs come
	u := w.tenant(t)
	u.template("smallest", partitions(1, "1g.10gb"))
	var pods []string
	for i := range 56 {
		pods = append(pods, fmt.Sprintf("user-%d", i))
		u.pod(pods[i], onNode(h100), fromTemplate("mig", "smallest"))
	}
	u.runningWithin(5*time.Minute, pods...)
	seen := map[string]string{}
	for _, pod := range pods {
		for _, uuid := range u.seesPartitions(pod, "mig") {
			if other, twice := seen[uuid]; twice {
				t.Errorf("Pods %s and %s both have %s", other, pod, uuid)
			}
			seen[uuid] = pod
		}
	}
	if len(seen) != 56 {
		t.Errorf("%d MIG devices were seen, want 56", len(seen))
	}
	u.pod("57th", onNode(h100), fromTemplate("mig", "smallest"))
	u.waits("57th")
	u.template("whole", oneGPU)
	u.pod("whole", onNode(h100), fromTemplate("gpu", "whole"))
	u.waits("whole")
	w.endPods(t, u.namespace)
	w.uncut(t, h100)
}

// testDeviceLinks expects a link in /dev/char to each device node that containers get. Without them
// a running container loses its GPU when systemd reloads its units.
func (w *world) testDeviceLinks(t *testing.T) {
	w.linked(t, "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia7", "/dev/nvidia-caps/nvidia-cap2")
	u := w.tenant(t)
	u.template("small", partitions(1, "1g.10gb"))
	u.pod("user", onNode(h100), fromTemplate("mig", "small"))
	u.running("user")
	given := strings.Fields(u.sh("user", "", "ls -d /dev/nvidia-caps/nvidia-cap*"))
	if len(given) != 2 {
		t.Fatalf("the container has the capabilities %v, want two", given)
	}
	w.linked(t, given...)
	w.endPods(t, u.namespace)
}

// linked waits until /dev/char on the node has a link to each of the device nodes.
func (w *world) linked(t *testing.T, nodes ...string) {
	t.Helper()
	const script = `for f; do
	l=/dev/char/$((0x$(stat -c %t "$f"))):$((0x$(stat -c %T "$f")))
	[ "$(readlink $l)" = "$f" ] || echo "$f: $l"
done`
	took := eventually(t, 10*time.Second, fmt.Sprintf("links to %v", nodes), func() (bool, string) {
		out, err := w.node(t, h100).Exec(t.Context(), append([]string{"sh", "-ec", script, "sh"}, nodes...)...)
		return err == nil && out == "", fmt.Sprint(out, err)
	})
	t.Logf("%d links are there after %s", len(nodes), took.Round(time.Millisecond))
}

// endPods deletes all Pods of a namespace at once and waits until they are gone.
func (w *world) endPods(t *testing.T, namespace string) {
	t.Helper()
	if err := w.Client.CoreV1().Pods(namespace).DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, 3*time.Minute, "all Pods of "+namespace+" are gone", func() (bool, string) {
		pods, err := w.Client.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return false, err.Error()
		}
		return len(pods.Items) == 0, fmt.Sprint(len(pods.Items), " are left")
	})
}

// runningWithin waits until these Pods run. It lists all Pods of the namespace at once, which suits
// many Pods.
func (u tenant) runningWithin(within time.Duration, pods ...string) {
	u.t.Helper()
	eventually(u.t, within, fmt.Sprintf("%d Pods run", len(pods)), func() (bool, string) {
		list, err := u.Client.CoreV1().Pods(u.namespace).List(u.t.Context(), metav1.ListOptions{})
		if err != nil {
			return false, err.Error()
		}
		ready, left := 0, ""
		for i := range list.Items {
			if isReady(&list.Items[i]) {
				ready++
			} else if slices.Contains(pods, list.Items[i].Name) {
				left = list.Items[i].Name
			}
		}
		if ready >= len(pods) {
			return true, ""
		}
		return false, fmt.Sprintf("%d run; %s: %s", ready, left, u.events(u.t, u.namespace, left))
	})
}

// testMix uses all of eight GPUs at once: two as whole GPUs, and six in different mixes of
// partitions.
func (w *world) testMix(t *testing.T) {
	long(t) // TestPassthrough has another mix
	u := w.tenant(t)
	// The partitions of the six GPUs: 7g | 4g+3g | 3g+3g | 2g+2g+2g+1g | 2g+1g.20gb+1g.20gb+1g.20gb |
	// 1g.20gb+5×1g
	wishes := map[string]int{"7g.80gb": 1, "4g.40gb": 1, "3g.40gb": 3, "2g.20gb": 4, "1g.20gb": 4, "1g.10gb": 6}
	var pods []string
	u.template("whole", oneGPU)
	for i := range 2 {
		pods = append(pods, fmt.Sprintf("whole-%d", i))
		u.pod(pods[i], onNode(h100), fromTemplate("gpu", "whole"))
	}
	u.running(pods...)
	// Create the Pods from large partitions to small ones, as an admin would roll them out. A unit
	// test covers other orders.
	for _, profile := range []string{"7g.80gb", "4g.40gb", "3g.40gb", "2g.20gb", "1g.20gb", "1g.10gb"} {
		template := strings.ReplaceAll(profile, ".", "-")
		u.template(template, partitions(1, profile))
		for i := range wishes[profile] {
			pod := fmt.Sprintf("p%s-%d", template, i)
			pods = append(pods, pod)
			u.pod(pod, onNode(h100), fromTemplate("mig", template))
		}
		u.runningWithin(2*time.Minute, pods...)
	}
	for _, pod := range pods {
		if strings.HasPrefix(pod, "whole") {
			u.sees(pod, "", u.allocated(pod, "gpu"))
			if mig := u.migVisible(pod); len(mig) != 0 {
				t.Errorf("Pod %s with a whole GPU sees %v", pod, mig)
			}
			continue
		}
		u.seesPartitions(pod, "mig")
	}
	w.endPods(t, u.namespace)
	w.uncut(t, h100)

	// GPUs that were partitioned must serve whole again. The driver switches their MIG mode off.
	u.template("eight", strings.Replace(oneGPU, "gpu.nvidia.com}", "gpu.nvidia.com, count: 8}", 1))
	u.pod("eight", onNode(h100), fromTemplate("gpu", "eight"))
	u.running("eight")
	u.sees("eight", "", u.allocated("eight", "gpu"))
}

func (w *world) testSeveralPartitions(t *testing.T) {
	u := w.tenant(t)
	u.template("several", `
requests:
- {name: small, exactly: {deviceClassName: mig.nvidia.com, count: 2,
    selectors: [{cel: {expression: 'device.attributes["gpu.nvidia.com"].profile == "1g.10gb"'}}]}}
- {name: large, exactly: {deviceClassName: mig.nvidia.com,
    selectors: [{cel: {expression: 'device.attributes["gpu.nvidia.com"].profile == "3g.40gb"'}}]}}
constraints: [{requests: [small, large], matchAttribute: gpu.nvidia.com/parentUUID}]`)
	u.template("apart", `
requests:
- {name: mig, exactly: {deviceClassName: mig.nvidia.com, count: 3,
    selectors: [{cel: {expression: 'device.attributes["gpu.nvidia.com"].profile == "2g.20gb"'}}]}}
- {name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}
constraints: [{requests: [mig], distinctAttribute: gpu.nvidia.com/parentUUID}]`)
	u.pod("together", onNode(h100), fromTemplate("mig", "several"))
	u.pod("apart", onNode(h100), fromTemplate("mig", "apart"))
	u.running("together", "apart")
	if got := u.seesPartitions("together", "mig"); len(got) != 3 {
		t.Errorf("Pod together has %v, want 3 MIG devices", got)
	}
	if got := u.seesPartitions("apart", "mig"); len(got) != 3 {
		t.Errorf("Pod apart has %v, want 3 MIG devices", got)
	}
	parents := map[string]bool{}
	for _, r := range u.claimOf(t, u.namespace, "together", "mig").Status.Allocation.Devices.Results {
		parents[*w.devices(t, h100)[r.Device].Attributes["parentUUID"].StringValue] = true
	}
	if len(parents) != 1 {
		t.Errorf("the partitions of Pod together are of the GPUs %v, want one", parents)
	}
	out, err := w.inventoryOf(t, h100)
	if made := regexp.MustCompile(` a claim +MIG-`).FindAllString(out, -1); err != nil || len(made) != 6 ||
		strings.Contains(out, " an admin ") {
		t.Errorf("the inventory does not list six partitions of claims: %v\n%s", err, out)
	}
	w.endPods(t, u.namespace)
	w.uncut(t, h100)
}

// testStatic partitions a GPU by hand. Its MIG layout must stay unchanged through a claim, a
// restart of the plugin and an upgrade of the chart.
func (w *world) testStatic(t *testing.T) {
	u := w.tenant(t)
	gpu := "gpu-0000-df-00-0"
	w.asAdmin(t, func() { w.cutInHalves(t, "7") })
	layout := func() string {
		_, list, _ := strings.Cut(w.smi(t, h100, "-L"), "GPU 7:")
		return w.smi(t, h100, "mig", "-i", "7", "-lgi") + list
	}
	before := layout()
	offered := func() []string {
		var names []string
		for name := range w.devices(t, h100) {
			if strings.HasPrefix(name, gpu) {
				names = append(names, strings.TrimPrefix(name, gpu))
			}
		}
		slices.Sort(names)
		return names
	}
	took := eventually(t, followedWithin, "the GPU is offered as the admin partitioned it", func() (bool, string) {
		got := offered()
		return slices.Equal(got, []string{"-mig-9-0", "-mig-9-4"}), fmt.Sprint(got)
	})
	t.Logf("the admin's layout was published after %s", took.Round(100*time.Millisecond))
	if took > followedWithin {
		t.Errorf("the admin's layout was published after %s, want at most %s", took, followedWithin)
	}

	u.template("half", partitions(1, "3g.40gb"))
	u.template(
		"admins",
		`requests: [{name: mig, exactly: {deviceClassName: mig.nvidia.com, count: 2, selectors: [{cel: {expression: `+
			`'device.attributes["gpu.nvidia.com"].uuid != "not-cut"'}}]}}]`,
	)
	u.pod("user", onNode(h100), fromTemplate("mig", "admins"))
	u.running("user")
	given := u.seesPartitions("user", "mig")
	for _, uuid := range given {
		if !strings.Contains(before, uuid) {
			t.Errorf("%s is not a MIG device of the admin:\n%s", uuid, before)
		}
	}
	w.restartPlugin(t, h100)
	w.install(t, "--set", "logVerbosity=5")
	if now := layout(); now != before {
		t.Errorf("the admin's layout was\n%s\nand is\n%s", before, now)
	}
	w.endPods(t, u.namespace)
	if now := layout(); now != before {
		t.Errorf("after the claim the admin's layout is\n%s", now)
	}
	// When the admin removes the MIG instances, the plugin must offer the empty GPU whole and in every
	// partition again.
	w.removeInstances(t, "7")
	took = eventually(t, followedWithin, "the empty GPU is offered whole and in every partition", func() (bool, string) {
		got := offered()
		return len(got) == 26, fmt.Sprint(got)
	})
	if took > followedWithin {
		t.Errorf("the empty GPU was offered after %s, want at most %s", took, followedWithin)
	}
}

// cutInHalves makes two instances 3g.40gb on a GPU, as its admin does. The awkward node refuses the
// first instance once, and nvidia-smi takes half a minute there if no other process has a GPU open.
func (w *world) cutInHalves(t *testing.T, index string) {
	t.Helper()
	w.smi(t, h100, "-i", index, "-mig", "1")
	eventually(t, time.Minute, "the admin makes two instances", func() (bool, string) {
		out := w.smi(t, h100, "mig", "-i", index, "-cgi", "9,9", "-C")
		return strings.Count(w.smi(t, h100, "mig", "-i", index, "-lci"), "3g.40gb") == 2, out
	})
}

// removeInstances removes all instances of a GPU, as its admin does. The removal may fail for a
// second while the plugin reads the instances.
func (w *world) removeInstances(t *testing.T, index string) {
	t.Helper()
	eventually(t, 10*time.Second, "the admin removes the instances", func() (bool, string) {
		out := w.smi(t, h100, "mig", "-i", index, "-dci") + w.smi(t, h100, "mig", "-i", index, "-dgi")
		return strings.Contains(w.smi(t, h100, "mig", "-i", index, "-lgi"), "No GPU instances"), out
	})
}

// restartPlugin deletes the plugin's Pod on a node and waits until the next one is ready.
func (w *world) restartPlugin(t *testing.T, node string) {
	t.Helper()
	old := w.instance(t, node)
	if err := w.Client.CoreV1().Pods(old.Namespace).Delete(t.Context(), old.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, 90*time.Second, "another plugin serves node "+node, func() (bool, string) {
		pods := w.instances(t, node)
		return len(pods) == 1 && pods[0].UID != old.UID && isReady(&pods[0]), fmt.Sprint(len(pods))
	})
}

// testKilledCut kills the plugin and all its processes after they created a GPU instance and before
// its compute instance. The next plugin must complete the partition.
func (w *world) testKilledCut(t *testing.T) {
	u := w.tenant(t)
	w.nvmlsim(t, h100, "slow", "nvmlGpuInstanceCreateComputeInstance", "1h")
	u.template("half", partitions(1, "3g.40gb"))
	u.pod("user", onNode(h100), fromTemplate("mig", "half"))
	eventually(t, 60*time.Second, "the GPU instance exists, and the compute instance does not", func() (bool, string) {
		out := w.nvmlsim(t, h100, "show")
		return regexp.MustCompile(`nvmlGpuInstanceCreateComputeInstance\s.*\b[1-9]\d*\b`).MatchString(out) &&
			!strings.Contains(w.smi(t, h100, "mig", "-lgi"), "No GPU instances"), out
	})
	w.on(
		t,
		h100,
		"/bin/sh",
		"-c",
		`for p in /proc/[0-9]*; do [ "$(readlink $p/exe)" != /usr/bin/gpu-kubelet-plugin ] || kill -9 ${p#/proc/}; done; true`,
	)
	w.nvmlsim(t, h100, "clear")
	u.running("user")
	u.seesPartitions("user", "mig")
	if out := w.smi(t, h100, "mig", "-lgi"); strings.Count(out, "MIG 3g.40gb") != 1 {
		t.Errorf("want one GPU instance 3g.40gb:\n%s", out)
	}
	w.endPods(t, u.namespace)
	w.uncut(t, h100)
}

// testReset resets the GPU of a prepared claim. The GPU loses its MIG instances, but the claim's
// checkpoint record still names them, so the plugin must create them again.
func (w *world) testReset(t *testing.T) {
	u := w.tenant(t)
	u.template("half", partitions(1, "3g.40gb"))
	u.pod("user", onNode(h100), fromTemplate("mig", "half"))
	u.running("user")
	u.seesPartitions("user", "mig")
	r := u.claimOf(t, u.namespace, "user", "mig").Status.Allocation.Devices.Results[0]
	address := *w.devices(t, h100)[r.Device].Attributes["resource.kubernetes.io/pciBusID"].StringValue
	w.nvmlsim(t, h100, "reset", address)
	eventually(t, 60*time.Second, "the partition exists again", func() (bool, string) {
		out := w.smi(t, h100, "mig", "-lgi")
		return strings.Contains(out, "MIG 3g.40gb"), out
	})
	u.pod("next", onNode(h100), fromTemplate("mig", "half"))
	u.running("next")
	u.seesPartitions("next", "mig")
	u.seesPartitions("user", "mig")
	w.endPods(t, u.namespace)
	w.uncut(t, h100)
}

// testFailedCut makes the creation of a compute instance fail. The GPU instance must be removed, an
// Event of the Pod must give the reason, and the next try must succeed.
func (w *world) testFailedCut(t *testing.T) {
	u := w.tenant(t)
	w.nvmlsim(t, h100, "fail", "nvmlGpuInstanceCreateComputeInstance", "NVML_ERROR_INSUFFICIENT_RESOURCES")
	u.template("half", partitions(1, "3g.40gb"))
	u.pod("user", onNode(h100), fromTemplate("mig", "half"))
	eventually(t, 60*time.Second, "the Pod's Events say what failed", func() (bool, string) {
		out := u.events(t, u.namespace, "user")
		return strings.Contains(out, "compute instance"), out
	})
	w.uncut(t, h100)
	w.nvmlsim(t, h100, "clear")
	u.running("user")
	u.seesPartitions("user", "mig")
}
