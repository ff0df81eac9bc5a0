package driver

import (
	"slices"
	"sync/atomic"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fakeapi"
)

// validateSlices makes the fake API server call validate for each slice, in dry runs and in real
// writes.
func validateSlices(client *fake.Clientset, validate func(*resourceapi.ResourceSliceSpec, bool) error) {
	prependReactor(client, "*", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		written, ok := a.(interface{ GetObject() runtime.Object })
		if !ok {
			return false, nil, nil
		}
		slice, ok := written.GetObject().(*resourceapi.ResourceSlice)
		if !ok {
			return false, nil, nil
		}
		create, ok := a.(clienttesting.CreateActionImpl)
		if err := validate(&slice.Spec, ok && len(create.CreateOptions.DryRun) > 0); err != nil {
			return true, nil, err
		}
		return false, nil, nil
	})
}

// oneMIGCapableGPU returns a scan result with one MIG-capable GPU, which the driver can offer as a
// whole and in partitions.
func oneMIGCapableGPU() (nvidia.Node, error) {
	all, err := twoGPUs()
	all.GPUs = all.GPUs[:1]
	all.GPUs[0].ProductName, all.GPUs[0].MIG = "NVIDIA H100", snapshotOfHalves().Node.GPUs[0].MIG
	return all, err
}

func TestKubernetes134GetsWholeGPUs(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.setHardware("cuttable", oneMIGCapableGPU)
	n.cfg.Settings.MIG.Policy = device.PolicyDynamic
	validateSlices(n.client, func(s *resourceapi.ResourceSliceSpec, _ bool) error { return fakeapi.Kubernetes134(s) })
	n.start(t)
	eventually(t, "the whole GPU is published", func() bool { return slices.Equal(published(t, n.client), []string{firstGPU}) })
	n.expectEvent(t, "Node", "node", "GPUsLimited", "Kubernetes 1.35")
}

func TestKubernetes135GetsAllShapes(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.setHardware("cuttable", oneMIGCapableGPU)
	n.cfg.Settings.MIG.Policy = device.PolicyDynamic
	validateSlices(n.client, func(s *resourceapi.ResourceSliceSpec, _ bool) error { return fakeapi.Kubernetes135(s) })
	n.start(t)
	eventually(t, "the GPU and its partitions are published", func() bool { return len(published(t, n.client)) == 3 })
}

func TestRejectedSlicesAreAnEvent(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
	n.setHardware("cuttable", oneMIGCapableGPU)
	n.cfg.Settings.MIG.Policy = device.PolicyDynamic
	validateSlices(n.client, func(s *resourceapi.ResourceSliceSpec, dry bool) error {
		if dry {
			return nil
		}
		return fakeapi.Kubernetes134(s)
	})
	n.startPlugin(t)
	n.expectEvent(t, "Node", "node", "SlicesRejected", "must reference a counterSet")
	if !n.metric(t, "gpu_dra_publish_errors_total") {
		t.Error("the error is not counted")
	}
}

func TestRejectedSlicesTriggerProbe(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.setHardware("cuttable", oneMIGCapableGPU)
	n.cfg.Settings.MIG.Policy = device.PolicyDynamic
	var downgraded atomic.Bool
	validateSlices(n.client, func(s *resourceapi.ResourceSliceSpec, dry bool) error {
		if dry && !downgraded.Load() {
			return fakeapi.Kubernetes135(s)
		}
		downgraded.Store(true)
		return fakeapi.Kubernetes134(s)
	})
	n.start(t)
	eventually(t, "the whole GPU is published", func() bool { return slices.Equal(published(t, n.client), []string{firstGPU}) })
}

func TestRejectedProbeIsAnEvent(t *testing.T) {
	n := newHealthNode(t)
	validateSlices(n.client, func(_ *resourceapi.ResourceSliceSpec, dry bool) error {
		if dry {
			return fakeapi.Invalid(field.Invalid(field.NewPath("spec"), "probe", "a policy refuses it"))
		}
		return nil
	})
	n.startPlugin(t)
	n.expectEvent(t, "Node", "node", "SlicesRejected", "rejects the plugin's test slices (dry run)")
}
