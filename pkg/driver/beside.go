package driver

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// besidePlugin watches for NVIDIA's device plugin on the same node: the kubelet says in the Node's capacity what a device plugin offers. Both would give the
// same GPU to two Pods, since neither scheduler's arithmetic knows of the other's. An extended resource that a DeviceClass stands for is in no Node's capacity.
type besidePlugin struct {
	// refuse keeps the node from being ready while it is there.
	refuse    bool
	readiness *readiness
	warn      func(reason, message string)
	seen      func(there bool)

	said string
}

// See is shown the Node with each change of it, one after another.
func (b *besidePlugin) See(node *corev1.Node) {
	var offered []string
	for name, n := range node.Status.Capacity {
		if isDevicePluginResource(string(name)) && !n.IsZero() {
			offered = append(offered, string(name)+"="+n.String())
		}
	}
	slices.Sort(offered)
	b.seen(len(offered) > 0)
	message := ""
	if len(offered) > 0 {
		message = "NVIDIA's device plugin offers this node's GPUs too (" + strings.Join(offered, ", ") + " in the Node's capacity), and would give them to Pods that know nothing of claims. Keep one of the two off the node with a nodeSelector. "
		if b.refuse {
			message += "Until then no claim is prepared here. If each has its own GPUs on the node, set besideDevicePlugin to warn."
		} else {
			message += "Both go on, as besideDevicePlugin says: nothing else keeps a GPU from being given out twice"
		}
	}
	switch {
	case message == "":
		b.readiness.Clear("device-plugin")
	case b.refuse:
		b.readiness.Report(condition{source: "device-plugin", code: codeDevicePlugin, message: message})
	}
	if message != b.said && message != "" {
		b.warn("DevicePlugin", message)
	}
	b.said = message
}

func isDevicePluginResource(name string) bool {
	return name == "nvidia.com/gpu" || name == "nvidia.com/gpu.shared" || strings.HasPrefix(name, "nvidia.com/mig-")
}
