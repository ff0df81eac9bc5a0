package driver

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
)

// nodeEvents writes Events about the plugin's own Node and about the claims on it.
type nodeEvents struct {
	recorder events.EventRecorder
	node     *corev1.ObjectReference
}

// newNodeEvents starts a recorder that ends with the context. Events name the Node by its UID, so that "kubectl describe node" shows them;
// the UID is looked up once, and the kubelet's convention (the name as UID) serves if that fails.
func newNodeEvents(ctx context.Context, client kubernetes.Interface, nodeName string) *nodeEvents {
	broadcaster := events.NewBroadcaster(&events.EventSinkImpl{Interface: client.EventsV1()})
	if err := broadcaster.StartRecordingToSinkWithContext(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Could not start recording Events; they will be missing, the log has them all")
	}
	go func() {
		<-ctx.Done()
		broadcaster.Shutdown()
	}()
	ref := &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: nodeName}
	if node, err := client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{}); err == nil {
		ref.UID = node.UID
	}
	return &nodeEvents{recorder: broadcaster.NewRecorder(scheme.Scheme, DriverName), node: ref}
}

func (e *nodeEvents) warn(reason, action, message string) {
	e.recorder.Eventf(e.node, nil, corev1.EventTypeWarning, reason, action, "%s", message)
}

// warnClaim writes an Event about a claim: the kubelet puts the errors of a Prepare into its Pod's Events, and those of an Unprepare nowhere.
func (e *nodeEvents) warnClaim(c kubeletplugin.NamespacedObject, reason, action, message string) {
	ref := &corev1.ObjectReference{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaim", Namespace: c.Namespace, Name: c.Name, UID: c.UID}
	e.recorder.Eventf(ref, nil, corev1.EventTypeWarning, reason, action, "%s", message)
}

func (e *nodeEvents) normal(reason, action, message string) {
	e.recorder.Eventf(e.node, nil, corev1.EventTypeNormal, reason, action, "%s", message)
}
