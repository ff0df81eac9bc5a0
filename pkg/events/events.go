// Package events writes Kubernetes Events about the plugin's Node and about claims.
//
// A Recorder writes in the background, so no call waits for the API server. It limits the rate of
// Events by object and GPU: a failing GPU does not suppress Events about other GPUs or the node.
// WarnOnChange keeps a state that lasts from repeating its Event.
//
// The package does not know what the Events are about.
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

// lastEventTimeout limits how long WarnNow waits for the API server.
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
	// states has the last state that WarnOnChange and NormalOnChange got, by the Event's reason.
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

// Warn writes a warning on the Node.
func (r *Recorder) Warn(reason, message string) {
	r.recorder.Event(r.node, corev1.EventTypeWarning, reason, message)
}

// Normal writes an Event of type Normal on the Node.
func (r *Recorder) Normal(reason, message string) {
	r.recorder.Event(r.node, corev1.EventTypeNormal, reason, message)
}

// WarnOnChange writes a warning on the Node if the state differs from that of the last call with
// this reason. An empty state means that there is nothing to warn of now, so nothing is written.
func (r *Recorder) WarnOnChange(reason, state, message string) {
	if r.changed(reason, state) {
		r.Warn(reason, message)
	}
}

// NormalOnChange is like WarnOnChange, for an Event of type Normal.
func (r *Recorder) NormalOnChange(reason, state, message string) {
	if r.changed(reason, state) {
		r.Normal(reason, message)
	}
}

// changed stores the state and reports whether its Event must be written.
func (r *Recorder) changed(reason, state string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	before := r.states[reason]
	r.states[reason] = state
	return state != "" && state != before
}

// AboutGPU writes an Event of the given kind (Normal or Warning) on the object. The recorder limits
// the rate of such Events by the GPU's name too.
func (r *Recorder) AboutGPU(object *corev1.ObjectReference, gpu, kind, reason, message string) {
	r.recorder.AnnotatedEventf(object, map[string]string{GPUAnnotation: gpu}, kind, reason, "%s", message)
}

// Node returns the reference to the Node with which Events refer to it.
func (r *Recorder) Node() *corev1.ObjectReference { return r.node }

// WarnNow writes a warning on the Node and waits for the API server. A stopping plugin needs this,
// because its Recorder has ended.
func (r *Recorder) WarnNow(ctx context.Context, client kubernetes.Interface, reason, message string) error {
	ctx, cancel := context.WithTimeout(ctx, lastEventTimeout)
	defer cancel()
	now := metav1.Now()
	_, err := client.CoreV1().Events(metav1.NamespaceDefault).Create(ctx, &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, GenerateName: r.node.Name + "."},
		InvolvedObject: *r.node, Type: corev1.EventTypeWarning, Reason: reason, Message: message,
		Source:         corev1.EventSource{Component: device.DriverName, Host: r.node.Name},
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("write an Event about the Node: %w", err)
	}
	return nil
}

// WarnClaim writes a warning on the claim. It is for errors of an Unprepare: the kubelet shows
// errors of a Prepare in the Pod's Events, but it shows errors of an Unprepare nowhere.
func (r *Recorder) WarnClaim(c kubeletplugin.NamespacedObject, reason, message string) {
	meta := metav1.ObjectMeta{Namespace: c.Namespace, Name: c.Name, UID: c.UID}
	claim := &resourceapi.ResourceClaim{ObjectMeta: meta}
	r.recorder.Event(ClaimReference(claim), corev1.EventTypeWarning, reason, message)
}

// NormalClaim writes an Event of type Normal on the claim.
func (r *Recorder) NormalClaim(c *resourceapi.ResourceClaim, reason, message string) {
	r.recorder.Event(ClaimReference(c), corev1.EventTypeNormal, reason, message)
}

// ClaimReference returns a reference to the claim for Events about it.
func ClaimReference(c *resourceapi.ResourceClaim) *corev1.ObjectReference {
	version, kind := resourceapi.SchemeGroupVersion.WithKind("ResourceClaim").ToAPIVersionAndKind()
	return &corev1.ObjectReference{APIVersion: version, Kind: kind, Namespace: c.Namespace, Name: c.Name, UID: c.UID}
}
