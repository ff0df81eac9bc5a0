package e2e

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// The nodes of TestMIGNodes.
const (
	nodeCards   = "cards"  // testdata/cards.yaml
	nodeLaidOut = "static" // partitioned by an admin before the driver was installed
	nodeGuest   = "guest"  // a virtual machine that can use its MIG instance and create none
)

// TestMIGNodes compares the devices that nodes offer with what must be offered for a GPU's model,
// its MIG mode, its machine, the changes by its admin and the features of the cluster.
func TestMIGNodes(t *testing.T) {
	t.Parallel()
	sim := simulator(t)
	models := cardModels(t)
	cards := cluster.NodeOptions{Name: nodeCards, Mounts: []cluster.Mount{{Source: models, Target: "/opt/models"}}}
	cards.BootHook = sim.LayoutUp(
		clusterharness.NodeRoot,
		"mixed",
		"--seed",
		nodeCards,
		"--node",
		"/opt/models/node/cards.yaml",
		"--models",
		"/opt/models",
	)
	w := bringUp(t, "e2e-mignodes", cards, sim.Node(nodeLaidOut, "static-mig"), sim.Node(nodeGuest, "vgpu-guest"))
	w.needSMI(t)
	before := w.layout(t, nodeLaidOut)
	w.install(t)

	t.Run("nodes", func(t *testing.T) {
		sideBySide(t, map[string]func(*testing.T){
			"cards of every kind": func(t *testing.T) {
				w.testCards(t)
				t.Run("a reboot and a driver reload under held partitions", w.testForgetfulHardware)
			},
			"a guest of a virtual GPU": w.testGuest,
			"what an admin cut beforehand": func(t *testing.T) {
				w.testLaidOutBefore(t, before)
				w.testAnnotation(t)
			},
			"a cluster without counters": testNoCounters,
		})
	})
	t.Run("an admin's partitions outlive an upgrade and the driver", func(t *testing.T) { w.testLayoutOutlives(t, before) })
	t.Run("an admin's partitions are handed over", w.testHandOver)
}

// cardModels returns a folder with every GPU model, a model that does not exist in reality, and the
// node file cards.yaml.
func cardModels(t *testing.T) string {
	t.Helper()
	root, err := clusterharness.Root()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(root, "test", "nvmlsim", "models"))); err != nil {
		t.Fatal(err)
	}
	for to, from := range map[string]string{
		"unseen.yaml":     filepath.Join(root, "test", "nvmlsim", "conformance", "testdata", "unseen.yaml"),
		"node/cards.yaml": filepath.Join("testdata", "cards.yaml"),
	} {
		text, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, to)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, to), text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// shapes returns what a node offers of each GPU, by the PCI address in its device name: "whole" for
// the whole GPU, "+25" for 25 partitions on demand, and PROFILE-START, such as "9-0", for a
// partition that exists.
func (w *world) shapes(t *testing.T, node string) map[string]string {
	t.Helper()
	names, counts := map[string][]string{}, map[string]int{}
	for name, d := range w.devices(t, node) {
		exists := *d.Attributes["uuid"].StringValue != "not-cut"
		card, partition, cut := strings.Cut(strings.TrimPrefix(name, "gpu-0000-"), "-mig-")
		switch {
		case !cut:
			names[card] = append(names[card], "whole")
		case exists:
			names[card] = append(names[card], partition)
		default:
			counts[card]++
		}
	}
	for card, n := range counts {
		names[card] = append(names[card], fmt.Sprint("+", n))
	}
	all := map[string]string{}
	for card, list := range names {
		slices.Sort(list)
		all[card] = strings.Join(list, " ")
	}
	return all
}

func (w *world) offersAs(t *testing.T, node string, want map[string]string) {
	t.Helper()
	eventually(t, 40*time.Second, "node "+node+" offers "+fmt.Sprint(want), func() (bool, string) {
		got := w.shapes(t, node)
		return maps.Equal(got, want), fmt.Sprint(got)
	})
}

// saysLimited waits until the plugin's log, its metric and a Node Event say for this reason that
// GPUs are not offered whole and in every partition. The metric must count this number of GPUs.
func (w *world) saysLimited(t *testing.T, node, reason string, gpus int) {
	t.Helper()
	metric := regexp.MustCompile(fmt.Sprintf(`(?m)^gpu_dra_mig_gpus\{reason="%s"\} %d$`, regexp.QuoteMeta(reason), gpus))
	eventually(
		t,
		30*time.Second,
		fmt.Sprintf("log, metric and Event of node %s say of %d GPUs: %s", node, gpus, reason),
		func() (bool, string) {
			if m := w.get(t, node, "metrics"); !metric.MatchString(m) {
				return false, strings.Join(regexp.MustCompile(`(?m)^gpu_dra_mig_gpus.*$`).FindAllString(m, -1), "\n")
			}
			if log := w.logOf(t, node); !strings.Contains(log, `limitedBecause="`+reason) {
				return false, log
			}
			events := w.events(t, "default", node)
			return regexp.MustCompile(`(?m)^GPUsLimited: .*` + regexp.QuoteMeta(reason)).MatchString(events), events
		},
	)
}

// asPromised waits until the plugin's metric counts this number of GPUs for which the node offers
// every device that their MIG policy allows.
func (w *world) asPromised(t *testing.T, node string, gpus int) {
	t.Helper()
	want := fmt.Sprintf(`gpu_dra_mig_gpus{reason=""} %d`, gpus)
	eventually(t, 30*time.Second, fmt.Sprintf("node %s offers %d GPUs as promised", node, gpus), func() (bool, string) {
		all := regexp.MustCompile(`(?m)^gpu_dra_mig_gpus.*$`).FindAllString(w.get(t, node, "metrics"), -1)
		return slices.Contains(all, want), strings.Join(all, "\n")
	})
}

// These are the driver's reasons why GPUs are not offered whole and in every partition.
const (
	ampereOff        = "MIG mode is off, and only a GPU reset enables it on this card"
	ampereOn         = "MIG mode is on, and only a GPU reset disables it on this card"
	instancesOfAdmin = "MIG instances exist that no claim created: the GPU is offered as partitioned"
	guestOnly        = "MIG instances can be used but not created here, as in a vGPU guest"
	noCounters       = "the cluster does not support shared counters (feature gate DRAPartitionableDevices, from Kubernetes 1.35), " +
		"which overlapping devices need"
)

func (w *world) testCards(t *testing.T) {
	w.offersAs(t, nodeCards, map[string]string{
		"1b-00-0": "+25 whole", "3d-00-0": "whole", "43-00-0": "+18 whole", "9b-00-0": "whole",
		"b1-00-0": "whole", "c1-00-0": "+25", "d1-00-0": "whole",
	})
	w.saysLimited(t, nodeCards, ampereOff, 1)
	w.saysLimited(t, nodeCards, ampereOff+", which is pending", 1)
	w.saysLimited(t, nodeCards, ampereOn, 1)
	w.saysLimited(t, nodeCards, "", 2)
	// If one GPU's devices consume counters, all devices must, because autoscalers then ignore a GPU
	// without counters.
	sets := map[string]bool{}
	for _, s := range w.slices(t, nodeCards) {
		for _, c := range s.Spec.SharedCounters {
			sets[c.Name] = true
		}
		for _, d := range s.Spec.Devices {
			card, _, _ := strings.Cut(d.Name, "-mig-")
			if len(d.ConsumesCounters) != 1 || d.ConsumesCounters[0].CounterSet != card {
				t.Errorf("%s consumes the counters %v, want counters of its GPU", d.Name, d.ConsumesCounters)
			}
		}
	}
	if len(sets) != 7 {
		t.Errorf("the counter sets are %v, want one for each of 7 GPUs", sets)
	}

	u := w.tenant(t)
	for pod, address := range map[string]string{"l40s": "0000:3d:00.0", "t4": "0000:9b:00.0", "a100-off": "0000:b1:00.0",
		"unseen": "0000:43:00.0"} {
		u.template(pod, device("gpu.nvidia.com", address, ""))
		u.pod(pod, onNode(nodeCards), fromTemplate("gpu", pod))
	}
	u.template("a100-on", device("mig.nvidia.com", "0000:c1:00.0", "2g.20gb"))
	u.pod("a100-on", onNode(nodeCards), fromTemplate("gpu", "a100-on"))
	u.running("l40s", "t4", "a100-off", "unseen", "a100-on")
	for _, pod := range []string{"l40s", "t4", "a100-off", "unseen"} {
		u.sees(pod, "", u.allocated(pod, "gpu"))
	}
	u.seesPartitions("a100-on", "gpu")
	u.isCut(nodeCards, "a100-on")
	w.endPods(t, u.namespace)
	u.isCut(nodeCards)
}

// device returns a claim for one device of the GPU at this PCI address: a partition of profile, or
// the whole GPU if profile is empty.
func device(class, address, profile string) string {
	wish := fmt.Sprintf(`device.attributes["resource.kubernetes.io"].pciBusID == %q`, address)
	if profile != "" {
		wish += fmt.Sprintf(` && device.attributes["gpu.nvidia.com"].profile == %q`, profile)
	}
	return fmt.Sprintf(`requests: [{name: gpu, exactly: {deviceClassName: %s, selectors: [{cel: {expression: %q}}]}}]`, class, wish)
}

// layout returns what nvidia-smi shows of a node's MIG instances and MIG devices.
func (w *world) layout(t *testing.T, node string) string {
	t.Helper()
	return w.smi(t, node, "mig", "-lgi") + w.smi(t, node, "mig", "-lci") + w.smi(t, node, "-L")
}

func (w *world) testGuest(t *testing.T) {
	w.offersAs(t, nodeGuest, map[string]string{"02-00-0": "9-0"})
	w.saysLimited(t, nodeGuest, guestOnly, 1)
	before := w.layout(t, nodeGuest)
	u := w.tenant(t)
	u.template("mig", partitions(1, "3g.20gb"))
	u.pod("first", onNode(nodeGuest), fromTemplate("mig", "mig"))
	u.running("first")
	if given := u.seesPartitions("first", "mig"); len(given) != 1 || !strings.Contains(before, given[0]) {
		t.Errorf("the Pod was allocated %v, but the host has created\n%s", given, before)
	}
	u.pod("second", onNode(nodeGuest), fromTemplate("mig", "mig"))
	u.waits("second")
	w.restartPlugin(t, nodeGuest)
	u.seesPartitions("first", "mig")
	u.remove("first")
	u.running("second")
	u.seesPartitions("second", "mig")
	w.endPods(t, u.namespace)
	if now := w.layout(t, nodeGuest); now != before {
		t.Errorf("the guest's MIG layout was\n%s\nand is\n%s", before, now)
	}
	w.clean(t, nodeGuest)
}

// annotate sets the annotation for the MIG policy of a Node. An empty policy removes the
// annotation.
func (w *world) annotate(t *testing.T, node, policy string) {
	t.Helper()
	value := "null"
	if policy != "" {
		value = fmt.Sprintf("%q", policy)
	}
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{"gpu.nvidia.com/mig-policy":%s}}}`, value)
	if _, err := w.Client.CoreV1().Nodes().Patch(t.Context(), node, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}

// testNoCounters uses a cluster in which ResourceSlices cannot have shared counters. There the
// driver must not offer a GPU both whole and in partitions, because only counters keep claims from
// getting both.
func testNoCounters(t *testing.T) {
	w := bringUpWith(t, cluster.Options{
		Name: "e2e-nocount", Nodes: []cluster.NodeOptions{simulator(t).Node(nodeLaidOut, "static-mig")},
		FeatureGates: map[string]bool{"DRAPartitionableDevices": false},
	})
	w.install(t)
	want := maps.Clone(laidOut)
	want["43-00-0"] = "whole"
	w.offersAs(t, nodeLaidOut, want)
	w.saysLimited(t, nodeLaidOut, noCounters, 1)
	w.saysLimited(t, nodeLaidOut, instancesOfAdmin, 2)
	w.saysLimited(t, nodeLaidOut, ampereOff+", which is pending", 1)
	for _, s := range w.slices(t, nodeLaidOut) {
		if len(s.Spec.SharedCounters) > 0 ||
			slices.ContainsFunc(s.Spec.Devices, func(d resourceapi.Device) bool { return len(d.ConsumesCounters) > 0 }) {
			t.Errorf("slice %s has counters", s.Name)
		}
	}
	u := w.tenant(t)
	u.template("whole", device("gpu.nvidia.com", "0000:43:00.0", ""))
	u.template("mig", partitions(1, "2g.20gb"))
	u.pod("whole", fromTemplate("gpu", "whole"))
	u.pod("mig", fromTemplate("mig", "mig"))
	u.running("whole", "mig")
	u.sees("whole", "", u.allocated("whole", "gpu"))
	u.seesPartitions("mig", "mig")
	w.endPods(t, u.namespace)
	w.clean(t, nodeLaidOut)
}
