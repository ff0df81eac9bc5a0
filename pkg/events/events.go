// Package events writes Kubernetes Events about the plugin's Node and about claims.
//
// A Recorder writes in the background, so no call waits for the API server. It limits the rate of
// Events by object and GPU: a failing GPU does not suppress Events about other GPUs or the node.
// EventOnChange keeps a state that lasts from repeating its Event.
//
// The [Catalogue] has the reasons of all Events, and what to do about them. The package does not
// know when they happen.
package events

import (
	"context"
	"fmt"
	"sync"
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

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// lastEventTimeout limits how long EventNow waits for the API server.
const lastEventTimeout = 5 * time.Second

// Recorder writes Events on the plugin's Node and on claims. Its methods may be called at the same
// time.
//
// It uses the recorder for core/v1 Events, which keeps Events with different messages apart. The
// recorder for events.k8s.io does not: a second reason for the same kind of Event would only raise
// the count of the first Event.
type Recorder struct {
	recorder record.EventRecorder
	node     *corev1.ObjectReference

	mu sync.Mutex
	// states has the last state that EventOnChange got, by the Event's reason.
	states map[string]string
}

// New starts a Recorder that ends with the context.
func New(ctx context.Context, client kubernetes.Interface, nodeName string) *Recorder {
	broadcaster := record.NewBroadcaster(record.WithContext(ctx), record.WithCorrelatorOptions(
		record.CorrelatorOptions{SpamKeyFunc: rateLimitKey, KeyFunc: aggregationKey}))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")})
	context.AfterFunc(ctx, broadcaster.Shutdown)
	return NewFor(broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: device.DriverName, Host: nodeName}), nodeName)
}

// NewFor returns a Recorder that writes with r. The Events refer to the Node by its name instead of
// its UID, as the kubelet's Events do. "kubectl describe node" shows such Events, and the start
// needs no request to the API server for the UID.
func NewFor(r record.EventRecorder, nodeName string) *Recorder {
	return &Recorder{
		recorder: r, states: map[string]string{},
		node: &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: nodeName, UID: types.UID(nodeName)},
	}
}

// Event writes an Event on the Node.
func (r *Recorder) Event(reason Reason, message string) {
	r.recorder.Event(r.node, reason.severity, reason.name, message)
}

// EventOnChange writes an Event on the Node if the state differs from that of the last call with
// this reason. An empty state means that there is nothing to say now, so nothing is written.
func (r *Recorder) EventOnChange(reason Reason, state, message string) {
	r.mu.Lock()
	before := r.states[reason.name]
	r.states[reason.name] = state
	r.mu.Unlock()
	if state != "" && state != before {
		r.Event(reason, message)
	}
}

// AboutGPU writes an Event on the object. The recorder limits the rate of such Events by the GPU's
// name too.
func (r *Recorder) AboutGPU(object *corev1.ObjectReference, gpu string, reason Reason, message string) {
	r.recorder.AnnotatedEventf(object, map[string]string{GPUAnnotation: gpu}, reason.severity, reason.name, "%s", message)
}

// Node returns the reference to the Node with which Events refer to it.
func (r *Recorder) Node() *corev1.ObjectReference { return r.node }

// EventNow writes an Event on the Node and waits for the API server. A stopping plugin needs this,
// because its Recorder has ended.
func (r *Recorder) EventNow(ctx context.Context, client kubernetes.Interface, reason Reason, message string) error {
	ctx, cancel := context.WithTimeout(ctx, lastEventTimeout)
	defer cancel()
	now := metav1.Now()
	_, err := client.CoreV1().Events(metav1.NamespaceDefault).Create(ctx, &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, GenerateName: r.node.Name + "."},
		InvolvedObject: *r.node, Type: reason.severity, Reason: reason.name, Message: message,
		Source:         corev1.EventSource{Component: device.DriverName, Host: r.node.Name},
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("write an Event about the Node: %w", err)
	}
	return nil
}

// ClaimEvent writes an Event on the claim. Errors of an Unprepare need it: the kubelet shows errors
// of a Prepare in the Pod's Events, but it shows errors of an Unprepare nowhere.
func (r *Recorder) ClaimEvent(c kubeletplugin.NamespacedObject, reason Reason, message string) {
	meta := metav1.ObjectMeta{Namespace: c.Namespace, Name: c.Name, UID: c.UID}
	r.recorder.Event(ClaimReference(&resourceapi.ResourceClaim{ObjectMeta: meta}), reason.severity, reason.name, message)
}

// ClaimReference returns a reference to the claim for Events about it.
func ClaimReference(c *resourceapi.ResourceClaim) *corev1.ObjectReference {
	version, kind := resourceapi.SchemeGroupVersion.WithKind("ResourceClaim").ToAPIVersionAndKind()
	return &corev1.ObjectReference{APIVersion: version, Kind: kind, Namespace: c.Namespace, Name: c.Name, UID: c.UID}
}
