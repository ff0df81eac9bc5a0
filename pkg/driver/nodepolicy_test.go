package driver

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func TestTheNodesAnnotationIsFollowed(t *testing.T) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", Annotations: map[string]string{policyAnnotation: "static"}}}
	client := fake.NewClientset(node, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "other", Annotations: map[string]string{policyAnnotation: "off"}}})
	var mu sync.Mutex
	var policies []device.PolicyMode
	var complaints []string
	p := &nodePolicy{
		client: client, node: "node",
		set: func(p device.Policies) {
			mu.Lock()
			defer mu.Unlock()
			policies = append(policies, p.For(device.GPU{}).Mode)
		},
		wrong: func(m string) { mu.Lock(); defer mu.Unlock(); complaints = append(complaints, m) },
	}
	p.Read(t.Context())
	if !slices.Equal(policies, []device.PolicyMode{device.PolicyStatic}) {
		t.Fatalf("at the first look: %v", policies)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); p.Watch(ctx) }()
	annotate := func(rules string) {
		node = node.DeepCopy()
		node.Annotations[policyAnnotation] = rules
		if _, err := client.CoreV1().Nodes().Update(t.Context(), node, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	seen := func(what string, want ...device.PolicyMode) {
		t.Helper()
		eventually(t, what, func() bool { mu.Lock(); defer mu.Unlock(); return slices.Equal(policies, want) })
	}
	// An update that comes before the watch stands would be in its first list.
	annotate("adopt")
	seen("another rule", device.PolicyStatic, device.PolicyAdopt)
	annotate("allways")
	eventually(t, "a complaint about the rule", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(complaints) == 1 && strings.Contains(complaints[0], "allways")
	})
	annotate("dynamic")
	seen("the next rule that can be read", device.PolicyStatic, device.PolicyAdopt, device.PolicyDynamic)
	stop()
	<-done
}

func TestANodeThatCannotBeReadIsComplainedAboutOnce(t *testing.T) {
	var complaints []string
	p := &nodePolicy{
		client: fake.NewClientset(), node: "node",
		set:   func(device.Policies) { t.Error("rules out of nothing") },
		wrong: func(m string) { complaints = append(complaints, m) },
	}
	p.Read(t.Context())
	p.Read(t.Context())
	if len(complaints) != 1 {
		t.Error(complaints)
	}
}
