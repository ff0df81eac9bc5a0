package driver

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

// lastEventTimeout limits how long warnNow waits for the API server.
const lastEventTimeout = 5 * time.Second

// nodeEvents writes Events on the plugin's Node and on claims.
//
// It uses the recorder for core/v1 Events, which keeps Events with different messages apart. The
// recorder for events.k8s.io does not: a second reason for the same kind of Event would only raise
// the count of the first Event.
type nodeEvents struct {
	recorder record.EventRecorder
	node     *corev1.ObjectReference
}

// newNodeEvents starts an Event recorder that ends with the context. The Events refer to the Node
// by its name instead of its UID, as the kubelet's Events do. "kubectl describe node" shows such
// Events, and the start needs no request to the API server for the UID.
func newNodeEvents(ctx context.Context, client kubernetes.Interface, nodeName string) *nodeEvents {
	broadcaster := record.NewBroadcaster(record.WithContext(ctx), record.WithCorrelatorOptions(
		record.CorrelatorOptions{SpamKeyFunc: rateLimitKey, KeyFunc: aggregationKey}))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")})
	context.AfterFunc(ctx, broadcaster.Shutdown)
	return &nodeEvents{
		recorder: broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: DriverName, Host: nodeName}),
		node:     &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: nodeName, UID: types.UID(nodeName)},
	}
}

func (e *nodeEvents) warn(reason, message string) {
	e.recorder.Event(e.node, corev1.EventTypeWarning, reason, message)
}

// warnNow writes a warning on the Node without the recorder, because a stopping plugin has already
// stopped its recorder.
func (e *nodeEvents) warnNow(ctx context.Context, client kubernetes.Interface, reason, message string) error {
	ctx, cancel := context.WithTimeout(ctx, lastEventTimeout)
	defer cancel()
	now := metav1.Now()
	_, err := client.CoreV1().Events(metav1.NamespaceDefault).Create(ctx, &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, GenerateName: e.node.Name + "."},
		InvolvedObject: *e.node, Type: corev1.EventTypeWarning, Reason: reason, Message: message,
		Source:         corev1.EventSource{Component: DriverName, Host: e.node.Name},
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("write an Event about the Node: %w", err)
	}
	return nil
}

func (e *nodeEvents) normal(reason, message string) {
	e.recorder.Event(e.node, corev1.EventTypeNormal, reason, message)
}

// WarnClaim writes a warning on the claim. It is for errors of an Unprepare: the kubelet shows
// errors of a Prepare in the Pod's Events, but it shows errors of an Unprepare nowhere.
func (e *nodeEvents) WarnClaim(c kubeletplugin.NamespacedObject, reason, message string) {
	meta := metav1.ObjectMeta{Namespace: c.Namespace, Name: c.Name, UID: c.UID}
	claim := &resourceapi.ResourceClaim{ObjectMeta: meta}
	e.recorder.Event(claimReference(claim), corev1.EventTypeWarning, reason, message)
}

// normalClaim writes an Event of type Normal on the claim.
func (e *nodeEvents) normalClaim(c *resourceapi.ResourceClaim, reason, message string) {
	e.recorder.Event(claimReference(c), corev1.EventTypeNormal, reason, message)
}

// claimReference returns a reference to the claim for Events about it.
func claimReference(c *resourceapi.ResourceClaim) *corev1.ObjectReference {
	version, kind := resourceapi.SchemeGroupVersion.WithKind("ResourceClaim").ToAPIVersionAndKind()
	return &corev1.ObjectReference{APIVersion: version, Kind: kind, Namespace: c.Namespace, Name: c.Name, UID: c.UID}
}
