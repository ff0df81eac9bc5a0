package e2e

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// The node of the suite and its number of GPUs.
const (
	survivor     = "gpu1"
	survivorGPUs = 8
)

// TestSurvival ends the plugin, the kubelet, containerd and the node and deletes CDI specs, while
// Pods use or get devices. Afterwards every Pod must have its devices, no file of an ended claim
// may be left, and all GPUs must be usable.
func TestSurvival(t *testing.T) {
	sim := simulator(t)
	w := bringUp(t, "e2e-surv", sim.Node(survivor, "dgx-h100"))
	w.needSMI(t)
	w.install(t)
	w.offers(t, survivor, survivorGPUs)

	u := w.tenant(t)
	u.gpus(1, 2, survivorGPUs)
	// left is the UID of a claim whose Pod was deleted during the power cut. The kubelet looks for
	// such claims only once a minute, and the claim's GPU is unavailable until then. So the other
	// tests that need GPUs run earlier.
	var left string
	type part struct {
		name string
		run  func(*testing.T, tenant)
	}
	run := func(parts ...part) {
		for _, p := range parts {
			t.Run(p.name, func(t *testing.T) {
				u := u.as(t)
				defer u.describeIfFailed()
				p.run(t, u)
				u.removeAll()
				w.clean(t, survivor, left)
			})
		}
	}
	run(part{"the kubelet ends", w.testKubeletEnds})
	t.Parallel() // from here on nothing is measured
	run([]part{
		{"the plugin is killed while claims are held", w.testKilledWhileHeld},
		{"the plugin is killed while a claim waits for its GPU", w.testKilledWhileWaiting},
		{"the plugin is killed between a claim's spec and its record", w.testKilledBetween},
		{"the plugin is killed in bursts of Pods", w.testKilledInBursts},
		{"the plugin is killed while NVML does not answer", w.testKilledWithoutAnswer},
		{"the Node is deleted and registers again", w.testNodeRegistersAgain},
		{"containerd ends", w.testContainerdEnds},
		{"the specs are deleted and the container is killed", w.testSpecsDeleted},
		{"the node loses its power", func(t *testing.T, u tenant) { left = w.testPowerCut(t, u) }},
		{"what was deleted without power is given back", func(t *testing.T, _ tenant) { w.testGivenBack(t, left); left = "" }},
		{"no GPU is stuck", w.testAllGPUs},
	}...)
}

// testAllGPUs runs one Pod with all GPUs after the other tests, to show that no GPU is stuck.
func (w *world) testAllGPUs(t *testing.T, u tenant) {
	u.holder("all", survivorGPUs)
	if got := u.holding("all").gpus; len(got) != survivorGPUs {
		t.Errorf("a Pod that claims all %d GPUs was allocated %v", survivorGPUs, got)
	}
}

// as returns the tenant for a subtest, with the subtest's t.
func (u tenant) as(t *testing.T) tenant { return tenant{world: u.world, t: t, namespace: u.namespace} }

// describeIfFailed prints the Pods and claims of a failed subtest, and removes the Pods before the
// next subtest uses the namespace.
func (u tenant) describeIfFailed() {
	if !u.t.Failed() {
		return
	}
	out, _ := u.Kubectl(u.t.Context(), "-n", u.namespace, "describe", "pods,resourceclaims")
	u.t.Logf("what is in namespace %s:\n%s\nplugins:\n%s", u.namespace, out, u.pluginLogs(u.t))
	_, _ = u.Kubectl(u.t.Context(), "-n", u.namespace, "delete", "deployments,daemonsets,pods", "--all", "--wait=false")
}

// removeAll deletes all Pods and waits until they are gone.
func (u tenant) removeAll() {
	u.t.Helper()
	list, err := u.Client.CoreV1().Pods(u.namespace).List(u.t.Context(), metav1.ListOptions{})
	if err != nil {
		u.t.Fatal(err)
	}
	var pods []string
	for _, p := range list.Items {
		pods = append(pods, p.Name)
	}
	u.remove(pods...)
}

// gpus creates a claim template for each of these numbers of GPUs.
func (u tenant) gpus(counts ...int) {
	u.t.Helper()
	for _, n := range counts {
		u.template(gpusTemplate(n), fmt.Sprintf(`requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com, count: %d}}]`, n))
	}
}

func gpusTemplate(n int) string { return fmt.Sprintf("gpus-%d", n) }

// holder starts a Pod with a claim for n GPUs. The Pod's container restarts when it ends.
func (u tenant) holder(name string, n int, more ...func(*corev1.Pod)) {
	u.t.Helper()
	parts := []func(*corev1.Pod){fromTemplate("gpu", gpusTemplate(n)), container("main", "gpu"), lasting}
	u.pod(name, append(parts, more...)...)
}

// lasting makes a Pod's containers restart when they end, and gives them a variable by which
// mainProcess finds them.
func lasting(p *corev1.Pod) {
	p.Spec.RestartPolicy = corev1.RestartPolicyAlways
	for i := range p.Spec.Containers {
		p.Spec.Containers[i].Env = append(p.Spec.Containers[i].Env, corev1.EnvVar{
			Name: "TEST_POD_UID", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.uid"}},
		})
	}
}

// remove deletes Pods and waits until they are gone.
func (u tenant) remove(pods ...string) {
	u.t.Helper()
	for _, name := range pods {
		u.delete(name)
	}
	for _, name := range pods {
		u.gone(name)
	}
}

func (u tenant) delete(pod string) {
	u.t.Helper()
	err := u.Client.CoreV1().Pods(u.namespace).Delete(u.t.Context(), pod, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) { // a Pod that was deleted before may be gone by now
		u.t.Fatal(err)
	}
}

func (u tenant) gone(pod string) {
	u.t.Helper()
	eventually(u.t, 60*time.Second, "Pod "+pod+" is gone", func() (bool, string) {
		p, err := u.Client.CoreV1().Pods(u.namespace).Get(u.t.Context(), pod, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return true, ""
		}
		if err != nil {
			return false, err.Error()
		}
		return false, string(p.Status.Phase)
	})
}

// holding has the UIDs of a Pod and its claim, the claim's GPUs, and the ID and restarts of the
// Pod's container at one moment.
type holding struct {
	pod       string
	podUID    string
	claimUID  string
	gpus      []string
	container string
	restarts  int32
}

// holding waits until a Pod runs and fails the test unless the Pod sees the GPUs of its claim,
// whose entry is gpu. It returns their present state.
func (u tenant) holding(pod string) holding {
	u.t.Helper()
	u.running(pod)
	u.sees(pod, "", u.allocated(pod, "gpu"))
	return u.now(pod)
}

func (u tenant) now(pod string) holding {
	u.t.Helper()
	p := u.get(pod)
	h := holding{
		pod: pod, podUID: string(p.UID), claimUID: string(u.claimOf(u.t, u.namespace, pod, "gpu").UID),
		gpus: u.allocated(pod, "gpu"),
	}
	if len(p.Status.ContainerStatuses) > 0 {
		h.container, h.restarts = p.Status.ContainerStatuses[0].ContainerID, p.Status.ContainerStatuses[0].RestartCount
	}
	return h
}

// undisturbed fails the test unless each Pod still runs in the same container with the same claim
// and GPUs as in the parameter before.
func (u tenant) undisturbed(before ...holding) {
	u.t.Helper()
	for _, b := range before {
		now := u.holding(b.pod)
		if now.container != b.container || now.restarts != b.restarts {
			u.t.Errorf(
				"the container of Pod %s was replaced: %s after %d restarts, before %s after %d",
				b.pod,
				now.container,
				now.restarts,
				b.container,
				b.restarts,
			)
		}
		u.sameClaim(b, now)
	}
}

// restarted waits until each Pod runs in another container than in the parameter before, and fails
// the test unless the claims and GPUs are the same.
func (u tenant) restarted(before ...holding) {
	u.t.Helper()
	for _, b := range before {
		eventually(u.t, 90*time.Second, "Pod "+b.pod+" runs in a new container", func() (bool, string) {
			p := u.get(b.pod)
			status := p.Status.ContainerStatuses
			ok := isReady(p) && len(status) > 0 && status[0].State.Running != nil && status[0].ContainerID != b.container
			return ok, fmt.Sprintf("%+v %s", status, u.events(u.t, u.namespace, b.pod))
		})
		u.sameClaim(b, u.holding(b.pod))
	}
}

func (u tenant) sameClaim(before, now holding) {
	u.t.Helper()
	if now.podUID != before.podUID || now.claimUID != before.claimUID || !slices.Equal(now.gpus, before.gpus) {
		u.t.Errorf(
			"Pod %s has claim %s and GPUs %v, it had claim %s and GPUs %v",
			before.pod,
			now.claimUID,
			now.gpus,
			before.claimUID,
			before.gpus,
		)
	}
}

// distinct checks that these Pods run with n GPUs each, that each sees only its own, and that no
// two Pods share a GPU.
func (u tenant) distinct(n int, pods ...string) {
	u.t.Helper()
	owner := map[string]string{}
	for _, pod := range pods {
		for _, gpu := range u.holding(pod).gpus {
			if other, taken := owner[gpu]; taken {
				u.t.Errorf("GPU %s is in Pods %s and %s", gpu, other, pod)
			}
			owner[gpu] = pod
		}
	}
	if len(owner) != n*len(pods) {
		u.t.Errorf("%d Pods of %d GPUs each have %v", len(pods), n, slices.Sorted(maps.Keys(owner)))
	}
}

// killContainer kills the main process of the container of a Pod made with lasting.
func (u tenant) killContainer(pod string) {
	u.t.Helper()
	kill(u.t, mainProcess(u.t, "TEST_POD_UID", string(u.get(pod).UID)))
}

// forget deletes a Pod by force, without waiting for the Pod's node.
func (u tenant) forget(pod string) {
	u.t.Helper()
	err := u.Client.CoreV1().Pods(u.namespace).Delete(u.t.Context(), pod, metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))})
	if err != nil {
		u.t.Fatal(err)
	}
	u.gone(pod)
}
