package driver

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

const shareName = gpuName + "-share"

// plainShare is a claim for one plain share.
func (n *node) plainShare(t *testing.T, name string) *drapb.Claim {
	t.Helper()
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID("uid-" + name)}}
	c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{
		Driver: DriverName, Pool: "node", Device: shareName, Request: "gpu", ShareID: ptr.To(types.UID("share-" + name)),
		ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{device.CapacityShares: resource.MustParse("1")},
	}}}}
	if _, err := n.client.ResourceV1().ResourceClaims("team").Create(t.Context(), c, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return &drapb.Claim{Namespace: "team", Name: name, Uid: string(c.UID)}
}

// namesSlices does what the API server does: counters and devices are slices of their own.
func (n *node) namesSlices() {
	var last atomic.Int64
	n.client.PrependReactor("create", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if create, ok := a.(clienttesting.CreateActionImpl); ok {
			if s, ok := create.GetObject().(*resourceapi.ResourceSlice); ok && s.Name == "" {
				s.Name = fmt.Sprint(s.GenerateName, last.Add(1))
			}
		}
		return false, nil, nil
	})
}

func TestSharesThatAreHeldStayWhenTheRulesDoNot(t *testing.T) {
	n := newNode(t)
	n.namesSlices()
	n.cfg.Shares = "shares:3"
	n.start(t)
	n.register(t)
	eventually(t, "shares are published", func() bool { return slices.Contains(published(t, n.client), shareName) })
	c := n.plainShare(t, "c")
	if answer := n.prepare(t, c); answer.GetError() != "" {
		t.Fatal(answer.GetError())
	}
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}

	n.cfg.Shares = ""
	n.start(t)
	n.register(t)
	n.hears(t, "Node", "node", "SharesEnding", shareName)
	eventually(t, "the other GPU's shares are withdrawn", func() bool { return len(published(t, n.client)) == 3 })
	list, err := n.client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range list.Items {
		for _, d := range s.Spec.Devices {
			if left := d.Capacity[device.CapacityShares]; d.Name == shareName && left.Value.Value() != 1 {
				t.Errorf("there are still %s shares", left.Value.String())
			}
		}
	}
	if failed := n.unprepare(t, c); failed != "" {
		t.Fatal(failed)
	}
	eventually(t, "when it was given back, the share is withdrawn", func() bool { return !slices.Contains(published(t, n.client), shareName) })
}

func TestFractionsThatCannotBeKeptAreAnEvent(t *testing.T) {
	n := newNode(t)
	n.cfg.Shares = "fractions"
	n.say("old", func() (nvidia.Node, error) {
		found, err := twoGPUs()
		found.Driver.Version = "550.163.01"
		for i := range found.GPUs {
			found.GPUs[i].CUDAComputeCapability = "9.0"
		}
		found.GPUs[1].CUDAComputeCapability = "6.1"
		return found, err
	})
	n.start(t)
	n.hears(t, "Node", "node", "FractionsNotOffered", gpuName+": MPS serves several users at once from NVIDIA driver 555 on")
	n.hears(t, "Node", "node", "FractionsNotOffered", "before Volta")
	eventually(t, "whole GPUs are offered", func() bool { return len(published(t, n.client)) == 2 })
}
