package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

func containsAll(text string, parts ...string) bool {
	return !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(text, p) })
}

func (w *world) deletePods(t *testing.T, namespace string, pods ...string) {
	t.Helper()
	if len(pods) == 0 {
		pods = []string{"--all"}
	}
	if _, err := w.Kubectl(t.Context(), append([]string{"-n", namespace, "delete", "--timeout=6m", "pod"}, pods...)...); err != nil {
		t.Fatalf("delete Pods: %v", err)
	}
}

func (w *world) deletePlugin(t *testing.T, p corev1.Pod) {
	t.Helper()
	if _, err := w.Kubectl(t.Context(), "-n", p.Namespace, "delete", "pod", p.Name, "--wait=false"); err != nil {
		t.Fatal(err)
	}
}

// handAllocate creates a claim and writes an allocation of these devices into its status by hand,
// without the scheduler.
func (w *world) handAllocate(t *testing.T, namespace, name, pool string, devices ...string) {
	t.Helper()
	claims := w.Client.ResourceV1().ResourceClaims(namespace)
	claim, err := claims.Create(t.Context(), &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{resourceapi.Finalizer}},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com", Count: int64(len(devices)),
				AllocationMode: resourceapi.DeviceAllocationModeExactCount},
		}}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	// Set a timestamp: the scheduler would add a missing one, and fail because allocations are
	// immutable.
	claim.Status.Allocation = &resourceapi.AllocationResult{AllocationTimestamp: ptr.To(metav1.Now())}
	for _, d := range devices {
		claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results,
			resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: "gpu.nvidia.com", Pool: pool, Device: d})
	}
	if _, err := claims.UpdateStatus(t.Context(), claim, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func (w *world) claimNamed(t *testing.T, namespace, name string) *resourceapi.ResourceClaim {
	t.Helper()
	claim, err := w.Client.ResourceV1().ResourceClaims(namespace).Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return claim
}

func (w *world) uidOf(t *testing.T, namespace, claim string) string {
	t.Helper()
	return string(w.claimNamed(t, namespace, claim).UID)
}

// allocated returns the name of the first device that a claim was allocated.
func (w *world) allocated(t *testing.T, namespace, claim string) string {
	t.Helper()
	c := w.claimNamed(t, namespace, claim)
	if c.Status.Allocation == nil {
		t.Fatalf("claim %s is not allocated", claim)
	}
	return c.Status.Allocation.Devices.Results[0].Device
}

// pciAddress returns the PCI address of a device name: gpu-0000-1b-00-0 is at 0000:1b:00.0.
func pciAddress(device string) string {
	p := strings.Split(strings.TrimPrefix(device, "gpu-"), "-")
	return fmt.Sprintf("%s:%s:%s.%s", p[0], p[1], p[2], p[3])
}

func gpuConfig(rest string) string {
	return "{apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, " + rest + "}"
}

// claimYAML is the manifest of a claim for one GPU. The claim gets parameters as its opaque
// parameters, unless they are empty.
func claimYAML(name, parameters string) string {
	config := ""
	if parameters != "" {
		config = "\n    config: [{requests: [gpu], opaque: {driver: gpu.nvidia.com, parameters: " + parameters + "}}]"
	}
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata:
  name: %s
spec:
  devices:
    requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com, count: 1}}]%s
---
`, name, config)
}

// podOn is the manifest of a Pod on a node with a GPU of its own, and of a claim template with the
// Pod's name.
func podOn(name, node string) string {
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata:
  name: %s
spec:
  spec:
    devices:
      requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com, count: 1}}]
---
`, name) + podYAML(name, node, "\n  resourceClaims: [{name: gpu, resourceClaimTemplateName: "+name+"}]", "[{name: gpu}]")
}

// podOnClaim is the manifest of a Pod on a node that uses an existing claim.
func podOnClaim(name, node, claim string) string {
	return podYAML(name, node, "\n  resourceClaims: [{name: gpu, resourceClaimName: "+claim+"}]", "[{name: gpu}]")
}

// podOnNothing is the manifest of a Pod on a node that uses no claim.
func podOnNothing(name, node string) string { return podYAML(name, node, "", "[]") }

func podYAML(name, node, claims, use string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata:
  name: %s
spec:
  nodeSelector: {kubernetes.io/hostname: %s}
  terminationGracePeriodSeconds: 1
  restartPolicy: Never%s
  containers:
    - name: main
      image: %s
      imagePullPolicy: Never
      command: [sh, -c, "trap 'exit 0' TERM; sleep 1000000 & wait"]
      resources: {claims: %s}
---
`, name, node, claims, cluster.TestImage, use)
}
