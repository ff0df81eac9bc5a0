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

// lastEventTimeout bounds how long an exit waits for its last Event.
const lastEventTimeout = 5 * time.Second

// nodeEvents writes Events about the plugin's own Node and about the claims on it.
//
// They go through the recorder of core/v1, which takes Events with different messages for different Events. That of events.k8s.io does not: the next
// reason why a node offers nothing would only raise the count of the first one.
type nodeEvents struct {
	recorder record.EventRecorder
	node     *corev1.ObjectReference
}

// newNodeEvents starts a recorder that ends with the context. As in the kubelet's own Events, the
// Node's name stands for its UID: "kubectl describe node" shows those too, and a start waits for no
// API server to look the UID up.
func newNodeEvents(ctx context.Context, client kubernetes.Interface, nodeName string) *nodeEvents {
	broadcaster := record.NewBroadcaster(record.WithContext(ctx), record.WithCorrelatorOptions(record.CorrelatorOptions{SpamKeyFunc: quotaKey, KeyFunc: likenessKey}))
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

// warnLast writes an Event itself: the recorder has ended when the plugin is about to exit.
func (e *nodeEvents) warnLast(ctx context.Context, client kubernetes.Interface, reason, message string) error {
	ctx, cancel := context.WithTimeout(ctx, lastEventTimeout)
	defer cancel()
	now := metav1.Now()
	_, err := client.CoreV1().Events(metav1.NamespaceDefault).Create(ctx, &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, GenerateName: e.node.Name + "."},
		InvolvedObject: *e.node, Type: corev1.EventTypeWarning, Reason: reason, Message: message,
		Source: corev1.EventSource{Component: DriverName, Host: e.node.Name}, FirstTimestamp: now, LastTimestamp: now, Count: 1,
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("write an Event about the Node: %w", err)
	}
	return nil
}

func (e *nodeEvents) normal(reason, message string) {
	e.recorder.Event(e.node, corev1.EventTypeNormal, reason, message)
}

// warnClaim writes an Event about a claim: the kubelet puts the errors of a Prepare into its Pod's Events, and those of an Unprepare nowhere.
func (e *nodeEvents) warnClaim(c kubeletplugin.NamespacedObject, reason, message string) {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: c.Name, UID: c.UID}}
	e.recorder.Event(claimReference(claim), corev1.EventTypeWarning, reason, message)
}

// normalClaim writes an Event about a claim that works as it was asked.
func (e *nodeEvents) normalClaim(c *resourceapi.ResourceClaim, reason, message string) {
	e.recorder.Event(claimReference(c), corev1.EventTypeNormal, reason, message)
}

// claimReference is a claim as an Event names it.
func claimReference(c *resourceapi.ResourceClaim) *corev1.ObjectReference {
	version, kind := resourceapi.SchemeGroupVersion.WithKind("ResourceClaim").ToAPIVersionAndKind()
	return &corev1.ObjectReference{APIVersion: version, Kind: kind, Namespace: c.Namespace, Name: c.Name, UID: c.UID}
}
