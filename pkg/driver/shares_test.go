package driver

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

const shareName = gpuName + "-share"

// claimShare creates a claim that is allocated one share of the first GPU.
func (n *node) claimShare(t *testing.T, name string) *drapb.Claim {
	t.Helper()
	return n.claimShares(t, name, "1")
}

func (n *node) claimShares(t *testing.T, name, shares string) *drapb.Claim {
	t.Helper()
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID("uid-" + name)}}
	results := []resourceapi.DeviceRequestAllocationResult{{
		Driver: DriverName, Pool: "node", Device: shareName, Request: "gpu", ShareID: ptr.To(types.UID("share-" + name)),
		ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{device.CapacityShares: resource.MustParse(shares)},
	}}
	c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}}
	c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod", UID: "pod"}}
	if _, err := n.client.ResourceV1().ResourceClaims("team").Create(t.Context(), c, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return &drapb.Claim{Namespace: "team", Name: name, Uid: string(c.UID)}
}

// generateSliceNames makes the fake client generate slice names. They must be unique, because
// counters and devices are in different slices.
func (n *node) generateSliceNames() {
	var last atomic.Int64
	prependReactor(n.client, "create", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if create, ok := a.(clienttesting.CreateActionImpl); ok {
			if s, ok := create.GetObject().(*resourceapi.ResourceSlice); ok && s.Name == "" {
				s.Name = fmt.Sprint(s.GenerateName, last.Add(1))
			}
		}
		return false, nil, nil
	})
}

// offeredShares returns how many plain shares of the device the slices offer.
func (n *node) offeredShares(t *testing.T, name string) (shares int64) {
	t.Helper()
	list, err := n.client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range list.Items {
		for _, d := range s.Spec.Devices {
			if d.Name == name {
				offered := d.Capacity[device.CapacityShares].Value
				shares = offered.Value()
			}
		}
	}
	return shares
}

func TestHeldSharesOutliveTheirRules(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.generateSliceNames()
	n.cfg.Settings.Shares = []device.ShareRule{{Kind: device.KindShares, Count: 3}}
	n.start(t)
	n.register(t)
	eventually(t, "shares are published", func() bool { return slices.Contains(published(t, n.client), shareName) })
	c := n.claimShare(t, "c")
	if answer := n.prepare(t, c); answer.GetError() != "" {
		t.Fatal(answer.GetError())
	}
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}

	n.cfg.Settings.Shares = nil
	n.start(t)
	n.register(t)
	n.expectEvent(t, "Node", "node", "SharesEnding", shareName)
	eventually(t, "the other GPU's shares are withdrawn", func() bool { return len(published(t, n.client)) == 3 })
	if left := n.offeredShares(t, shareName); left != 1 {
		t.Errorf("%d shares are still offered", left)
	}
	if failed := n.unprepare(t, c); failed != "" {
		t.Fatal(failed)
	}
	// The Unprepare alone does not withdraw the share: while the claim is allocated, it may be
	// prepared again. So the test deletes the claim.
	if err := n.client.ResourceV1().ResourceClaims("team").Delete(t.Context(), c.GetName(), metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the share is withdrawn after its claim ended", func() bool { return !slices.Contains(published(t, n.client), shareName) })
}

// The scheduler allocated both claims under the old rule. A plain share has no limit that the node
// must keep, so a lower number takes no share away.
func TestLowerShareCountKeepsAllocatedClaims(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.cfg.Settings.Shares = []device.ShareRule{{Kind: device.KindShares, Count: 4}}
	n.start(t)
	n.register(t)
	before, after := n.claimShares(t, "before", "2"), n.claimShares(t, "after", "2")
	if answer := n.prepare(t, before); answer.GetError() != "" {
		t.Fatal(answer.GetError())
	}
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	n.cfg.Settings.Shares = []device.ShareRule{{Kind: device.KindShares, Count: 2}}
	n.start(t)
	n.register(t)
	for _, c := range []*drapb.Claim{after, before} {
		if answer := n.prepare(t, c); answer.GetError() != "" {
			t.Errorf("%s: %s", c.GetName(), answer.GetError())
		}
	}
}

func TestUnsupportedFractionsAreAnEvent(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.cfg.Settings.Shares = []device.ShareRule{{Kind: device.KindFractions}}
	n.setHardware("old", func() (nvidia.Node, error) {
		found, err := twoGPUs()
		found.Driver.Version = "550.163.01"
		for i := range found.GPUs {
			found.GPUs[i].CUDAComputeCapability = "9.0"
		}
		found.GPUs[1].CUDAComputeCapability = "6.1"
		return found, err
	})
	n.start(t)
	n.expectEvent(t, "Node", "node", "FractionsNotOffered", gpuName+": MPS serves several users at once only from NVIDIA driver 555 on")
	n.expectEvent(t, "Node", "node", "FractionsNotOffered", "before Volta")
	eventually(t, "whole GPUs are offered", func() bool { return len(published(t, n.client)) == 2 })
}

func TestAbsentSupervisorIsAnEventAfterGrace(t *testing.T) {
	recorder := record.NewFakeRecorder(10)
	fractions := false
	r := &daemonReports{events: events.NewFor(recorder, "node"), fractionsOffered: func() bool { return fractions }}
	now := time.Now()
	absent := errors.New("the MPS supervisor is not running")
	for i, c := range []struct {
		fractions bool
		err       error
		after     time.Duration
		events    int
	}{
		{false, absent, 0, 0},
		{false, absent, time.Hour, 0},
		{true, absent, time.Hour, 0},
		{true, absent, 30 * time.Second, 0},
		{true, absent, 31 * time.Second, 1},
		{true, absent, time.Hour, 0},
		{true, nil, 0, 0},
		{true, absent, time.Second, 0},
		{true, absent, time.Hour, 1},
	} {
		now = now.Add(c.after)
		fractions = c.fractions
		r.checkSupervisor(c.err, now)
		if events := len(recorder.Events); events != c.events {
			t.Errorf("%d: %d Events, want %d", i, events, c.events)
		}
		for len(recorder.Events) > 0 {
			<-recorder.Events
		}
	}
}
