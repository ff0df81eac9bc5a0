package nodeview

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
)

// devicePluginReports has the warnings so far, and whether the device plugin is there.
type devicePluginReports struct {
	last     string
	messages []string
	there    bool
}

func (r *devicePluginReports) DevicePlugin(there bool) { r.there = there }

func (r *devicePluginReports) EventOnChange(_ events.Reason, state, message string) {
	if state != r.last && state != "" {
		r.messages = append(r.messages, message)
	}
	r.last = state
}

func TestDevicePluginConflict(t *testing.T) {
	gpus := func(name, n string) corev1.ResourceList {
		return corev1.ResourceList{corev1.ResourceName(name): resource.MustParse(n), corev1.ResourceCPU: resource.MustParse("2")}
	}
	for _, mode := range []string{config.ConflictRefuse, config.ConflictWarn} {
		said, node := &devicePluginReports{}, newWorld(ready(first)).start()
		b := DevicePlugin{Node: node, Refuse: mode == config.ConflictRefuse, EventOnChange: said.EventOnChange, Found: said.DevicePlugin}
		for _, c := range []struct {
			capacity corev1.ResourceList
			there    bool
			messages int
		}{
			{gpus("nvidia.com/gpu", "0"), false, 0},
			{gpus("nvidia.com/gpumem", "8"), false, 0},
			{gpus("nvidia.com/mig-1g.10gb", "7"), true, 1},
			{gpus("nvidia.com/mig-1g.10gb", "7"), true, 1},
			{gpus("nvidia.com/gpu", "8"), true, 2},
			{gpus("amd.com/gpu", "8"), false, 2},
			{gpus("nvidia.com/gpu.shared", "8"), true, 3},
		} {
			b.Observe(&corev1.Node{Status: corev1.NodeStatus{Capacity: c.capacity}})
			ready := node.View().Preparable.Ready
			if said.there != c.there || len(said.messages) != c.messages || ready != (mode == config.ConflictWarn || !c.there) {
				t.Errorf("%s, %v: there %v, said %q, ready %v", mode, c.capacity, said.there, said.messages, ready)
			}
		}
		if !strings.Contains(said.messages[2], "nvidia.com/gpu.shared=8") || !strings.Contains(said.messages[2], "devicePluginConflict") {
			t.Errorf("%q", said.messages[2])
		}
	}
}
