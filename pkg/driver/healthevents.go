package driver

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
)

// gpuAnnotation is the annotation of an Event with the name of the GPU that the Event is about.
const gpuAnnotation = DriverName + "/gpu"

// maxNoticeMessages is how many messages one Event contains.
const maxNoticeMessages = 3

// notice is the content of one Event. It combines all health changes of one GPU that have the same
// Event reason.
type notice struct {
	gpu, kind, reason string
	messages          []string
	more              int
}

type notices []notice

// add adds the message to the notice about the same GPU with the same reason, or to a new one.
func (n *notices) add(c health.Change, kind, reason, message string) {
	gpu := c.Card.PCIAddress.WholeName()
	for i := range *n {
		same := &(*n)[i]
		switch {
		case same.gpu != gpu || same.reason != reason:
			continue
		case len(same.messages) < maxNoticeMessages:
			same.messages = append(same.messages, message)
		default:
			same.more++
		}
		return
	}
	*n = append(*n, notice{gpu: gpu, kind: kind, reason: reason, messages: []string{message}})
}

func (n notice) String() string {
	text := strings.Join(n.messages, "; ")
	if n.more > 0 {
		text += fmt.Sprintf("; and %d more in the plugin's log", n.more)
	}
	return text
}

// healthEvent writes the notice as an Event on the object.
func (e *nodeEvents) healthEvent(object *corev1.ObjectReference, n notice) {
	e.recorder.AnnotatedEventf(object, map[string]string{gpuAnnotation: n.gpu}, n.kind, n.reason, "%s", n)
}

// rateLimitKey returns the key by which the recorder limits Events: 25 for each key, then one every
// five minutes. Each pair of object and GPU has its own key, so that a failing GPU does not
// suppress Events about other GPUs or the node.
func rateLimitKey(e *corev1.Event) string {
	o := e.InvolvedObject
	return strings.Join([]string{e.Source.Component, o.Kind, o.Namespace, o.Name, string(o.UID), e.Annotations[gpuAnnotation]}, "/")
}

// aggregationKey returns the keys by which the recorder merges similar Events if many come within
// ten minutes. Events about one GPU that differ only in their messages have the same group. Each
// message is a member of the group.
func aggregationKey(e *corev1.Event) (group, member string) {
	group, member = record.EventAggregatorByReasonFunc(e)
	return group + e.Annotations[gpuAnnotation], member
}
