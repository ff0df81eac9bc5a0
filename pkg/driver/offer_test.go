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
)

// all are the published devices, sorted.
func (n *node) all(t *testing.T) []string {
	t.Helper()
	names := published(t, n.client)
	slices.Sort(names)
	return names
}

func TestADefaultInstallOnWholeGPUsSaysNothingOfLimits(t *testing.T) {
	n := newNode(t)
	n.say("cuttable", oneCuttableGPU)
	n.start(t)
	eventually(t, "the whole GPU is published", func() bool { return slices.Equal(n.all(t), []string{firstGPU}) })
	for _, said := range n.said(t, "Node", "node") {
		if strings.HasPrefix(said, "GPUsLimited") {
			t.Error(said)
		}
	}
}

// What claims hold is not known then. What is published stays, and it is tried again.
func TestClaimsThatCannotBeListedKeepWhatIsPublished(t *testing.T) {
	n := &ailing{node: newNode(t)}
	n.say("cuttable", oneCuttableGPU)
	n.cfg.MIGPolicy = "dynamic"
	n.begin(t)
	everything := []string{firstGPU, firstGPU + "-mig-9-0", firstGPU + "-mig-9-1"}
	eventually(t, "every shape is published", func() bool { return slices.Equal(n.all(t), everything) })
	var forbidden atomic.Bool
	var tries atomic.Int32
	forbidden.Store(true)
	n.client.PrependReactor("list", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
		if !forbidden.Load() {
			return false, nil, nil
		}
		tries.Add(1)
		return true, nil, apierrors.NewForbidden(resourceapi.Resource("resourceclaims"), "", nil)
	})
	n.change(t, nil, map[string]string{policyAnnotation: "static"})
	eventually(t, "it was tried again", func() bool { return tries.Load() > 1 })
	if got := n.all(t); !slices.Equal(got, everything) {
		t.Errorf("published are %v", got)
	}
	if !n.metric(t, "gpu_dra_publish_errors_total") {
		t.Error("no error is counted")
	}
	forbidden.Store(false)
	eventually(t, "the GPU is published whole", func() bool { return slices.Equal(n.all(t), []string{firstGPU}) })
}
