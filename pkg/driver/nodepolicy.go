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

const (
	// policyAnnotation is the Node's annotation with rules for the MIG policies of its GPUs: the name
	// of a policy, or the setting "mig" in YAML.
	policyAnnotation = DriverName + "/mig-policy"
	// passthroughAnnotation says which GPUs are offered to virtual machines: true, false, or the
	// setting "passthrough" in YAML.
	passthroughAnnotation = DriverName + "/passthrough"
)

// nodePolicy watches the Node, hands it to its observers and reads the rules in its annotations. If
// it cannot parse new rules, it reports them and the previous rules stay in force.
type nodePolicy struct {
	client      kubernetes.Interface
	node        string
	setPolicies func(device.Policies)
	wake        func() // wakes reconciliation
	events      *events.Recorder
	chooser     *chooser
	observers   []func(*corev1.Node) // are called with each version of the Node
	deleted     func()               // is called when the Node was deleted

	rules *annotations // the last values; nil before the first ones
}

// annotations are the values of the Node's annotations with rules.
type annotations struct{ mig, passthrough string }

// policies returns the policies that the annotations set.
func (a annotations) policies() (device.Policies, error) {
	mig, err := settings.ParseMIG(a.mig)
	if err != nil {
		return mig, fmt.Errorf("cannot parse the MIG policy in annotation %s, so the previous policy stays in force: %w", policyAnnotation, err)
	}
	passthrough, err := settings.ParsePassthrough(a.passthrough)
	if err != nil {
		return mig, fmt.Errorf("cannot parse annotation %s, so the previous rules stay in force: %w", passthroughAnnotation, err)
	}
	return mig.And(passthrough), nil
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
	handleDelete := func(object any) {
		if node, err := cache.DeletionHandlingObjectToName(object); err == nil && node.Name == p.node {
			klog.FromContext(ctx).Info("The Node was deleted; its last labels and annotations stay in force until it registers again")
			p.deleted()
		}
	}
	cannotWatch := func(err error) {
		p.reportProblem(fmt.Sprintf("cannot watch the Node, so changes of annotation %s have no effect: %v", policyAnnotation, err))
	}
	_, err := nodes.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: handle, UpdateFunc: func(_, now any) { handle(now) }, DeleteFunc: handleDelete,
	})
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
	rules := annotations{node.Annotations[policyAnnotation], node.Annotations[passthroughAnnotation]}
	if p.rules != nil && *p.rules == rules {
		return
	}
	p.rules = &rules
	policies, err := rules.policies()
	if err != nil {
		p.reportProblem(err.Error())
		return
	}
	klog.FromContext(ctx).Info("Read the policies from the Node's annotations", "mig", rules.mig, "passthrough", rules.passthrough)
	p.setPolicies(policies)
	p.wake()
}

func (p *nodePolicy) reportProblem(message string) {
	p.events.EventOnChange(events.PolicyIgnored, message, message)
}
