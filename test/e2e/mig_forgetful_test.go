package e2e

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// testForgetfulHardware lets a reboot and a driver reload erase all MIG instances, and the MIG mode
// of the H100 and the X900. Claims that hold partitions must get them back.
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
		"b1-00-0": "whole", "c1-00-0": "+25", "d1-00-0": "+25", // the reboot applied the pending mode
	})

	// After a driver reload the running containers' open devices are useless. The next containers must
	// have the same partitions, or not start.
	w.nvmlsim(t, nodeCards, "fail", "nvmlDeviceCreateGpuInstanceWithPlacement", "NVML_ERROR_INSUFFICIENT_RESOURCES", "--gpu", "0000:43:00.0")
	w.nvmlsim(t, nodeCards, "driver", "reload", "--force")
	u.isCut(nodeCards, "h100-small", "h100-half", "a100")
	u.isLost("unseen")
	containers = u.containers(pods)
	for _, pod := range pods {
		u.killContainer(pod)
	}
	lost := maps.Clone(containers)
	maps.DeleteFunc(lost, func(pod, _ string) bool { return pod != "unseen" })
	delete(containers, "unseen")
	u.inNewContainers(containers)
	eventually(t, 60*time.Second, "the container whose device is lost does not start", func() (bool, string) {
		status := u.get("unseen").Status.ContainerStatuses[0]
		if status.State.Running != nil && status.ContainerID != lost["unseen"] {
			t.Fatalf("the container was started without its device:\n%s", u.sh("unseen", "", "nvidia-smi -L"))
		}
		events := u.events(t, u.namespace, "unseen")
		return strings.Contains(events, "unresolvable CDI devices"), events
	})
	w.nvmlsim(t, nodeCards, "clear")
	u.isCut(nodeCards, pods...)
	u.inNewContainers(lost)
	u.haveTheirs(allocated)
	log := w.logOf(t, nodeCards)
	for pod := range containers {
		if n := strings.Count(log, fmt.Sprintf(`"Recreating lost partition of a claim" claim="%s/%s"`, u.namespace,
			u.claimOf(t, u.namespace, pod, "gpu").Name)); n != 1 {
			t.Errorf("the partition of Pod %s was created %d times after one reload, want once", pod, n)
		}
	}

	w.endPods(t, u.namespace)
	w.uncut(t, nodeCards)
	w.clean(t, nodeCards)
}

// isLost waits until the status of a Pod's claim reports the device as not ready, and an Event of
// the claim reports it as lost.
func (u tenant) isLost(pod string) {
	u.t.Helper()
	eventually(u.t, 30*time.Second, "the claim of Pod "+pod+" says that its device is lost", func() (bool, string) {
		claim := u.claimOf(u.t, u.namespace, pod, "gpu")
		said := readiness(claim.Status.Devices, claim.Status.Allocation.Devices.Results[0].Device)
		events := u.events(u.t, u.namespace, claim.Name)
		return said == metav1.ConditionFalse && strings.Contains(events, "DeviceLost: "), fmt.Sprintf("%+v\n%s", claim.Status.Devices, events)
	})
}

// device returns the name of the device that a Pod's claim gpu was allocated.
func (u tenant) device(pod string) string {
	u.t.Helper()
	return u.claimOf(u.t, u.namespace, pod, "gpu").Status.Allocation.Devices.Results[0].Device
}

// containers returns the ID of each Pod's container, by Pod name.
func (u tenant) containers(pods []string) map[string]string {
	u.t.Helper()
	ids := map[string]string{}
	for _, pod := range pods {
		ids[pod] = u.get(pod).Status.ContainerStatuses[0].ContainerID
	}
	return ids
}

// inNewContainers waits until the Pods in old run in other containers than those with the IDs in
// old.
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

// haveTheirs checks that each Pod still has the device in allocated, sees only that device, and
// that its claim's status reports the device as ready.
func (u tenant) haveTheirs(allocated map[string]string) {
	u.t.Helper()
	for pod, want := range allocated {
		if got := u.device(pod); got != want {
			u.t.Errorf("Pod %s has device %s, it had %s", pod, got, want)
		}
		u.seesPartitions(pod, "gpu")
		eventually(u.t, 30*time.Second, "the status of Pod "+pod+"'s claim says that "+want+" is ready", func() (bool, string) {
			said := u.claimOf(u.t, u.namespace, pod, "gpu").Status.Devices
			return readiness(said, want) == metav1.ConditionTrue, fmt.Sprintf("%+v", said)
		})
	}
}

// readiness returns the status of the Ready condition that the status entries in said have for this
// device. It returns the empty string if there is no such entry or condition.
func readiness(said []resourceapi.AllocatedDeviceStatus, device string) metav1.ConditionStatus {
	for _, s := range said {
		for _, c := range s.Conditions {
			if s.Device == device && c.Type == "Ready" {
				return c.Status
			}
		}
	}
	return ""
}

var gpuInstance = regexp.MustCompile(`\|\s+(\d+)\s+MIG \S+\s+(\d+)\s+\d+\s+(\d+):\d+\s+\|`)

// cut returns the GPU instances of a node, sorted. Each is named like the partition that the driver
// would publish for it.
func (w *world) cut(t *testing.T, node string) []string {
	t.Helper()
	cards := strings.Fields(w.smi(t, node, "--query-gpu=pci.bus_id", "--format=csv,noheader"))
	var names []string
	for _, m := range gpuInstance.FindAllStringSubmatch(w.smi(t, node, "mig", "-lgi"), -1) {
		var index int
		if _, err := fmt.Sscan(m[1], &index); err != nil || index >= len(cards) {
			t.Fatalf("instance of GPU %s of %v: %v", m[1], cards, err)
		}
		address := strings.NewReplacer(":", "-", ".", "-").Replace(strings.ToLower(strings.TrimPrefix(cards[index], "0000")))
		names = append(names, "gpu-"+address+"-mig-"+m[2]+"-"+m[3])
	}
	slices.Sort(names)
	return names
}

// isCut waits until the node has exactly the GPU instances for the partitions that these Pods were
// allocated.
func (u tenant) isCut(node string, pods ...string) {
	u.t.Helper()
	var want []string
	for _, pod := range pods {
		for _, r := range u.claimOf(u.t, u.namespace, pod, "gpu").Status.Allocation.Devices.Results {
			want = append(want, r.Device)
		}
	}
	slices.Sort(want)
	eventually(u.t, 60*time.Second, fmt.Sprintf("node %s has the GPU instances %v", node, want), func() (bool, string) {
		got := u.cut(u.t, node)
		return slices.Equal(got, want), fmt.Sprint(got)
	})
}
