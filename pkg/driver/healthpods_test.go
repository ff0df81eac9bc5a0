package driver

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func podGroup(name string) resourceapi.ResourceClaimConsumerReference {
	return resourceapi.ResourceClaimConsumerReference{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: name, UID: "uid-of-group"}
}

// setConsumers sets the objects that the claim called name is reserved for.
func (n *node) setConsumers(t *testing.T, name string, consumers ...resourceapi.ResourceClaimConsumerReference) {
	t.Helper()
	claims := n.client.ResourceV1().ResourceClaims("team")
	c, err := claims.Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c.Status.ReservedFor = consumers
	if _, err := claims.Update(t.Context(), c, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func TestPodGroupGetsHealthEvents(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
	n.run(t)
	n.register(t)
	claim := n.claim(t, "held", secondGPU)
	n.setConsumers(t, "held", podGroup("gang"))
	if msg := n.prepare(t, claim).GetError(); msg != "" {
		t.Fatal(msg)
	}
	n.client.ClearActions()
	n.xid("0000:43:00.0", 31)
	eventually(t, "the PodGroup has an Event", func() bool { return n.hasEvent(t, "PodGroup", "gang", "GPUReport", "XID 31") })
	eventually(t, "the claim has an Event", func() bool { return n.hasEvent(t, "ResourceClaim", "held", "GPUReport", "XID 31") })
	for _, a := range n.client.Actions() {
		if a.GetResource().Resource == "pods" || a.GetResource().Resource == "podgroups" {
			t.Errorf("the plugin used a permission that it does not have: %s %s", a.GetVerb(), a.GetResource().Resource)
		}
	}
}
