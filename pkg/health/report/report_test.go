package report

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

const firstGPU = "gpu-0000-1b-00-0"

// fakeNode fakes the node's Events and its leader.
type fakeNode struct {
	events     []string
	newerLeads bool
}

func (n *fakeNode) Event(reason events.Reason, message string) {
	n.events = append(n.events, reason.String()+": "+message)
}

func (n *fakeNode) AboutGPU(object *corev1.ObjectReference, gpu string, reason events.Reason, message string) {
	n.events = append(n.events, fmt.Sprintf("%s %s, %s, %s %s: %s", object.Kind, object.Name, gpu, reason.Severity(), reason, message))
}

func (n *fakeNode) Node() *corev1.ObjectReference {
	return &corev1.ObjectReference{Kind: "Node", Name: "node"}
}
func (n *fakeNode) NewerLeads() bool { return n.newerLeads }

// held returns the records of a node whose claim team/held has these devices. [heldClaim] is
// reserved for a Pod.
func held(t *testing.T, devices ...string) *checkpoint.Store {
	t.Helper()
	records, err := checkpoint.Open("/state", durabletest.New())
	r := checkpoint.Record{ClaimUID: "uid", Namespace: "team", Name: "held"}
	for _, d := range devices {
		r.Devices = append(r.Devices, checkpoint.Device{Device: d})
	}
	if err := errors.Join(err, records.Save(r)); err != nil {
		t.Fatal(err)
	}
	return records
}

func heldClaim() *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "held", UID: "uid"}}
	c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod", UID: "uid-of-pod"}}
	return c
}

func changeAt(address device.PCIAddress, s health.State, over bool) health.Change {
	return health.Change{
		Card: device.Card{PCIAddress: address}, Over: over, Why: "a reset",
		Finding: health.Finding{Code: "xid-95", State: s, Reason: "XID 95", Action: "reset it"},
	}
}

// Events must come once from each node: on the Node, and on the Pods that have the affected GPU.
// While a newer plugin instance leads, that instance writes them.
func TestEventsReachNodeAndPods(t *testing.T) {
	var many []string // more than fit in the name of the record's file
	for i := range 15 {
		many = append(many, fmt.Sprintf("gpu-0001-%02x-00-0", i))
	}
	const aboutFirst, aboutOther = firstGPU + ", Warning GPUUnhealthy: ", "gpu-0000-43-00-0, Warning GPUUnhealthy: "
	for name, c := range map[string]struct {
		change     health.Change
		newerLeads bool
		want       []string
	}{
		"its GPU": {changeAt("0000:1b:00.0", health.Unhealthy, false), false, []string{
			"Node node, " + aboutFirst + firstGPU + " is Unhealthy: XID 95: reset it",
			"Pod pod, " + aboutFirst + firstGPU + ": " + firstGPU + " is Unhealthy: XID 95: reset it",
		}},
		"another GPU": {changeAt("0000:43:00.0", health.Unhealthy, false), false, []string{
			"Node node, " + aboutOther + "gpu-0000-43-00-0 is Unhealthy: XID 95: reset it",
		}},
		"it recovered": {changeAt("0000:1b:00.0", health.Unhealthy, true), false, []string{
			"Node node, " + firstGPU + ", Normal GPURecovered: " + firstGPU + " no longer has this problem: XID 95 (a reset)",
			"Pod pod, " + firstGPU + ", Normal GPURecovered: " + firstGPU + ": " + firstGPU + " no longer has this problem: XID 95 (a reset)",
		}},
		"an application's error": {changeAt("0000:1b:00.0", health.Healthy, false), false, []string{
			"Pod pod, " + firstGPU + ", Warning GPUReport: " + firstGPU + ": XID 95: reset it",
		}},
		"an application's error did not recur": {changeAt("0000:1b:00.0", health.Healthy, true), false, nil},
		"a newer instance leads":               {changeAt("0000:1b:00.0", health.Unhealthy, false), true, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				for _, devices := range [][]string{{firstGPU}, append(many, firstGPU)} {
					n := &fakeNode{newerLeads: c.newerLeads}
					r := New(fake.NewClientset(heldClaim()), n, metrics.New("test"), held(t, devices...), n.NewerLeads)
					go r.Run(t.Context())
					r.Report(t.Context(), &health.View{}, nil, []health.Change{c.change})
					synctest.Wait()
					if !slices.Equal(n.events, c.want) {
						t.Errorf("of %d: %s", len(devices), cmp.Diff(c.want, n.events))
					}
				}
			})
		})
	}
}

func TestEveryStateHasAReason(t *testing.T) {
	for _, s := range health.States() {
		if got := reasons[s].String(); s != health.Healthy && got != "GPU"+s.String() {
			t.Errorf("%s: the Event's reason is %q", s, got)
		}
	}
}

// GPURecovered must not be sent while the device has another problem.
func TestRecoveryEventNamesOtherProblems(t *testing.T) {
	m := health.New(nil, time.Now())
	card := device.Card{PCIAddress: "0000:1b:00.0", UUID: "GPU-1"}
	m.Apply(device.Signal{Event: &device.HealthEvent{Card: card, Kind: device.EventXID, XID: 79, At: time.Now()}}, time.Now())
	gpus := []device.GPU{{PCIAddress: card.PCIAddress, UUID: card.UUID}}
	if c := newChange(m.View(), gpus, changeAt("0000:1b:00.0", health.Unhealthy, true)); c.reason != events.GPUChanged {
		t.Errorf("%s: %s", c.reason, c.message)
	}
}

// If a PodGroup uses the claim, Events must go to the PodGroup and to the claim, because the claim
// does not list the group's Pods.
func TestHealthEventsReachEveryConsumerOfAClaim(t *testing.T) {
	pod := resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "p", UID: "uid-of-p"}
	group := resourceapi.ResourceClaimConsumerReference{
		APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "g", UID: "uid-of-group",
	}
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
		"a PodGroup":         {consumersOf{group}, []corev1.ObjectReference{aGroup, theClaim}},
		"both":               {consumersOf{group, pod}, []corev1.ObjectReference{aGroup, aPod, theClaim}},
		"two PodGroups":      {consumersOf{group, group}, []corev1.ObjectReference{aGroup, aGroup, theClaim}},
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

func TestNoticesMergeByGPUAndReason(t *testing.T) {
	var n notices
	for i := range 5 {
		for _, a := range []device.PCIAddress{"0000:1b:00.0", "0000:43:00.0"} {
			n.add(newChange(&health.View{}, nil, changeAt(a, health.Unhealthy, false)), fmt.Sprintf("XID %d", i))
		}
	}
	n.add(newChange(&health.View{}, nil, changeAt("0000:1b:00.0", health.Degraded, false)), "a little")
	if len(n) != 3 || n[0].String() != "XID 0; XID 1; XID 2; and 2 more in the plugin's log" || n[2].String() != "a little" {
		t.Errorf("%v", n)
	}
}

// The health loop calls Report, so Report must not wait for an API server that does not answer.
func TestReportDoesNotWaitForPods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &fakeNode{}
		r := New(fake.NewClientset(heldClaim()), n, metrics.New("test"), held(t, firstGPU), n.NewerLeads)
		for range 2 * maxPending {
			r.Report(t.Context(), &health.View{}, nil, []health.Change{changeAt("0000:1b:00.0", health.Healthy, false)})
		}
		go r.Run(t.Context())
		synctest.Wait()
		if len(n.events) != maxPending {
			t.Errorf("%d Events on the Pod", len(n.events))
		}
	})
}
