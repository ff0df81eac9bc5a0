package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// laidOut is how the GPUs of static-mig are offered. A GPU instance without a compute instance cannot be used.
var laidOut = map[string]string{"1b-00-0": "14-4 9-0-ci-0 9-0-ci-1", "43-00-0": "+25 whole", "9b-00-0": "5-0", "b1-00-0": "whole"}

// unchanged makes sure that nothing of what an admin cut is another than before.
func (w *world) unchanged(t *testing.T, before, after string) {
	t.Helper()
	if now := w.layout(t, nodeLaidOut); now != before {
		t.Fatalf("the admin's layout was\n%s\nand %s it is\n%s", before, after, now)
	}
}

// testLaidOutBefore: an admin's devices are offered, used and left as they are.
func (w *world) testLaidOutBefore(t *testing.T, before string) {
	w.offersAs(t, nodeLaidOut, laidOut)
	w.saysLimited(t, nodeLaidOut, instancesOfAdmin, 2)
	w.unchanged(t, before, "after the installation")
	u := w.tenant(t)
	u.template("admins", `requests: [{name: mig, exactly: {deviceClassName: mig.nvidia.com, count: 4, selectors: [{cel: {expression: '"uuid" in device.attributes["gpu.nvidia.com"]'}}]}}]`)
	u.pod("user", onNode(nodeLaidOut), fromTemplate("mig", "admins"))
	u.running("user")
	given := u.seesPartitions("user", "mig")
	for _, uuid := range given {
		if !strings.Contains(before, uuid) {
			t.Errorf("%s is none of the admin's:\n%s", uuid, before)
		}
	}
	if len(given) != 4 {
		t.Errorf("the Pod was given %v, want the admin's 4 devices", given)
	}
	w.restartPlugin(t, nodeLaidOut)
	w.offersAs(t, nodeLaidOut, laidOut)
	w.unchanged(t, before, "after a restart of the plugin under a claim")
	if now := u.seesPartitions("user", "mig"); !slices.Equal(now, given) {
		t.Errorf("the Pod had %v and has %v", given, now)
	}
	w.endPods(t, u.namespace)
	w.clean(t, nodeLaidOut)
	w.unchanged(t, before, "after a claim")
}

// testAnnotation changes what may be done about the one GPU that nobody has cut, and about one that an admin has.
func (w *world) testAnnotation(t *testing.T) {
	offers := func(policy, h100, cut string) {
		t.Helper()
		want := maps.Clone(laidOut)
		want["43-00-0"], want["1b-00-0"] = h100, cut
		maps.DeleteFunc(want, func(_, shape string) bool { return shape == "" })
		w.annotate(t, nodeLaidOut, policy)
		w.offersAs(t, nodeLaidOut, want)
	}
	asCut := laidOut["1b-00-0"]
	offers("0000:43:00.0=off,0000:1b:00.0=off", "whole", "")
	w.saysLimited(t, nodeLaidOut, "the policy is to offer it as a whole only", 1)
	w.saysLimited(t, nodeLaidOut, "MIG instances are there that no claim has made, and the policy is to offer the GPU as a whole only: remove them with nvidia-smi mig", 1)
	offers("NVIDIA H100*=static", "whole", asCut)
	w.saysLimited(t, nodeLaidOut, "the policy is to offer it as it is cut", 1)
	w.annotate(t, nodeLaidOut, "0000:43:00.0=carve")
	eventually(t, 30*time.Second, "an Event tells of an annotation that cannot be read", func() (bool, string) {
		events := w.events(t, "default", nodeLaidOut)
		return strings.Contains(events, "PolicyIgnored: ") && strings.Contains(events, `"0000:43:00.0=carve"`), events
	})
	w.offersAs(t, nodeLaidOut, map[string]string{"1b-00-0": asCut, "43-00-0": "whole", "9b-00-0": laidOut["9b-00-0"], "b1-00-0": "whole"})
	offers("", "+25 whole", asCut)
}

// testLayoutOutlives upgrades the chart and removes it.
func (w *world) testLayoutOutlives(t *testing.T, before string) {
	w.install(t, "--set", "logVerbosity=5")
	w.offersAs(t, nodeLaidOut, laidOut)
	w.unchanged(t, before, "after an upgrade")
	if out, err := w.uninstall(t); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	w.unchanged(t, before, "after the uninstallation")
	w.install(t)
	w.offersAs(t, nodeLaidOut, laidOut)
}

// testHandOver gives idle instances to the driver; one that a claim uses stays until then.
func (w *world) testHandOver(t *testing.T) {
	u := w.tenant(t)
	u.template("admins", device("mig.nvidia.com", "0000:1b:00.0", "2g.20gb"))
	u.pod("user", onNode(nodeLaidOut), fromTemplate("gpu", "admins"))
	u.running("user")
	given := u.seesPartitions("user", "gpu")
	w.annotate(t, nodeLaidOut, "0000:1b:00.0=adopt")
	want := maps.Clone(laidOut)
	want["1b-00-0"] = "14-4"
	w.offersAs(t, nodeLaidOut, want)
	if got, want := w.cut(t, nodeLaidOut), []string{"gpu-0000-1b-00-0-mig-14-4", "gpu-0000-9b-00-0-mig-5-0"}; !slices.Equal(got, want) {
		t.Errorf("the node is cut into %v, want %v", got, want)
	}
	if now := u.seesPartitions("user", "gpu"); !slices.Equal(now, given) {
		t.Errorf("the Pod had %v and has %v", given, now)
	}
	w.endPods(t, u.namespace)
	want["1b-00-0"] = "+25 whole"
	w.offersAs(t, nodeLaidOut, want)
	u.pod("next", onNode(nodeLaidOut), fromTemplate("gpu", "admins"))
	u.running("next")
	u.seesPartitions("next", "gpu")
	w.endPods(t, u.namespace)
	w.clean(t, nodeLaidOut)
	if got, want := w.cut(t, nodeLaidOut), []string{"gpu-0000-9b-00-0-mig-5-0"}; !slices.Equal(got, want) {
		t.Errorf("the node is cut into %v, want %v", got, want)
	}
}

// testForgetfulHardware: a reboot, and a reload of the driver, forget all instances, and the H100's and X900's mode. Claims that are held get theirs again.
func (w *world) testForgetfulHardware(t *testing.T) {
	u := w.tenant(t)
	pods := []string{"h100-small", "h100-half", "a100", "unseen"}
	for pod, devices := range map[string]string{
		"h100-small": device("mig.nvidia.com", "0000:1b:00.0", "1g.10gb"), "h100-half": device("mig.nvidia.com", "0000:1b:00.0", "3g.40gb"),
		"a100": device("mig.nvidia.com", "0000:c1:00.0", "2g.20gb"), "unseen": device("mig.nvidia.com", "0000:43:00.0", "2g.40gb"),
	} {
		u.template(pod, devices)
		u.pod(pod, onNode(nodeCards), fromTemplate("gpu", pod), container("main", "gpu"), lasting)
	}
	u.running(pods...)
	u.isCut(nodeCards, pods...)
	allocated := map[string]string{}
	for _, pod := range pods {
		u.seesPartitions(pod, "gpu")
		allocated[pod] = u.device(pod)
	}

	node := w.node(t, nodeCards)
	containers := u.containers(pods)
	if err := node.PowerCut(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := node.Boot(t.Context()); err != nil {
		t.Fatal(err)
	}
	u.inNewContainers(containers)
	u.isCut(nodeCards, pods...)
	u.haveTheirs(allocated)
	w.offersAs(t, nodeCards, map[string]string{
		"1b-00-0": "+25 whole", "3d-00-0": "whole", "43-00-0": "+18 whole", "9b-00-0": "whole",
		"b1-00-0": "whole", "c1-00-0": "+25", "d1-00-0": "+25", // what was pending
	})

	// Containers that run through a reload have lost what they had open. The next ones have the same partitions.
	w.nvmlsim(t, nodeCards, "driver", "reload", "--force")
	u.isCut(nodeCards, pods...)
	u.haveTheirs(allocated)
	containers = u.containers(pods)
	for _, pod := range pods {
		u.killContainer(pod)
	}
	u.inNewContainers(containers)
	u.haveTheirs(allocated)

	w.endPods(t, u.namespace)
	w.uncut(t, nodeCards)
	w.clean(t, nodeCards)
}

// device is the one that a Pod's claim was allocated.
func (u tenant) device(pod string) string {
	u.t.Helper()
	return u.claimOf(u.t, u.namespace, pod, "gpu").Status.Allocation.Devices.Results[0].Device
}

// containers are the IDs of Pods' containers.
func (u tenant) containers(pods []string) map[string]string {
	u.t.Helper()
	ids := map[string]string{}
	for _, pod := range pods {
		ids[pod] = u.get(pod).Status.ContainerStatuses[0].ContainerID
	}
	return ids
}

// inNewContainers waits until Pods run in other containers than these.
func (u tenant) inNewContainers(old map[string]string) {
	u.t.Helper()
	for pod, id := range old {
		eventually(u.t, 90*time.Second, "Pod "+pod+" runs in a new container", func() (bool, string) {
			p := u.get(pod)
			status := p.Status.ContainerStatuses
			ok := isReady(p) && len(status) > 0 && status[0].State.Running != nil && status[0].ContainerID != id
			return ok, fmt.Sprintf("%+v %s", status, u.events(u.t, u.namespace, pod))
		})
	}
}

// haveTheirs makes sure that each Pod has the device that it was allocated, sees that and nothing else, and that its claim's status says so.
func (u tenant) haveTheirs(allocated map[string]string) {
	u.t.Helper()
	for pod, want := range allocated {
		if got := u.device(pod); got != want {
			u.t.Errorf("Pod %s has %s, it had %s", pod, got, want)
		}
		u.seesPartitions(pod, "gpu")
		claim := u.claimOf(u.t, u.namespace, pod, "gpu")
		i := slices.IndexFunc(claim.Status.Devices, func(s resourceapi.AllocatedDeviceStatus) bool { return s.Device == want })
		if i < 0 || !slices.ContainsFunc(claim.Status.Devices[i].Conditions, func(c metav1.Condition) bool { return c.Type == "Ready" && c.Status == metav1.ConditionTrue }) {
			u.t.Errorf("the status of Pod %s's claim is %+v, want %s ready", pod, claim.Status.Devices, want)
		}
	}
}
