package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

const shareName = gpuName + "-share"

// plainShare is a claim for one plain share.
func (n *node) plainShare(t *testing.T, name string) *drapb.Claim {
	t.Helper()
	return n.plainShares(t, name, "1")
}

func (n *node) plainShares(t *testing.T, name, shares string) *drapb.Claim {
	t.Helper()
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID("uid-" + name)}}
	c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{
		Driver: DriverName, Pool: "node", Device: shareName, Request: "gpu", ShareID: ptr.To(types.UID("share-" + name)),
		ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{device.CapacityShares: resource.MustParse(shares)},
	}}}}
	c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod", UID: "pod"}}
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
	// Allocated it may be prepared again.
	if err := n.client.ResourceV1().ResourceClaims("team").Delete(t.Context(), c.GetName(), metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "when its claim has ended, the share is withdrawn", func() bool { return !slices.Contains(published(t, n.client), shareName) })
}

func TestMoreSharesThanTheRulesOfferAreRefused(t *testing.T) {
	n := newNode(t)
	n.cfg.Shares = "shares:5,#0=shares:3"
	n.start(t)
	n.register(t)
	if answer := n.prepare(t, n.plainShares(t, "more", "4")); !strings.Contains(answer.GetError(), "which has 3") {
		t.Errorf("the answer is %q", answer.GetError())
	}
	if answer := n.prepare(t, n.plainShares(t, "all", "3")); answer.GetError() != "" {
		t.Error(answer.GetError())
	}
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

// settable is hardware of which all can be set.
type settable struct {
	prepare.Partitions
	persistence *bool
}

func (s *settable) Look(context.Context, device.Card) (device.CutState, error) {
	return device.CutState{Persistence: s.persistence}, nil
}
func (s *settable) SetComputeMode(context.Context, device.Card, device.ComputeMode) error { return nil }
func (s *settable) SetTimeSlice(context.Context, device.Card, device.TimeSlice) error     { return nil }

func TestWhatTheDriverForgetsIsSaidOnce(t *testing.T) {
	recorder := record.NewFakeRecorder(10)
	hardware := &settable{}
	f := newForgetful(hardware, &nodeEvents{recorder: recorder, node: &corev1.ObjectReference{}})
	set := func() (said int) {
		t.Helper()
		for _, c := range []device.Card{{PCIAddress: "0000:1b:00.0", UUID: "GPU-1"}, {PCIAddress: "0000:43:00.0", UUID: "GPU-2"}} {
			_, err := f.Look(t.Context(), c)
			for _, to := range []device.TimeSlice{device.TimeSliceLong, device.TimeSliceDefault, device.TimeSliceLong} {
				err = errors.Join(err, f.SetTimeSlice(t.Context(), c, to))
			}
			if err := errors.Join(err, f.SetComputeMode(t.Context(), c, device.ComputeExclusiveProcess)); err != nil {
				t.Fatal(err)
			}
		}
		for len(recorder.Events) > 0 {
			if e := <-recorder.Events; !strings.Contains(e, "PersistenceModeOff") || !strings.Contains(e, "nvidia-smi -pm 1") {
				t.Error(e)
			}
			said++
		}
		return said
	}
	for i, c := range []struct {
		persistence *bool
		said        int
	}{{nil, 0}, {ptr.To(true), 0}, {ptr.To(false), 4}, {ptr.To(false), 0}, {ptr.To(true), 0}, {ptr.To(false), 4}} {
		hardware.persistence = c.persistence
		if said := set(); said != c.said {
			t.Errorf("%d: %d Events, want %d", i, said, c.said)
		}
	}
}

func TestASupervisorThatIsAbsentForLongIsAnEvent(t *testing.T) {
	recorder := record.NewFakeRecorder(10)
	d := &Driver{events: &nodeEvents{recorder: recorder, node: &corev1.ObjectReference{}}}
	now := time.Now()
	absent := errors.New("the MPS supervisor is not running")
	for i, c := range []struct {
		fractions bool
		err       error
		after     time.Duration
		said      int
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
		d.fractions.Store(c.fractions)
		d.missSupervisor(c.err, now)
		if said := len(recorder.Events); said != c.said {
			t.Errorf("%d: %d Events, want %d", i, said, c.said)
		}
		for len(recorder.Events) > 0 {
			<-recorder.Events
		}
	}
}

func TestThePluginTellsWhatTheDriverForgets(t *testing.T) {
	n := newNode(t)
	d, err := New(t.Context(), n.cfg, Parts{
		Client: n.client, StatusClient: n.client, Hardware: n.hardware(), Partitions: &settable{persistence: ptr.To(false)}, Metrics: metrics.New("test"),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.presence.End)
	card := device.Card{PCIAddress: "0000:1b:00.0", UUID: "GPU-1"}
	if _, err := d.preparer.Partitions.Look(t.Context(), card); err != nil {
		t.Fatal(err)
	}
	if err := d.preparer.Partitions.SetComputeMode(t.Context(), card, device.ComputeExclusiveProcess); err != nil {
		t.Fatal(err)
	}
	n.hears(t, "Node", "node", "PersistenceModeOff", gpuName)
}

// A lost GPU stays in the slices, so that the others keep their places there.
func TestAShareRuleForAPlaceCountsWhatIsOffered(t *testing.T) {
	n := newAiling(t)
	n.cfg.Shares = "shares:5,#1=shares:3"
	n.run(t)
	eventually(t, "the GPUs are known", func() bool { return len(n.driver.inv.Snapshot().Node.GPUs) == 2 })
	n.register(t)
	if msg := n.prepare(t, n.claim(t, "held", firstGPU)).GetError(); msg != "" {
		t.Fatal(msg)
	}
	second := n.driver.inv.Snapshot().Node.GPUs[1].GPU
	n.says(device.Signal{Condition: &device.Condition{Card: n.card("0000:1b:00.0"), Reach: device.ReachLost, At: time.Now()}})
	eventually(t, "the first is lost", func() bool { return strings.Contains(n.taints(t)[firstGPU], "lost:NoSchedule") })
	n.say("the second", func() (nvidia.Node, error) {
		all, err := twoGPUs()
		all.GPUs = all.GPUs[1:]
		return all, err
	})
	eventually(t, "the hardware shows one", func() bool { return len(n.driver.preparer.Hardware.Snapshot().Node.GPUs) == 1 })
	name, _ := device.ParseName(secondGPU + "-share")
	if q := n.driver.preparer.Totals(second, name)[device.CapacityShares]; q.String() != "3" {
		t.Errorf("it has %s shares", q.String())
	}
}
