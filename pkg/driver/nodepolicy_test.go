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
	"k8s.io/client-go/tools/record"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
)

func TestNodePolicyFollowsAnnotation(t *testing.T) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", Annotations: map[string]string{policyAnnotation: "static"}}}
	other := metav1.ObjectMeta{Name: "other", Annotations: map[string]string{policyAnnotation: "off"}}
	client := fake.NewClientset(node, &corev1.Node{ObjectMeta: other})
	set, problems := &policyLog{}, record.NewFakeRecorder(10)
	p := &nodePolicy{client: client, node: "node", chooser: noChooser(), setPolicies: set.SetNodePolicies, wake: set.Wake,
		events: events.NewFor(problems, "node")}
	p.Read(t.Context())
	if got := set.all(); !slices.Equal(got, []device.PolicyMode{device.PolicyStatic}) {
		t.Fatalf("after the first read: %v", got)
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
		eventually(t, what, func() bool { return slices.Equal(set.all(), want) })
	}
	// This update tests the watch only if the watch has started. Otherwise the watch's first list
	// contains the update.
	annotate("adopt")
	expectPolicies("another rule", device.PolicyStatic, device.PolicyAdopt)
	annotate("allways")
	if problem := <-problems.Events; !strings.Contains(problem, "PolicyIgnored") || !strings.Contains(problem, "allways") {
		t.Error(problem)
	}
	annotate("dynamic")
	expectPolicies("the next valid rule", device.PolicyStatic, device.PolicyAdopt, device.PolicyDynamic)
	node = node.DeepCopy()
	node.Annotations[passthroughAnnotation] = "maybe"
	annotate("dynamic")
	if problem := <-problems.Events; !strings.Contains(problem, passthroughAnnotation) || !strings.Contains(problem, "maybe") {
		t.Error(problem)
	}
	node.Annotations[passthroughAnnotation] = "true"
	annotate("static")
	expectPolicies("passthrough", device.PolicyStatic, device.PolicyAdopt, device.PolicyDynamic, device.PolicyStatic)
	if !set.last.For(device.GPU{}).Passthrough {
		t.Error("the annotation does not switch passthrough on")
	}
	stop()
	<-done
}

func TestUnreadableNodeIsReportedOnce(t *testing.T) {
	set, problems := &policyLog{}, record.NewFakeRecorder(10)
	p := &nodePolicy{client: fake.NewClientset(), node: "node", chooser: noChooser(), setPolicies: set.SetNodePolicies, wake: set.Wake,
		events: events.NewFor(problems, "node")}
	p.Read(t.Context())
	p.Read(t.Context())
	if len(problems.Events) != 1 || len(set.all()) > 0 {
		t.Errorf("%d problems, and rules without a Node: %v", len(problems.Events), set.all())
	}
}

// policyLog fakes the rooms that a nodePolicy tells about new rules.
type policyLog struct {
	mu       sync.Mutex
	policies []device.PolicyMode
	last     device.Policies
	wakes    int
}

func (l *policyLog) SetNodePolicies(p device.Policies) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last = p
	l.policies = append(l.policies, p.For(device.GPU{}).Mode)
}

func (l *policyLog) Wake() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wakes++
}

// all returns the modes of all rules so far. Each must have woken reconciliation.
func (l *policyLog) all() []device.PolicyMode {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.policies[:min(len(l.policies), l.wakes)])
}

// noChooser returns a chooser whose settings change nothing.
func noChooser() *chooser {
	return &chooser{events: events.NewFor(record.NewFakeRecorder(10), "node"), apply: func(settings.Settings) {}}
}
