package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// TestNeighbours checks what a default installation offers to other components of the cluster, how
// a change of the MIG policy spares devices that claims use, and that manifests for NVIDIA's DRA
// driver work.
func TestNeighbours(t *testing.T) {
	t.Parallel()
	sim := simulator(t)
	w := bringUp(t, "e2e-near", sim.Node(h100, "dgx-h100"), sim.Node(a100, "dgx-a100"))
	w.needSMI(t)
	w.installDefault(t)

	t.Run("a default install offers GPUs without counters", w.testDefaultOffer)
	t.Run("a default install runs Pods with nvidia.com/gpu", w.testDefaultResource)
	t.Run("a default install refuses MPS and names the value to set", w.testDefaultRefusesMPS)
	t.Run("the Operator's claims see GPUs that are held or partitioned by an admin", w.testOperatorClaims)
	t.Run("a policy changes under held claims", w.testPolicyChanges)
	t.Run("manifests of the reference driver", w.testReferenceManifests)
	t.Run("nothing is left", func(t *testing.T) {
		for _, node := range []string{h100, a100} {
			w.clean(t, node)
		}
	})
}

// installDefault installs the chart with default values, except for those that describe a simulated
// node.
func (w *world) installDefault(t *testing.T, more ...string) {
	t.Helper()
	w.install(t, append([]string{"--set", "mig.policy=static", "--set", "mps.enabled=false"}, more...)...)
}

func (w *world) testDefaultOffer(t *testing.T) {
	for _, node := range []string{h100, a100} {
		w.offersShapes(t, node, 8, 0)
		for _, s := range w.slices(t, node) {
			if len(s.Spec.SharedCounters) > 0 {
				t.Errorf("slice %s has counter sets: %v", s.Name, s.Spec.SharedCounters)
			}
			for _, d := range s.Spec.Devices {
				if len(d.ConsumesCounters) > 0 {
					t.Errorf("device %s consumes counters: %v", d.Name, d.ConsumesCounters)
				}
			}
		}
	}
	list, err := w.Client.CoreV1().Events("").List(t.Context(), metav1.ListOptions{FieldSelector: "reason=GPUsLimited"})
	if err != nil {
		t.Fatal(err)
	}
	if len(list.Items) > 0 {
		t.Errorf("a default install complains about whole GPUs: %s", list.Items[0].Message)
	}
	for _, daemonSet := range w.daemonSets(t) {
		if strings.HasSuffix(daemonSet, "-mps") {
			t.Errorf("a default install has DaemonSet %s", daemonSet)
		}
	}
}

func (w *world) daemonSets(t *testing.T) (names []string) {
	t.Helper()
	list, err := w.Client.AppsV1().DaemonSets("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range list.Items {
		names = append(names, d.Name)
	}
	return names
}

func (w *world) testDefaultResource(t *testing.T) {
	u := w.tenant(t)
	u.pod("limits", limits("1"))
	u.running("limits")
	if seen := u.visible("limits", ""); len(seen) != 1 {
		t.Errorf("a Pod with nvidia.com/gpu: 1 sees %v", seen)
	}
	w.endPods(t, u.namespace)
}

func (w *world) testDefaultRefusesMPS(t *testing.T) {
	u := w.tenant(t)
	u.template("mps", oneGPU+`
config: [{requests: [gpu], opaque: {driver: gpu.nvidia.com, parameters: `+gpuConfig("sharing: {strategy: MPS}")+`}}]`)
	u.pod("mps", fromTemplate("gpu", "mps"))
	w.refused(t, u.namespace, "mps", "mps.enabled=true")
	w.endPods(t, u.namespace)
}

// testOperatorClaims runs the claims of the GPU Operator's exporter and validator, which use admin
// access, while other claims hold GPUs and an admin has partitioned one.
func (w *world) testOperatorClaims(t *testing.T) {
	u := w.tenant(t)
	patch := []byte(`{"metadata":{"labels":{"resource.kubernetes.io/admin-access":"true"}}}`)
	if _, err := w.Client.CoreV1().Namespaces().Patch(t.Context(), u.namespace, types.MergePatchType, patch,
		metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	// Claims hold three whole GPUs, and one of the two partitions of a GPU that an admin partitioned.
	index := w.index(t, lastGPU)
	w.smi(t, h100, "-i", index, "-mig", "1")
	w.smi(t, h100, "mig", "-i", index, "-cgi", "9,9", "-C")
	w.offersShapes(t, h100, 7, 2)
	u.gpus(3)
	u.holder("holder", 3, onNode(h100))
	u.template("part", partitions(1, "3g.40gb"))
	u.pod("part", onNode(h100), fromTemplate("gpu", "part"))
	u.running("holder", "part")

	u.applyTo(h100, referenceFile(t, "exporter.yaml"))
	u.running("exporter", "validator")
	if seen := u.visible("exporter", ""); len(seen) != 7 {
		t.Errorf("the exporter sees %v, want the 7 GPUs that are whole", seen)
	}
	w.endPods(t, u.namespace)
	w.removeInstances(t, index)
	w.smi(t, h100, "-i", index, "-mig", "0")
	w.offersShapes(t, h100, 8, 0)
}

// lastGPU is the PCI address of the last GPU of the node h100.
const lastGPU = "0000:df:00.0"

// held watches the devices of claims. consumed has the counters that each device consumed when its
// claim got it. broken has an error for each device that later was not published or consumed other
// counters.
type held struct {
	*sliceWatch
	consumed map[string]string
	broken   []string
}

// watchHeld watches a node's slices. Each time the pool is complete, it compares the devices that
// claims hold with their state when the claims got them.
func (w *world) watchHeld(t *testing.T, node string) *held {
	t.Helper()
	h := &held{sliceWatch: w.watchSlices(t, node), consumed: map[string]string{}}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.each = h.check
	return h
}

func (h *held) check(pool map[string]resourceapi.Device) {
	for name, before := range h.consumed {
		d, there := pool[name]
		switch now := consumption(d); {
		case !there:
			h.broken = append(h.broken, name+" is not published, and a claim holds it")
		case now != before:
			h.broken = append(h.broken, fmt.Sprintf("%s consumes %s, and %s when a claim got it", name, now, before))
		}
	}
}

// consumption returns the counters that a device consumes, as text.
func consumption(d resourceapi.Device) string {
	var all []string
	for _, c := range d.ConsumesCounters {
		for name, counter := range c.Counters {
			all = append(all, fmt.Sprintf("%s/%s=%s", c.CounterSet, name, counter.Value.String()))
		}
	}
	slices.Sort(all)
	return "[" + strings.Join(all, " ") + "]"
}

// hold makes the watch compare the device of a Pod's claim from now on, and returns the name of the
// device.
func (h *held) hold(u tenant, pod string) (name string) {
	u.t.Helper()
	name = u.device(pod)
	now := h.world.devices(u.t, h.node)[name]
	h.mu.Lock()
	defer h.mu.Unlock()
	h.consumed[name] = consumption(now)
	return name
}

// end deletes a Pod and makes the watch ignore the device of its claim.
func (h *held) end(u tenant, pod string) {
	u.t.Helper()
	name := u.device(pod)
	h.mu.Lock()
	delete(h.consumed, name)
	h.mu.Unlock()
	u.end(pod)
}

// kept fails the test if a device was not published, or consumed other counters than before, while
// a claim held it.
func (h *held) kept() {
	h.t.Helper()
	h.history(time.Now())
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, b := range slices.Compact(h.broken) {
		h.t.Error(b)
	}
}

// These are numbers of partitions that one H100 offers: everyPartition with all profiles,
// twoProfiles with 1g.10gb and 3g.40gb.
const (
	everyPartition = 25
	twoProfiles    = 7 + 2
)

func (w *world) testPolicyChanges(t *testing.T) {
	u := w.tenant(t)
	h := w.watchHeld(t, h100)
	u.gpus(1)
	u.template("small", partitions(1, "1g.10gb"))
	u.holder("whole", 1, onNode(h100))
	u.running("whole")
	wholeGPU := h.hold(u, "whole")

	// An upgrade of the chart sets the policy dynamic. The GPU that a claim uses must stay as it is,
	// and the others are offered whole and in every partition.
	w.installDefault(t, "--set", "mig.policy=dynamic")
	w.offersShapes(t, h100, 8, 7*everyPartition)
	w.warnsOfSlowScheduler(t)
	u.pod("small", onNode(h100), fromTemplate("gpu", "small"))
	u.running("small")
	small := h.hold(u, "small")

	// An annotation sets the policy static. Devices that claims use must stay published, all other
	// partitions must go, and no new partition may be allocated.
	w.annotate(t, h100, "static")
	w.offersShapes(t, h100, 7, 1)
	w.schedulerKnowsSlices(t)
	u.pod("late", onNode(h100), fromTemplate("gpu", "small"))
	u.waits("late")
	if _, there := w.devices(t, h100)[small]; !there {
		t.Errorf("%s is not offered any more", small)
	}
	h.end(u, "small")
	u.delete("late")
	w.offersShapes(t, h100, 8, 0)
	w.modeIsOff(t)

	// Annotations limit the partitions to two profiles, and then to a profile that no GPU of the node
	// has.
	w.annotate(t, h100, "{policy: dynamic, profiles: [1g.10gb, 3g.40gb]}")
	w.offersShapes(t, h100, 8, 7*twoProfiles)
	h.end(u, "whole")
	w.offersShapes(t, h100, 8, 8*twoProfiles)
	u.pod("small-again", onNode(h100), fromTemplate("gpu", "small"))
	u.running("small-again")
	h.hold(u, "small-again")
	w.annotate(t, h100, "{policy: dynamic, profiles: [1g.11gb]}")
	w.nodeHears(t, h100, "GPUsLimited", "1g.11gb", "1g.10gb+me")
	h.end(u, "small-again")
	w.offersShapes(t, h100, 8, 0)

	h.kept()
	t.Logf("%s and %s were published unchanged under all policies", wholeGPU, small)
	w.annotate(t, h100, "")
	w.offersShapes(t, h100, 8, 8*everyPartition)
	w.testConfigurations(u)
	w.installDefault(t)
	w.offersShapes(t, h100, 8, 0)
	w.modeIsOff(t)
	w.endPods(t, u.namespace)
}

// modeIsOff waits until no H100 is in MIG mode.
func (w *world) modeIsOff(t *testing.T) {
	t.Helper()
	eventually(t, 60*time.Second, "no GPU is in MIG mode", func() (bool, string) {
		out := w.smi(t, h100, "--query-gpu=index,mig.mode.current", "--format=csv,noheader")
		return !strings.Contains(out, "Enabled"), out
	})
}

// nodeHears waits for an Event about the Node with this reason and all of these texts.
func (w *world) nodeHears(t *testing.T, node, reason string, texts ...string) {
	t.Helper()
	eventually(t, 30*time.Second, fmt.Sprintf("an Event %s of node %s says %q", reason, node, texts), func() (bool, string) {
		events := w.events(t, corev1.NamespaceDefault, node)
		return slices.ContainsFunc(strings.Split(events, "\n"), func(e string) bool {
			return strings.HasPrefix(e, reason+": ") && containsAll(e, texts...)
		}), events
	})
}

// testConfigurations moves a node between pools with other partitions, shares and taint effects by
// a label, while a Pod holds a partition. The other node stays as it is. A wrong name and a wrong
// value change nothing.
func (w *world) testConfigurations(u tenant) {
	t := u.t
	values := []string{
		"--set", "mig.policy=dynamic", "--set", "configurations.whole.mig.policy=static",
		"--set", "configurations.few.mig.policy=dynamic", "--set", "configurations.few.mig.profiles={1g.10gb,3g.40gb}",
		"--set-json", `configurations.whole.shares=[{"kind":"shares","count":4}]`,
		"--set", "configurations.whole.health.effects.unhealthy=NoExecute",
	}
	w.installDefault(t, values...)
	u.pod("keeps", onNode(h100), fromTemplate("gpu", "small"))
	u.running("keeps")
	label := func(value string) {
		t.Helper()
		if _, err := w.Kubectl(t.Context(), "label", "node", h100, "--overwrite", "gpu.nvidia.com/config"+value); err != nil {
			t.Fatal(err)
		}
	}
	// The kubelet may need a minute until the plugin sees the new ConfigMap.
	eventually(t, 90*time.Second, "the label names a configuration that the plugin knows", func() (bool, string) {
		label("=few")
		events := w.events(t, corev1.NamespaceDefault, h100)
		return strings.Contains(events, "ConfigurationInForce: Configuration few is in force"), events
	})
	changed := time.Now()
	label("=whole")
	w.offersShapes(t, h100, 7, 1)
	w.offersShares(t, h100, 7)
	took := time.Since(changed)
	t.Logf("the label took effect after %s", took)
	if took > 5*time.Second {
		t.Errorf("the label took effect after %s, want 5 s", took)
	}
	w.nodeHears(t, h100, "ConfigurationInForce", "Configuration whole is in force", "gpu.nvidia.com/config")
	label("=hole")
	w.nodeHears(t, h100, "ConfigurationIgnored", `"hole", which does not exist`)
	w.offersShapes(t, h100, 7, 1)
	w.offersShares(t, a100, 0)
	u.running("keeps")
	u.end("keeps")
	// Not the last GPU: the watcher misses its XIDs while its MIG mode is disabled after the Pod.
	const other = "0000:d1:00.0"
	w.nvmlsim(t, h100, "xid", other, "95")
	w.becomes(t, wholeName(other), "gpu.nvidia.com/xid=95:NoExecute")
	label("=few")
	w.becomes(t, wholeName(other), "gpu.nvidia.com/xid=95:NoSchedule")
	w.heals(t, other)
	w.offersShapes(t, h100, 8, 8*twoProfiles)
	w.offersShares(t, h100, 0)

	w.installDefault(t, append(values, "--skip-schema-validation", "--set", "configurations.whole.mig.policy=frozen")...)
	w.nodeHears(t, h100, "ConfigurationIgnored", "line ", "configurations[whole].mig.policy", "frozen")
	w.offersShapes(t, h100, 8, 8*twoProfiles)
	w.installDefault(t, values...)
	label("-")
	w.offersShapes(t, h100, 8, 8*everyPartition)
}

// offersShares waits until the node offers shares of this many whole GPUs.
func (w *world) offersShares(t *testing.T, node string, gpus int) {
	t.Helper()
	eventually(t, 30*time.Second, fmt.Sprintf("node %s offers shares of %d GPUs", node, gpus), func() (bool, string) {
		count := 0
		for _, d := range w.devices(t, node) {
			if *d.Attributes["type"].StringValue == "gpu-share" {
				count++
			}
		}
		return count == gpus, fmt.Sprint(count)
	})
}

// warnsOfSlowScheduler waits for the Event that warns that counters slow the scheduler down. From
// Kubernetes 1.37 on there must be none.
func (w *world) warnsOfSlowScheduler(t *testing.T) {
	t.Helper()
	if w.isBefore(t, "1.37") {
		w.nodeHears(t, h100, "SlowScheduler", "1.37")
		return
	}
	if events := w.events(t, corev1.NamespaceDefault, h100); strings.Contains(events, "SlowScheduler") {
		t.Errorf("an Event warns of a fast scheduler:\n%s", events)
	}
}
