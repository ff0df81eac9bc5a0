package driver

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

func littleMemory() []resourceapi.DeviceRequest {
	amount := &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("4Gi")}}
	return []resourceapi.DeviceRequest{{
		Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com", Capacity: amount},
	}}
}

func TestOversizedClaimGetsOneEvent(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.start(t)
	n.register(t)
	eventually(t, "both GPUs are published", func() bool { return len(published(t, n.client)) == 2 })
	little := func(name string, devices ...string) *drapb.Claim {
		c := n.claim(t, name, devices...)
		claims := n.client.ResourceV1().ResourceClaims("team")
		stored, err := claims.Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		stored.Spec.Devices.Requests = littleMemory()
		if _, err := claims.Update(t.Context(), stored, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		return c
	}
	c := little("c", firstGPU)
	for range 2 {
		if answer := n.prepare(t, c); answer.GetError() != "" {
			t.Fatal(answer.GetError())
		}
	}
	n.expectEvent(t, "ResourceClaim", "c", "WholeGPUHeld", "shares=[{kind: fractions}] offers them in class shared.gpu.nvidia.com")
	refused := little("refused", secondGPU, "gpu-0000-99-00-0")
	if n.prepare(t, refused).GetError() == "" {
		t.Fatal("a missing GPU was prepared")
	}

	// After a restart there must be no second Event for the claim, because its checkpoint record shows
	// that it is prepared already.
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	n.start(t)
	n.register(t)
	if answer := n.prepare(t, c); answer.GetError() != "" {
		t.Fatal(answer.GetError())
	}
	last := little("last", secondGPU)
	if answer := n.prepare(t, last); answer.GetError() != "" {
		t.Fatal(answer.GetError())
	}
	n.expectEvent(t, "ResourceClaim", "last", "WholeGPUHeld", "4Gi") // Events are written in order, so all earlier ones exist, too
	events, err := n.client.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	for _, e := range events.Items {
		if e.Reason == "WholeGPUHeld" {
			count[e.InvolvedObject.Name] += max(1, int(e.Count))
			if e.Type != "Normal" {
				t.Errorf("an Event of type %s for a claim that has what it asked for", e.Type)
			}
		}
	}
	if count["c"] != 1 || count["last"] != 1 || count["refused"] != 0 {
		t.Errorf("Events by claim: %v", count)
	}
}
