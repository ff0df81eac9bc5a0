package driver

import (
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// sortedDevices returns the names of the published devices in order.
func (n *node) sortedDevices(t *testing.T) []string {
	t.Helper()
	names := published(t, n.client)
	slices.Sort(names)
	return names
}

func TestDefaultInstallReportsNoLimits(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.setHardware("cuttable", oneMIGCapableGPU)
	n.start(t)
	eventually(t, "the whole GPU is published", func() bool { return slices.Equal(n.sortedDevices(t), []string{firstGPU}) })
	for _, event := range n.events(t, "Node", "node") {
		if strings.HasPrefix(event, "GPUsLimited") {
			t.Error(event)
		}
	}
}

// If the publisher cannot list claims, it does not know which devices are allocated. The published
// devices must stay, and the publisher must retry.
func TestUnlistableClaimsKeepPublishedDevices(t *testing.T) {
	t.Parallel()
	n := &healthNode{node: newNode(t)}
	n.setHardware("cuttable", oneMIGCapableGPU)
	n.cfg.Settings.MIG.Policy = device.PolicyDynamic
	n.startPlugin(t)
	everything := []string{firstGPU, firstGPU + "-mig-9-0", firstGPU + "-mig-9-1"}
	eventually(t, "every shape is published", func() bool { return slices.Equal(n.sortedDevices(t), everything) })
	var forbidden atomic.Bool
	var tries atomic.Int32
	forbidden.Store(true)
	prependReactor(n.client, "list", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
		if !forbidden.Load() {
			return false, nil, nil
		}
		tries.Add(1)
		return true, nil, apierrors.NewForbidden(resourceapi.Resource("resourceclaims"), "", nil)
	})
	n.editNode(t, nil, map[string]string{policyAnnotation: "static"})
	eventually(t, "the publisher retries", func() bool { return tries.Load() > 1 })
	if got := n.sortedDevices(t); !slices.Equal(got, everything) {
		t.Errorf("published are %v", got)
	}
	if !n.metric(t, "gpu_dra_publish_errors_total") {
		t.Error("no error is counted")
	}
	forbidden.Store(false)
	eventually(t, "the GPU is published whole", func() bool { return slices.Equal(n.sortedDevices(t), []string{firstGPU}) })
}
