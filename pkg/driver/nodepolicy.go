package driver

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// policyAnnotation is where an admin says for one Node what may be done about its GPUs' partitions, as rules like those of --mig-policy.
const policyAnnotation = DriverName + "/mig-policy"

// watchPolicy tells set of the rules in the Node's annotation, at once and whenever they change. Rules that cannot be read are reported, and the ones
// before stay in force.
func watchPolicy(ctx context.Context, client kubernetes.Interface, nodeName string, set func(device.Policies), wrong func(message string)) {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, nodeName).String()
	}))
	nodes := factory.Core().V1().Nodes().Informer()
	last := ""
	follow := func(object any) {
		node, ok := object.(*corev1.Node)
		if !ok || node.Name != nodeName {
			return
		}
		rules := node.Annotations[policyAnnotation]
		if rules == last {
			return
		}
		last = rules
		policies, err := device.ParsePolicies(rules)
		if err != nil {
			wrong(fmt.Sprintf("annotation %s is not followed: %v", policyAnnotation, err))
			return
		}
		klog.FromContext(ctx).Info("Policy for partitions in the Node's annotation", "annotation", policyAnnotation, "rules", rules)
		set(policies)
	}
	// One listener calls its handlers one after another.
	if _, err := nodes.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: follow, UpdateFunc: func(_, now any) { follow(now) }}); err != nil {
		wrong(fmt.Sprintf("annotation %s cannot be watched: %v", policyAnnotation, err)) // an informer that has not been started takes every handler
		return
	}
	factory.StartWithContext(ctx)
	<-ctx.Done()
	factory.Shutdown()
}
