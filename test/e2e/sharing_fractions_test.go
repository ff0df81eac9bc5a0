package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// asUser runs all containers of a Pod as an ordinary user.
func asUser(uid int64) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsUser: ptr.To(uid), RunAsGroup: ptr.To(uid), RunAsNonRoot: ptr.To(true)}
	}
}

// isHeldTo fails the test unless the MPS variables of a Pod's container name these limits and MPS
// enforces them on a program there. If cores is 0, the claim has no limit of threads. The result is
// the program's report.
func (u tenant) isHeldTo(pod string, mib uint64, cores int) computed {
	u.t.Helper()
	want := fmt.Sprintf("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=%dM\nCUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps", mib)
	threads := 100.0
	if cores > 0 {
		want, threads = fmt.Sprintf("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=%d\n", cores)+want, float64(cores)
	}
	if got := u.mpsVariables(pod, ""); got != want {
		u.t.Errorf("Pod %s has the variables\n%s\nwant\n%s", pod, got, want)
	}
	c := u.computes(pod, "")
	if c.Mode != "mps" || len(c.Devices) != 1 || c.Devices[0].Limit != mib || c.Devices[0].Threads != threads || c.MiB == 0 || c.MiB > mib {
		u.t.Errorf("a program in Pod %s got %+v, want a client of MPS with at most %d MiB and %v %% of the threads", pod, c, mib, threads)
	}
	return c
}

func (w *world) testFractions(t *testing.T) {
	u := w.tenant(t)
	const mib = 18 << 10
	u.template("share", shared("shared.gpu.nvidia.com", fractioned, "capacity: {requests: {memory: 18Gi, cores: 20}}", ""))
	u.template("unlimited", shared("shared.gpu.nvidia.com", fractioned, "capacity: {requests: {memory: 18Gi}}", ""))
	u.template("alone", shared("gpu.nvidia.com", fractioned, "", ""))
	u.pod("s0", onNode(h100), fromTemplate("gpu", "share"))
	u.pod("s1", onNode(h100), fromTemplate("gpu", "share"), asUser(1001))
	u.pod("s2", onNode(h100), fromTemplate("gpu", "share"), asUser(1002))
	// The scheduler of Kubernetes 1.37.2 may count a share twice while it binds the share's Pod. A Pod
	// for which nothing seems left then waits for minutes.
	u.running("s0", "s1", "s2")
	u.pod("s3", onNode(h100), fromTemplate("gpu", "unlimited"))
	pods := []string{"s0", "s1", "s2", "s3"}
	u.running(pods...)
	u.pod("fifth", onNode(h100), fromTemplate("gpu", "share"))
	u.waits("fifth")
	u.pod("alone", onNode(h100), fromTemplate("gpu", "alone"))
	u.waits("alone")

	servers := map[int]bool{}
	for i, pod := range pods {
		cores := 20
		if i == 3 {
			cores = 0
		}
		u.isHeldTo(pod, mib, cores)
		u.keepsComputing(pod, "")
	}
	for _, pod := range pods {
		servers[u.computes(pod, "").Server] = true
		u.stillComputes(pod, "")
	}
	if len(servers) != 1 || servers[0] {
		t.Errorf("the four Pods are clients of the MPS servers %v, want one", servers)
	}
	if now := w.computeMode(t, fractioned); now != "Exclusive_Process" {
		t.Errorf("compute mode is %s, want Exclusive_Process", now)
	}
	if all := w.daemons(t); len(all) != 1 {
		t.Errorf("the MPS daemons are %+v, want one for the four Pods", all)
	}
	server := u.asksDaemon("s0", "", "get_server_list")
	if clients := strings.Fields(u.asksDaemon("s0", "", "get_client_list "+server)); len(clients) != len(pods) {
		t.Errorf("the clients of server %s are %v, want %d", server, clients, len(pods))
	}

	w.deletePods(t, u.namespace, "s1")
	u.running("fifth")
	u.isHeldTo("fifth", mib, 20)
	u.stillComputes("s0", "")
	u.waits("alone")
	for _, pod := range []string{"s0", "s3", "fifth"} {
		w.deletePods(t, u.namespace, pod)
	}
	if phase := u.get("alone").Status.Phase; phase != corev1.PodPending {
		t.Errorf("the Pod that wants the GPU alone is %s while a share is held", phase)
	}
	w.deletePods(t, u.namespace, "s2")
	u.running("alone")
	u.sees("alone", "", u.allocated("alone", "gpu"))
	if c := u.computes("alone", ""); c.Mode == "mps" || c.MiB < 4*mib {
		t.Errorf("a program that has the GPU alone got %+v", c)
	}
	w.unset(t, fractioned, "Default")
	w.endPods(t, u.namespace)
	w.unshared(t)
}

// testSharedPartitions shares two partitions of one GPU, which the driver creates for these claims:
// one through MPS with limited parts of its memory and compute, the other without limits.
func (w *world) testSharedPartitions(t *testing.T) {
	u := w.tenant(t)
	request := func(sharing, capacity string) string {
		return fmt.Sprintf(`requests: [{name: one, exactly: {deviceClassName: shared.gpu.nvidia.com, selectors: [{cel: {expression: %q}}]%s}}]`,
			ofGPU(cutShares)+fmt.Sprintf(` && device.attributes["gpu.nvidia.com"].sharing == %q`, sharing), capacity)
	}
	u.template("fraction", request("MPS", ", capacity: {requests: {memory: 3Gi, cores: 30}}"))
	u.template("sliced", request("TimeSlicing", ""))
	u.template("alone", shared("gpu.nvidia.com", cutShares, "", ""))
	pods := []string{"f0", "f1", "f2", "t0", "t1"}
	for _, pod := range pods {
		template := "fraction"
		if strings.HasPrefix(pod, "t") {
			template = "sliced"
		}
		u.pod(pod, onNode(h100), fromTemplate("gpu", template))
		u.running(pod)
	}
	u.pod("alone", onNode(h100), fromTemplate("gpu", "alone"))
	u.waits("alone")
	seen := map[string][]string{}
	for _, pod := range pods {
		mig := u.migVisible(pod)
		if len(mig) != 1 {
			t.Fatalf("Pod %s sees the MIG devices %v, want one", pod, mig)
		}
		seen[mig[0]] = append(seen[mig[0]], pod)
	}
	var together []string
	for _, sharers := range seen {
		together = append(together, strings.Join(sharers, " "))
	}
	slices.Sort(together)
	if want := []string{"f0 f1 f2", "t0 t1"}; !slices.Equal(together, want) {
		t.Errorf("MIG devices are shared by %q, want %q", together, want)
	}
	for _, pod := range pods[:3] {
		u.isHeldTo(pod, 3<<10, 30)
	}
	if got := u.sh("t0", "", "env | grep CUDA_MPS || true"); got != "" {
		t.Errorf("a plain share has %s", got)
	}
	if now := w.computeMode(t, cutShares); now != "Default" {
		t.Errorf("compute mode is %s in MIG mode, want Default", now)
	}
	for _, pod := range []string{"f1", "t0", "f0"} {
		w.deletePods(t, u.namespace, pod)
	}
	u.isHeldTo("f2", 3<<10, 30)
	if mig := u.migVisible("t1"); len(mig) != 1 {
		t.Errorf("the last Pod with a share sees %v, want one MIG device", mig)
	}
	w.deletePods(t, u.namespace, "f2", "t1")
	u.running("alone")
	w.endPods(t, u.namespace)
	w.uncut(t, h100)
	w.unshared(t)
}

// testRefusedSharing expects that the combinations that the documentation rules out are refused,
// with the reason in an Event of the Pod.
func (w *world) testRefusedSharing(t *testing.T) {
	u := w.tenant(t)
	fraction := "capacity: {requests: {memory: 2Gi}}"
	for name, c := range map[string]struct {
		devices string
		texts   []string
	}{
		"slices-of-a-fraction": {shared("shared.gpu.nvidia.com", fractioned, fraction, slicing("Long")),
			[]string{"sharing.strategy TimeSlicing", "MPS enforces the limits"}},
		"other-limits": {shared("shared.gpu.nvidia.com", fractioned, fraction,
			gpuConfig("sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 90}}")), []string{"sharing.mpsConfig"}},
		"mps-of-a-plain-share": {shared("shared.gpu.nvidia.com", timeSliced, "", gpuConfig("sharing: {strategy: MPS}")),
			[]string{"sharing.strategy MPS", "fractions"}},
		"no-such-device": {shared("gpu.nvidia.com", whole2, "",
			gpuConfig("sharing: {strategy: MPS, mpsConfig: {defaultPerDevicePinnedMemoryLimit: {'1': 1Gi}}}")),
			[]string{"defaultPerDevicePinnedMemoryLimit"}},
	} {
		u.template(name, c.devices)
		u.pod(name, onNode(h100), fromTemplate("gpu", name))
		w.refused(t, u.namespace, name, c.texts...)
	}
	// A process can be a client of one MPS daemon only. So one claim cannot have a share with MPS
	// limits of a GPU and another of a partition on another GPU.
	u.template("two", fmt.Sprintf(`
requests:
- {name: gpu, exactly: {deviceClassName: shared.gpu.nvidia.com, capacity: {requests: {memory: 2Gi}},
     selectors: [{cel: {expression: %q}}]}}
- {name: mig, exactly: {deviceClassName: shared.gpu.nvidia.com, capacity: {requests: {memory: 2Gi}},
     selectors: [{cel: {expression: %q}}]}}`, ofGPU(fractioned), ofGPU(cutShares)))
	u.pod("two", onNode(h100), fromTemplate("gpu", "two"))
	w.refused(t, u.namespace, "two", "make them two claims")
	w.endPods(t, u.namespace)
	w.unshared(t)

	// Several shares of one device in one claim must get the sum of their limits.
	u.template("sum", fmt.Sprintf(`
requests:
- {name: a, exactly: {deviceClassName: shared.gpu.nvidia.com, capacity: {requests: {memory: 2Gi, cores: 10}},
     selectors: [{cel: {expression: %q}}]}}
- {name: b, exactly: {deviceClassName: shared.gpu.nvidia.com, capacity: {requests: {memory: 3Gi, cores: 15}},
     selectors: [{cel: {expression: %q}}]}}`, ofGPU(fractioned), ofGPU(fractioned)))
	u.pod("sum", onNode(h100), fromTemplate("gpu", "sum"))
	u.running("sum")
	u.isHeldTo("sum", 5<<10, 25)
	w.endPods(t, u.namespace)
}
