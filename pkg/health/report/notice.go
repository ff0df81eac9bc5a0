package report

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
)

// maxMessages is how many messages one Event contains.
const maxMessages = 3

// notice is the content of one Event. It combines all health changes of one GPU that have the same
// Event reason.
type notice struct {
	gpu      string
	reason   events.Reason
	messages []string
	more     int
}

type notices []notice

// add adds the message to the notice about the same GPU with the same reason, or to a new one.
func (n *notices) add(c change, message string) {
	gpu := c.Card.PCIAddress.WholeName()
	for i := range *n {
		same := &(*n)[i]
		switch {
		case same.gpu != gpu || same.reason != c.reason:
			continue
		case len(same.messages) < maxMessages:
			same.messages = append(same.messages, message)
		default:
			same.more++
		}
		return
	}
	*n = append(*n, notice{gpu: gpu, reason: c.reason, messages: []string{message}})
}

// write writes the notices as Events on the object.
func (n notices) write(to Events, object *corev1.ObjectReference) {
	for _, one := range n {
		to.AboutGPU(object, one.gpu, one.reason, one.String())
	}
}

func (n notice) String() string {
	text := strings.Join(n.messages, "; ")
	if n.more > 0 {
		text += fmt.Sprintf("; and %d more in the plugin's log", n.more)
	}
	return text
}
