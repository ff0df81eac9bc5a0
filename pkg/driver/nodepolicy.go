package driver

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	informers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
)

// policyAnnotation is the Node's annotation with rules for the MIG policies of its GPUs: the
// name of a policy, or the setting "mig" in YAML.
const policyAnnotation = DriverName + "/mig-policy"

// nodePolicy watches the Node, hands it to its observers and reads the MIG policy rules in its
// annotation. If it cannot parse new rules, it reports them and the previous rules stay in force.
type nodePolicy struct {
	client      kubernetes.Interface
	node        string
	setPolicies func(device.Policies)
	wake        func() // wakes reconciliation
	events      *events.Recorder
	chooser     *chooser
	observers   []func(*corev1.Node) // are called with each version of the Node

	rules *string // the last value of the annotation; nil before the first one
}

// Read reads the Node once, before Watch. It must be called before the driver prepares claims or
// opens GPUs, because the Node may forbid partitions or request a release of the GPUs.
func (p *nodePolicy) Read(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, firstScanTimeout)
	defer cancel()
	node, err := p.client.CoreV1().Nodes().Get(ctx, p.node, metav1.GetOptions{})
	if err != nil {
		p.reportProblem(fmt.Sprintf("cannot read annotation %s, so no GPU is changed: %v", policyAnnotation, err))
		return
	}
	p.handleNode(ctx, node)
}

// Watch watches the Node until the context ends.
func (p *nodePolicy) Watch(ctx context.Context) {
	// An informer factory would link the packages of every Kubernetes API into the binary.
	nodes := informers.NewFilteredNodeInformer(p.client, 0, nil, func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, p.node).String()
	})
	handle := func(object any) {
		if node, ok := object.(*corev1.Node); ok && node.Name == p.node {
			p.handleNode(ctx, node)
		}
	}
	cannotWatch := func(err error) {
		p.reportProblem(fmt.Sprintf("cannot watch the Node, so changes of annotation %s have no effect: %v", policyAnnotation, err))
	}
	_, err := nodes.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: handle, UpdateFunc: func(_, now any) { handle(now) }})
	err = errors.Join(err, nodes.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
		cache.DefaultWatchErrorHandler(ctx, r, err)
		if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
			cannotWatch(err)
		}
	}))
	if err != nil { // both calls fail only on a running informer
		cannotWatch(err)
		return
	}
	nodes.RunWithContext(ctx)
}

func (p *nodePolicy) handleNode(ctx context.Context, node *corev1.Node) {
	for _, observe := range p.observers {
		observe(node)
	}
	p.chooser.SetLabels(ctx, node.Labels)
	rules := node.Annotations[policyAnnotation]
	if p.rules != nil && *p.rules == rules {
		return
	}
	p.rules = &rules
	policies, err := settings.ParseMIG(rules)
	if err != nil {
		p.reportProblem(fmt.Sprintf("cannot parse the MIG policy in annotation %s, so the previous policy stays in force: %v",
			policyAnnotation, err))
		return
	}
	klog.FromContext(ctx).Info("Read the MIG policy from the Node's annotation", "annotation", policyAnnotation, "rules", rules)
	p.setPolicies(policies)
	p.wake()
}

func (p *nodePolicy) reportProblem(message string) {
	p.events.EventOnChange(events.PolicyIgnored, message, message)
}
