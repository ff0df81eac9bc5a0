package driver

import (
	"context"
	"errors"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	informers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// policyAnnotation is where an admin says for one Node what may be done about its GPUs' partitions, as rules like those of --mig-policy.
const policyAnnotation = DriverName + "/mig-policy"

// nodePolicy follows the rules in the Node's annotation. Rules that cannot be read are reported, and the ones before stay in force; before the first that
// can be read, nothing is known.
type nodePolicy struct {
	client kubernetes.Interface
	node   string
	// set is told of the rules, wrong of what keeps them from being followed, each time for another reason.
	set   func(device.Policies)
	wrong func(message string)
	// seen, if not nil, is shown the Node with each change of it.
	seen func(*corev1.Node)

	mu    sync.Mutex
	known bool
	last  string // the annotation
	said  string // to wrong
}

// Read looks once, so that the rules are known before anything is decided.
func (p *nodePolicy) Read(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, firstLookTimeout)
	defer cancel()
	node, err := p.client.CoreV1().Nodes().Get(ctx, p.node, metav1.GetOptions{})
	if err != nil {
		p.complain(fmt.Sprintf("annotation %s cannot be read, so that nothing about the GPUs is changed: %v", policyAnnotation, err))
		return
	}
	p.follow(ctx, node)
}

// Watch follows until the context ends.
func (p *nodePolicy) Watch(ctx context.Context) {
	// Not from the factory of all informers, which brings every API along.
	nodes := informers.NewFilteredNodeInformer(p.client, 0, nil, func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, p.node).String()
	})
	see := func(object any) {
		if node, ok := object.(*corev1.Node); ok && node.Name == p.node {
			p.follow(ctx, node)
		}
	}
	_, err := nodes.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: see, UpdateFunc: func(_, now any) { see(now) }})
	err = errors.Join(err, nodes.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
		cache.DefaultWatchErrorHandler(ctx, r, err)
		if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
			p.complain(fmt.Sprintf("changes of annotation %s are not noticed: %v", policyAnnotation, err))
		}
	}))
	if err != nil { // not of an informer that has not been started
		p.complain(fmt.Sprintf("changes of annotation %s are not noticed: %v", policyAnnotation, err))
		return
	}
	nodes.RunWithContext(ctx)
}

func (p *nodePolicy) follow(ctx context.Context, node *corev1.Node) {
	if p.seen != nil {
		p.seen(node)
	}
	rules := node.Annotations[policyAnnotation]
	p.mu.Lock()
	same := p.known && rules == p.last
	p.known, p.last = true, rules
	p.mu.Unlock()
	if same {
		return
	}
	policies, err := device.ParsePolicies(rules)
	if err != nil {
		p.complain(fmt.Sprintf("annotation %s is not followed: %v", policyAnnotation, err))
		return
	}
	klog.FromContext(ctx).Info("Policy for partitions in the Node's annotation", "annotation", policyAnnotation, "rules", rules)
	p.set(policies)
}

func (p *nodePolicy) complain(message string) {
	p.mu.Lock()
	said := p.said == message
	p.said = message
	p.mu.Unlock()
	if !said {
		p.wrong(message)
	}
}
