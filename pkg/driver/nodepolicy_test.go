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

func TestNodePolicyFollowsAnnotation(t *testing.T) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", Annotations: map[string]string{policyAnnotation: "static"}}}
	other := metav1.ObjectMeta{Name: "other", Annotations: map[string]string{policyAnnotation: "off"}}
	client := fake.NewClientset(node, &corev1.Node{ObjectMeta: other})
	var mu sync.Mutex
	var policies []device.PolicyMode
	var problems []string
	p := &nodePolicy{
		client: client, node: "node",
		onPolicies: func(p device.Policies) {
			mu.Lock()
			defer mu.Unlock()
			policies = append(policies, p.For(device.GPU{}).Mode)
		},
		onProblem: func(m string) { mu.Lock(); defer mu.Unlock(); problems = append(problems, m) },
	}
	p.Read(t.Context())
	if !slices.Equal(policies, []device.PolicyMode{device.PolicyStatic}) {
		t.Fatalf("after the first read: %v", policies)
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
	expectPolicies := func(what string, want ...device.PolicyMode) {
		t.Helper()
		eventually(t, what, func() bool { mu.Lock(); defer mu.Unlock(); return slices.Equal(policies, want) })
	}
	// This update tests the watch only if the watch has started. Otherwise the watch's first list
	// contains the update.
	annotate("adopt")
	expectPolicies("another rule", device.PolicyStatic, device.PolicyAdopt)
	annotate("allways")
	eventually(t, "a problem with the rule is reported", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(problems) == 1 && strings.Contains(problems[0], "allways")
	})
	annotate("dynamic")
	expectPolicies("the next valid rule", device.PolicyStatic, device.PolicyAdopt, device.PolicyDynamic)
	stop()
	<-done
}

func TestUnreadableNodeIsReportedOnce(t *testing.T) {
	var problems []string
	p := &nodePolicy{
		client: fake.NewClientset(), node: "node",
		onPolicies: func(device.Policies) { t.Error("rules without a Node") },
		onProblem:  func(m string) { problems = append(problems, m) },
	}
	p.Read(t.Context())
	p.Read(t.Context())
	if len(problems) != 1 {
		t.Error(problems)
	}
}
