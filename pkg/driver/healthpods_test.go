package driver

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func podGroup(name string) resourceapi.ResourceClaimConsumerReference {
	return resourceapi.ResourceClaimConsumerReference{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: name, UID: "uid-of-group"}
}

// If a PodGroup uses the claim, Events must go to the PodGroup and to the claim, because the claim
// does not list the group's Pods.
func TestHealthEventsReachEveryConsumerOfAClaim(t *testing.T) {
	pod := resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "p", UID: "uid-of-p"}
	run := resourceapi.ResourceClaimConsumerReference{APIGroup: "example.com", Resource: "runs", Name: "r", UID: "u"}
	foreignPod := resourceapi.ResourceClaimConsumerReference{APIGroup: "example.com", Resource: "pods", Name: "p", UID: "u"}
	type consumersOf = []resourceapi.ResourceClaimConsumerReference
	object := func(version, kind, name string, uid types.UID) corev1.ObjectReference {
		return corev1.ObjectReference{APIVersion: version, Kind: kind, Namespace: "team", Name: name, UID: uid}
	}
	aPod := object("v1", "Pod", "p", "uid-of-p")
	aGroup := object("scheduling.k8s.io/v1beta1", "PodGroup", "g", "uid-of-group")
	theClaim := object("resource.k8s.io/v1", "ResourceClaim", "c", "uid-of-c")
	for name, c := range map[string]struct {
		reserved consumersOf
		want     []corev1.ObjectReference
	}{
		"no consumer":        {nil, nil},
		"a Pod":              {consumersOf{pod}, []corev1.ObjectReference{aPod}},
		"a PodGroup":         {consumersOf{podGroup("g")}, []corev1.ObjectReference{aGroup, theClaim}},
		"both":               {consumersOf{podGroup("g"), pod}, []corev1.ObjectReference{aGroup, aPod, theClaim}},
		"two PodGroups":      {consumersOf{podGroup("g"), podGroup("g")}, []corev1.ObjectReference{aGroup, aGroup, theClaim}},
		"an unknown kind":    {consumersOf{run}, []corev1.ObjectReference{theClaim}},
		"Pods of some group": {consumersOf{foreignPod}, []corev1.ObjectReference{theClaim}},
	} {
		t.Run(name, func(t *testing.T) {
			claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "c", UID: "uid-of-c"}}
			claim.Status.ReservedFor = c.reserved
			var got []corev1.ObjectReference
			for _, o := range consumers(claim) {
				got = append(got, *o)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
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
