package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

func (w *world) testOneGPU(t *testing.T) {
	w.needSMI(t)
	u := w.tenant(t)
	u.template("one", oneGPU)
	u.pod("user", onNode(h100), fromTemplate("gpu", "one"))
	u.running("user")

	allocated := u.allocated("user", "gpu")
	if len(allocated) != 1 {
		t.Fatalf("the Pod was allocated %v, want one GPU", allocated)
	}
	u.sees("user", "", allocated)
	// nvidia-smi's table must show one GPU, at the PCI address of the allocated device.
	result := u.claimOf(t, u.namespace, "user", "gpu").Status.Allocation.Devices.Results[0]
	address := *w.devices(t, h100)[result.Device].Attributes["resource.kubernetes.io/pciBusID"].StringValue
	table := u.sh("user", "", "nvidia-smi")
	if strings.Count(table, "H100") != 1 || !strings.Contains(table, strings.ToUpper("0000"+address)) ||
		!strings.Contains(table, "580.65.06") {
		t.Errorf("nvidia-smi does not print exactly one H100 at %s with driver 580.65.06:\n%s", address, table)
	}
	// The driver must set NVIDIA_VISIBLE_DEVICES to void in the container. Otherwise a container
	// runtime that injects GPUs by this variable could add GPUs that the claim does not have.
	if env := u.sh("user", "", "tr '\\0' '\\n' </proc/1/environ"); !slices.Contains(strings.Fields(env), "NVIDIA_VISIBLE_DEVICES=void") {
		t.Errorf("NVIDIA_VISIBLE_DEVICES=void is not in the container's environment:\n%s", env)
	}
}

func (w *world) testNoClaim(t *testing.T) {
	u := w.tenant(t)
	driver := "/var/lib/nvmlsim/driver"
	u.template("one", oneGPU)
	// A container without a claim must find no GPU, even if it brings the driver's programs and
	// libraries.
	u.pod("stranger", onNode(h100), container("main"), hostPath("driver", driver))
	// The same must hold for a container without a claim next to a container with a claim in one Pod.
	u.pod("mate", onNode(h100), fromTemplate("gpu", "one"), container("main", "gpu"), container("side"), hostPath("driver", driver))
	u.running("stranger", "mate")
	for _, c := range []struct{ pod, container string }{{"stranger", "main"}, {"mate", "side"}} {
		if out, err := u.exec(t, u.namespace, c.pod, c.container, "sh", "-c", "command -v nvidia-smi || ls -d /dev/nvidia*"); err == nil {
			t.Errorf("container %s of Pod %s has %s", c.container, c.pod, out)
		}
		if env := u.sh(c.pod, c.container, "env"); strings.Contains(env, "NVIDIA") {
			t.Errorf("container %s of Pod %s has NVIDIA's variables:\n%s", c.container, c.pod, env)
		}
	}
	w.needSMI(t)
	smi := "LD_LIBRARY_PATH=" + driver + "/usr/lib/x86_64-linux-gnu " + driver + "/usr/bin/nvidia-smi -L"
	for _, c := range []struct{ pod, container string }{{"stranger", "main"}, {"mate", "side"}} {
		if out, err := u.exec(t, u.namespace, c.pod, c.container, "sh", "-c", smi); err == nil ||
			!strings.Contains(out, "couldn't communicate with the NVIDIA driver") {
			t.Errorf("in container %s of Pod %s nvidia-smi says (%v):\n%s", c.container, c.pod, err, out)
		}
	}
	u.sees("mate", "main", u.allocated("mate", "gpu"))
	if out := u.sh("mate", "main", smi); !strings.Contains(out, u.allocated("mate", "gpu")[0]) {
		t.Errorf("the same command fails with a claim too, so the checks above prove nothing:\n%s", out)
	}
}

func (w *world) testNinePods(t *testing.T) {
	u := w.tenant(t)
	u.template("one", oneGPU)
	var pods []string
	for i := range 8 {
		pods = append(pods, fmt.Sprintf("user-%d", i))
		u.pod(pods[i], onNode(h100), fromTemplate("gpu", "one"))
	}
	u.running(pods...)
	u.pod("ninth", onNode(h100), fromTemplate("gpu", "one"), container("main", "gpu"), func(p *corev1.Pod) {
		p.Spec.Containers[0].Command = []string{"sh", "-c", "trap '' TERM; sleep infinity & wait"} // ends only after its grace period
		p.Spec.TerminationGracePeriodSeconds = ptr.To(int64(3))
	})
	u.waits("ninth")

	holder := map[string]string{}
	for _, pod := range pods {
		uuid := u.allocated(pod, "gpu")[0]
		if other := holder[uuid]; other != "" {
			t.Errorf("Pods %s and %s were both allocated %s", other, pod, uuid)
		}
		holder[uuid] = pod
	}
	if w.sim.SMI != "" {
		for uuid, pod := range holder {
			u.sees(pod, "", []string{uuid})
		}
	}
	// Pod user-3 ends by itself, like a job. It stays in the API as Succeeded, and the ninth Pod must
	// get its GPU.
	freed := u.allocated("user-3", "gpu")
	// The exec may fail because its container ends. The Pod's phase, checked below, is the proof.
	_, _ = w.exec(t, u.namespace, "user-3", "", "sh", "-c", "kill -TERM 1")
	u.running("ninth")
	if phase := u.get("user-3").Status.Phase; phase != corev1.PodSucceeded {
		t.Errorf("Pod user-3 is %s, want Succeeded", phase)
	}
	if got := u.allocated("ninth", "gpu"); !slices.Equal(got, freed) {
		t.Errorf("the ninth Pod was allocated %v, and %v became free", got, freed)
	}
	if w.sim.SMI != "" {
		u.sees("ninth", "", freed)
	}
	// A Pod that is deleted by force leaves the API and frees its GPU before the kubelet has ended its
	// container. The next claim must wait until the kubelet has unprepared the old one.
	u.pod("tenth", onNode(h100), fromTemplate("gpu", "one"))
	u.waits("tenth")
	holding := u.claimOf(t, u.namespace, "ninth", "gpu").Name
	u.forget("ninth")
	u.running("tenth")
	w.said(t, w.instance(t, h100), "Waiting for another claim to be unprepared", holding)
	if got := u.allocated("tenth", "gpu"); !slices.Equal(got, freed) {
		t.Errorf("the tenth Pod was allocated %v, and %v became free", got, freed)
	}
	u.noFailedPrepare()
}

func (w *world) testDeployment(t *testing.T) {
	u := w.tenant(t)
	u.template("two", `requests: [{name: gpus, exactly: {deviceClassName: gpu.nvidia.com, count: 2}}]`)
	u.apply(t, u.namespace, `
apiVersion: apps/v1
kind: Deployment
metadata: {name: pairs}
spec:
  replicas: 4
  selector: {matchLabels: {app: pairs}}
  template:
    metadata: {labels: {app: pairs}}
    spec:
      terminationGracePeriodSeconds: 1
      nodeSelector: {kubernetes.io/hostname: `+h100+`}
      containers:
      - name: main
        image: `+cluster.TestImage+`
        imagePullPolicy: Never
        command: [sh, -c, "trap 'exit 0' TERM; sleep infinity & wait"]
        resources: {claims: [{name: gpus}]}
      resourceClaims: [{name: gpus, resourceClaimTemplateName: two}]`)
	eventually(t, 60*time.Second, "four replicas are ready", func() (bool, string) {
		d, err := w.Client.AppsV1().Deployments(u.namespace).Get(t.Context(), "pairs", metav1.GetOptions{})
		if err != nil {
			return false, err.Error()
		}
		return d.Status.ReadyReplicas == 4, fmt.Sprint(d.Status)
	})
	list, err := w.Client.CoreV1().Pods(u.namespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app=pairs"})
	if err != nil {
		t.Fatal(err)
	}
	holder := map[string]string{}
	for _, pod := range list.Items {
		allocated := u.allocated(pod.Name, "gpus")
		if len(allocated) != 2 {
			t.Errorf("Pod %s was allocated %v", pod.Name, allocated)
		}
		if w.sim.SMI != "" {
			u.sees(pod.Name, "", allocated)
		}
		for _, uuid := range allocated {
			holder[uuid] = pod.Name
		}
	}
	if len(holder) != 8 {
		t.Errorf("four Pods with two GPUs each hold %d GPUs: %v", len(holder), holder)
	}
}

func (w *world) testContainers(t *testing.T) {
	w.needSMI(t)
	u := w.tenant(t)
	u.template("one", oneGPU)
	u.template(
		"pair",
		`requests: [{name: first, exactly: {deviceClassName: gpu.nvidia.com}}, {name: second, exactly: {deviceClassName: gpu.nvidia.com}}]`,
	)

	u.pod("one-claim", onNode(a100), fromTemplate("gpu", "one"), container("a", "gpu"), container("b", "gpu"))
	u.pod(
		"two-claims",
		onNode(a100),
		fromTemplate("x", "one"),
		fromTemplate("y", "one"),
		container("a", "x"),
		container("b", "y"),
		container("both", "x", "y"),
	)
	u.pod(
		"by-request",
		onNode(a100),
		fromTemplate("gpus", "pair"),
		container("a", "gpus/first"),
		container("b", "gpus/second"),
		container("both", "gpus"),
	)
	u.running("one-claim", "two-claims", "by-request")

	one := u.allocated("one-claim", "gpu")
	u.sees("one-claim", "a", one)
	u.sees("one-claim", "b", one)

	x, y := u.allocated("two-claims", "x"), u.allocated("two-claims", "y")
	u.sees("two-claims", "a", x)
	u.sees("two-claims", "b", y)
	u.sees("two-claims", "both", slices.Sorted(slices.Values(slices.Concat(x, y))))

	u.sees("by-request", "a", u.allocated("by-request", "gpus", "first"))
	u.sees("by-request", "b", u.allocated("by-request", "gpus", "second"))
	u.sees("by-request", "both", u.allocated("by-request", "gpus"))
}

func (w *world) testSharedClaim(t *testing.T) {
	w.needSMI(t)
	u := w.tenant(t)
	u.claim("shared", oneGPU)
	u.pod("first", onNode(a100), fromClaim("gpu", "shared"))
	u.pod("second", fromClaim("gpu", "shared")) // follows the claim to its node
	u.running("first", "second")
	allocated := u.allocated("first", "gpu")
	u.sees("first", "", allocated)
	u.sees("second", "", allocated)

	// The claim must stay prepared when one of its Pods ends, and a later Pod must get the same GPU.
	if err := w.Client.CoreV1().Pods(u.namespace).Delete(t.Context(), "first", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, 30*time.Second, "Pod first is gone", func() (bool, string) {
		out, err := w.Kubectl(t.Context(), "-n", u.namespace, "get", "pod", "first", "--ignore-not-found", "-o", "name")
		return err == nil && out == "", out
	})
	u.sees("second", "", allocated)
	u.pod("third", fromClaim("gpu", "shared"))
	u.running("third")
	u.sees("third", "", allocated)
	if again := u.allocated("third", "gpu"); !slices.Equal(again, allocated) {
		t.Errorf("the claim was allocated %v and is now allocated %v", allocated, again)
	}
}
