package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// podGroups is the API version of PodGroups in the Kubernetes release that tools/go.mod pins.
const podGroups = "scheduling.k8s.io/v1alpha2"

func inPodGroup(name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: ptr.To(name)} }
}

// testPodGroup starts two Pods that share the claim of their PodGroup. The claim is reserved for
// the PodGroup only, not for the Pods.
func (w *world) testPodGroup(t *testing.T) {
	w.needSMI(t)
	if _, err := w.Client.Discovery().ServerResourcesForGroupVersion(podGroups); err != nil {
		t.Skipf("SKIPPED: this version of Kubernetes has PodGroups of another form: %v", err)
	}
	u := w.tenant(t)
	u.template("one", oneGPU)
	w.apply(t, u.namespace, fmt.Sprintf(`
apiVersion: %s
kind: PodGroup
metadata: {name: gang}
spec:
  schedulingPolicy: {basic: {}}
  resourceClaims: [{name: gpu, resourceClaimTemplateName: one}]
`, podGroups))
	u.pod("first", onNode(h100), inPodGroup("gang"), fromTemplate("gpu", "one"))
	u.pod("second", onNode(h100), inPodGroup("gang"), fromTemplate("gpu", "one"))
	u.running("first", "second")
	claim := w.claimOf(t, u.namespace, "first", "gpu")
	if r := claim.Status.ReservedFor; len(r) != 1 || r[0].Resource != "podgroups" || r[0].Name != "gang" {
		t.Fatalf("the claim is reserved for %+v", r)
	}
	allocated := u.allocated("first", "gpu")
	u.sees("first", "", allocated)
	u.sees("second", "", allocated)
	eventually(t, 10*time.Second, "the claim's status names its GPU", func() (bool, string) {
		devices := w.claimOf(t, u.namespace, "first", "gpu").Status.Devices
		ok := len(devices) == 1 && devices[0].Data != nil && strings.Contains(string(devices[0].Data.Raw), allocated[0])
		return ok, fmt.Sprintf("%+v", devices)
	})

	w.nvmlsim(t, h100, "xid", busOf(claim.Status.Allocation.Devices.Results[0].Device), "31")
	for _, object := range []string{"gang", claim.Name} {
		eventually(t, 20*time.Second, "an Event about "+object, func() (bool, string) {
			text := w.events(t, u.namespace, object)
			return strings.Contains(text, "GPUReport: ") && strings.Contains(text, "XID 31"), text
		})
	}
	if out, err := w.Kubectl(t.Context(), "-n", u.namespace, "describe", "podgroup", "gang"); err != nil || !strings.Contains(out, "XID 31") {
		t.Errorf("kubectl describe podgroup does not show the XID: %v\n%s", err, out)
	}

	// The claim must outlive its Pods and end with its PodGroup.
	u.deletePods(t, u.namespace, "first", "second")
	if got := w.claimNamed(t, u.namespace, claim.Name); got.Status.Allocation == nil {
		t.Error("the claim has lost its GPU with its Pods")
	}
	if out, err := w.Kubectl(t.Context(), "-n", u.namespace, "delete", "podgroup", "gang", "--timeout=60s"); err != nil {
		t.Fatal(err, out)
	}
	eventually(t, 30*time.Second, "the claim is gone", func() (bool, string) {
		list, err := w.Client.ResourceV1().ResourceClaims(u.namespace).List(t.Context(), metav1.ListOptions{})
		return err == nil && len(list.Items) == 0, fmt.Sprint(list.Items, err)
	})
}
