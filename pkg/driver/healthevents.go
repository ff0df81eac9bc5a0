package driver

import (
	"fmt"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
)

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
