package driver

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
)

// devicePluginConflict detects NVIDIA's device plugin by its resources in the Node's capacity.
// Neither the device plugin nor this driver knows the other's allocations, so both may give out the
// same GPU. Extended resources of a DeviceClass do not count: they are not in a Node's capacity.
type devicePluginConflict struct {
	// refuse makes the node not ready while the device plugin runs on it.
	refuse     bool
	conditions *nodeview.Conditions
	warn       func(reason, message string)
	onDetected func(there bool)

	lastMessage string
}

// Observe looks for the device plugin's resources in node, which is the newest version of the Node.
// Only one goroutine may call it.
func (c *devicePluginConflict) Observe(node *corev1.Node) {
	var offered []string
	for name, n := range node.Status.Capacity {
		if isDevicePluginResource(string(name)) && !n.IsZero() {
			offered = append(offered, string(name)+"="+n.String())
		}
	}
	slices.Sort(offered)
	c.onDetected(len(offered) > 0)
	message := ""
	if len(offered) > 0 {
		message = "NVIDIA's device plugin also offers this node's GPUs (" + strings.Join(offered, ", ") +
			" in the Node's capacity) and gives them to Pods without claims. Keep one of the two off this node with a nodeSelector. "
		if c.refuse {
			message += "Until then this driver prepares no claims here. If each has its own GPUs on this node, set devicePluginConflict to warn."
		} else {
			message += "Both keep running because devicePluginConflict is warn: two Pods may get the same GPU"
		}
	}
	switch {
	case message == "":
		c.conditions.Clear("device-plugin")
	case c.refuse:
		c.conditions.Report(nodeview.Condition{Source: "device-plugin", Code: nodeview.CodeDevicePlugin, Message: message})
	}
	if message != c.lastMessage && message != "" {
		c.warn("DevicePlugin", message)
	}
	c.lastMessage = message
}

func isDevicePluginResource(name string) bool {
	return name == "nvidia.com/gpu" || name == "nvidia.com/gpu.shared" || strings.HasPrefix(name, "nvidia.com/mig-")
}
