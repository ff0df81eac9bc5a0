package nodeview

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
)

// CodeDevicePlugin is the code of the condition that DevicePlugin reports, and its source.
const CodeDevicePlugin = "device-plugin"

// DevicePlugin detects NVIDIA's device plugin by its resources in the Node's capacity. Neither the
// device plugin nor this driver knows the other's allocations, so both may give out the same GPU.
// Extended resources of a DeviceClass do not count: they are not in a Node's capacity.
type DevicePlugin struct {
	Node *Node
	// Refuse is true if the node is not ready while the device plugin runs on it.
	Refuse bool
	// EventOnChange writes an Event on the Node if the state differs from that of the last call.
	EventOnChange func(reason events.Reason, state, message string)
	// Found shows in the metrics whether the device plugin offers the node's GPUs.
	Found func(there bool)
}

// Observe looks for the device plugin's resources in node, which is the newest version of the Node.
func (c DevicePlugin) Observe(node *corev1.Node) {
	var offered []string
	for name, n := range node.Status.Capacity {
		if isDevicePluginResource(string(name)) && !n.IsZero() {
			offered = append(offered, string(name)+"="+n.String())
		}
	}
	slices.Sort(offered)
	c.Found(len(offered) > 0)
	message := ""
	if len(offered) > 0 {
		message = "NVIDIA's device plugin also offers this node's GPUs (" + strings.Join(offered, ", ") +
			" in the Node's capacity) and gives them to Pods without claims. Keep one of the two off this node with a nodeSelector. "
		if c.Refuse {
			message += "Until then this driver prepares no claims here. If each has its own GPUs on this node, set devicePluginConflict to warn."
		} else {
			message += "Both keep running because devicePluginConflict is warn: two Pods may get the same GPU"
		}
	}
	switch {
	case message == "":
		c.Node.Clear(CodeDevicePlugin)
	case c.Refuse:
		c.Node.Report(Condition{Source: CodeDevicePlugin, Code: CodeDevicePlugin, Message: message})
	}
	c.EventOnChange(events.DevicePlugin, message, message)
}

func isDevicePluginResource(name string) bool {
	return name == "nvidia.com/gpu" || name == "nvidia.com/gpu.shared" || strings.HasPrefix(name, "nvidia.com/mig-")
}
