package driver

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
)

// nodeEvents writes Events about the plugin's own Node.
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

func (e *nodeEvents) normal(reason, action, message string) {
	e.recorder.Eventf(e.node, nil, corev1.EventTypeNormal, reason, action, "%s", message)
}
