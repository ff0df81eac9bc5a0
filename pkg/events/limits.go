package events

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// GPUAnnotation is the annotation of an Event with the name of the GPU that the Event is about.
const GPUAnnotation = device.DriverName + "/gpu"

// rateLimitKey returns the key by which the recorder limits Events: 25 for each key, then one every
// five minutes. Each pair of object and GPU has its own key, so that a failing GPU does not
// suppress Events about other GPUs or the node.
func rateLimitKey(e *corev1.Event) string {
	o := e.InvolvedObject
	return strings.Join([]string{e.Source.Component, o.Kind, o.Namespace, o.Name, string(o.UID), e.Annotations[GPUAnnotation]}, "/")
}

// aggregationKey returns the keys by which the recorder merges similar Events if many come within
// ten minutes. Events about one GPU that differ only in their messages have the same group. Each
// message is a member of the group.
func aggregationKey(e *corev1.Event) (group, member string) {
	group, member = record.EventAggregatorByReasonFunc(e)
	return group + e.Annotations[GPUAnnotation], member
}
