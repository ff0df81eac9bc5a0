package driver

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
)

// gpuAnnotation names in an Event the GPU that it is about.
const gpuAnnotation = DriverName + "/gpu"

// noticeMost is how many messages one Event has at most.
const noticeMost = 3

// notice is an Event to be written: all that changed of one GPU at one time and for one reason.
type notice struct {
	gpu, kind, reason string
	messages          []string
	more              int
}

type notices []notice

// add says one thing more.
func (n *notices) add(c health.Change, kind, reason, message string) {
	gpu := c.Card.PCIAddress.WholeName()
	for i := range *n {
		same := &(*n)[i]
		switch {
		case same.gpu != gpu || same.reason != reason:
			continue
		case len(same.messages) < noticeMost:
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
		text += fmt.Sprintf("; and %d more, which are in the plugin's log", n.more)
	}
	return text
}

// health writes an Event about a GPU.
func (e *nodeEvents) health(object *corev1.ObjectReference, n notice) {
	e.recorder.AnnotatedEventf(object, map[string]string{gpuAnnotation: n.gpu}, n.kind, n.reason, "%s", n)
}

// quotaKey says which Events share a quota of 25, and one more every five minutes: those about one object and one GPU. So a GPU that never ceases to fail
// takes no Event from another one, nor from what else is to be said of the node.
func quotaKey(e *corev1.Event) string {
	o := e.InvolvedObject
	return strings.Join([]string{e.Source.Component, o.Kind, o.Namespace, o.Name, string(o.UID), e.Annotations[gpuAnnotation]}, "/")
}

// likenessKey says which Events are told as one where many come within ten minutes: those that are alike but for their messages, about one GPU.
func likenessKey(e *corev1.Event) (group, member string) {
	group, member = record.EventAggregatorByReasonFunc(e)
	return group + e.Annotations[gpuAnnotation], member
}
