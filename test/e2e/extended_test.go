package e2e

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// limits gives a Pod a container that requests GPUs by the resource limit nvidia.com/gpu, without a
// claim in the Pod's spec.
func limits(count string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		c := waitingContainer("main")
		c.Resources.Limits = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse(count)}
		p.Spec.Containers = append(p.Spec.Containers, c)
	}
}

func (w *world) testExtendedResource(t *testing.T) {
	w.needSMI(t)
	u := w.tenant(t)
	u.pod("one", limits("1"))
	u.running("one")
	w.install(t, "--set-json", `deviceClasses.migProfiles=[{"profile":"1g.10gb"}]`)
	u.pod("two", onNode(h100), limits("2"))
	u.running("two")
	for pod, count := range map[string]int{"one": 1, "two": 2} {
		status := u.get(pod).Status.ExtendedResourceClaimStatus
		if status == nil {
			t.Fatalf("Pod %s has no claim behind its limits", pod)
		}
		claim, err := w.Client.ResourceV1().ResourceClaims(u.namespace).Get(t.Context(), status.ResourceClaimName, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		allocated := w.sortedUUIDs(t, claim)
		if len(allocated) != count {
			t.Errorf("Pod %s was allocated %v, want %d", pod, allocated, count)
		}
		u.sees(pod, "", allocated)
	}
	u.pod("nine", onNode(h100), limits("9"))
	u.unschedulable("nine", "cannot allocate all claims")
}
