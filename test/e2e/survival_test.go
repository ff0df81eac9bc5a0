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

// The node of the suite and how many GPUs it has.
const (
	survivor     = "gpu1"
	survivorGPUs = 8
)

// What ends while claims are held or prepared: the plugin, the kubelet, containerd, the node, the specs. Afterwards every Pod has what it was given, nothing
// is left over and no device is stuck. What measures how soon things are mended runs alone; the other suites mostly wait for containers, and do so
// side by side.
func TestSurvival(t *testing.T) {
	sim := simulator(t)
	w := bringUp(t, "e2e-surv", sim.Node(survivor, "dgx-h100"))
	w.needSMI(t)
	w.install(t)
	w.offers(t, survivor, survivorGPUs)

	u := w.tenant(t)
	u.gpus(1, 2, survivorGPUs)
	// The power cut leaves a claim to the kubelet, which looks for such claims once a minute. Until then its GPU is refused to others, so this comes
	// after everything that needs GPUs.
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
	run([]part{
		{"the plugin is killed while claims are held", w.testKilledWhileHeld},
		{"the plugin is killed while a claim waits for its GPU", w.testKilledWhileWaiting},
		{"the plugin is killed between a claim's spec and its record", w.testKilledBetween},
		{"the plugin is killed in bursts of Pods", w.testKilledInBursts},
		{"the plugin is killed while NVML does not answer", w.testKilledWithoutAnswer},
		{"the kubelet ends", w.testKubeletEnds},
		{"containerd ends", w.testContainerdEnds},
		{"the specs are deleted and the container is killed", w.testSpecsDeleted},
		{"the node loses its power", func(t *testing.T, u tenant) { left = w.testPowerCut(t, u) }},
	}...)
	t.Parallel() // from here on nothing is measured
	run([]part{
		{"what was deleted without power is given back", func(t *testing.T, _ tenant) { w.testGivenBack(t, left); left = "" }},
		{"no GPU is stuck", w.testAllGPUs},
	}...)
}

// testAllGPUs: after all that one Pod can have all GPUs.
func (w *world) testAllGPUs(t *testing.T, u tenant) {
	u.holder("all", survivorGPUs)
	if got := u.holding("all").gpus; len(got) != survivorGPUs {
		t.Errorf("a Pod that claims all %d GPUs was allocated %v", survivorGPUs, got)
	}
}

// as is the tenant in a subtest.
func (u tenant) as(t *testing.T) tenant { return tenant{world: u.world, t: t, namespace: u.namespace} }

// describeIfFailed shows what a subtest found, before the next one goes on in the same namespace, and takes its Pods away.
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

// gpus makes the templates for so many GPUs.
func (u tenant) gpus(counts ...int) {
	u.t.Helper()
	for _, n := range counts {
		u.template(gpusTemplate(n), fmt.Sprintf(`requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com, count: %d}}]`, n))
	}
}

func gpusTemplate(n int) string { return fmt.Sprintf("gpus-%d", n) }

// holder starts a Pod that holds n GPUs and that lasts: its containers are started again when they end.
func (u tenant) holder(name string, n int, more ...func(*corev1.Pod)) {
	u.t.Helper()
	parts := []func(*corev1.Pod){fromTemplate("gpu", gpusTemplate(n)), container("main", "gpu"), lasting}
	u.pod(name, append(parts, more...)...)
}

// lasting makes a Pod's containers start again when they end, and lets mainProcess find them.
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
	if err != nil && !apierrors.IsNotFound(err) { // one that was deleted before may have gone this moment
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

// holding is what a running Pod has.
type holding struct {
	pod       string
	podUID    string
	claimUID  string
	gpus      []string
	container string
	restarts  int32
}

// holding looks at a running Pod whose only claim is "gpu", and makes sure that it sees what it was allocated.
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

// undisturbed makes sure that Pods still run in the same containers, with the same claims and GPUs.
func (u tenant) undisturbed(before ...holding) {
	u.t.Helper()
	for _, b := range before {
		now := u.holding(b.pod)
		if now.container != b.container || now.restarts != b.restarts {
			u.t.Errorf("the container of Pod %s was replaced: %s after %d restarts, before %s after %d", b.pod, now.container, now.restarts, b.container, b.restarts)
		}
		u.sameClaim(b, now)
	}
}

// restarted waits until Pods run in new containers, and makes sure that they have the same claims and GPUs.
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
		u.t.Errorf("Pod %s has claim %s and GPUs %v, it had claim %s and GPUs %v", before.pod, now.claimUID, now.gpus, before.claimUID, before.gpus)
	}
}

// distinct makes sure that Pods run with n GPUs each, that each sees its own, and that no GPU is in two of them.
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

// killContainer kills the main process of a lasting Pod's container.
func (u tenant) killContainer(pod string) {
	u.t.Helper()
	kill(u.t, mainProcess(u.t, "TEST_POD_UID", string(u.get(pod).UID)))
}

// forget deletes a Pod that its node cannot answer for.
func (u tenant) forget(pod string) {
	u.t.Helper()
	err := u.Client.CoreV1().Pods(u.namespace).Delete(u.t.Context(), pod, metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))})
	if err != nil {
		u.t.Fatal(err)
	}
	u.gone(pod)
}
