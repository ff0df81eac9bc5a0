package publish

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fakeapi"
)

// slowCluster acts as a cluster in which a list of the claims takes some time.
type slowCluster struct {
	Cluster
	takes time.Duration
	fails atomic.Bool
	lists atomic.Int64
}

func (s *slowCluster) Allocations(ctx context.Context) (device.Allocations, error) {
	s.lists.Add(1)
	select {
	case <-time.After(s.takes):
	case <-ctx.Done():
		return device.Allocations{}, ctx.Err()
	}
	if s.fails.Load() {
		return device.Allocations{}, errors.New("the list fails")
	}
	return s.Cluster.Allocations(ctx)
}

// noTaintServer returns a fake API server that drops device taints.
func noTaintServer() *fake.Clientset {
	client := fakeapi.New()
	fakeapi.Prepend(client, "create", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		slice := a.(clienttesting.CreateAction).GetObject().(*resourceapi.ResourceSlice)
		for i := range slice.Spec.Devices {
			slice.Spec.Devices[i].Taints = nil
		}
		return fakeapi.IsDryRun(a), slice, nil
	})
	return client
}

// allocate creates a claim that is allocated the first GPU.
func allocate(t *testing.T, client *fake.Clientset) {
	t.Helper()
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "c"}}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{Driver: device.DriverName, Pool: "node", Device: firstGPU}},
	}}
	if _, err := client.ResourceV1().ResourceClaims("default").Create(t.Context(), claim, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func startWithSlowCluster(t *testing.T, takes time.Duration) (*publishingNode, *slowCluster) {
	t.Helper()
	u := newPublishingNode(t, noTaintServer(), readyWith("0000:1b:00.0", "0000:43:00.0"))
	slow := &slowCluster{Cluster: u.publisher.cluster, takes: takes}
	u.publisher.cluster = slow
	u.run(t, u.publisher.publish)
	advance(time.Minute)
	return u, slow
}

// In a cluster with many claims a list takes long.
func TestSlowListWithdrawsUnhealthyDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u, _ := startWithSlowCluster(t, clusterTimeout-time.Second)
		defer u.stop()
		u.setXIDs(t, 79)
		advance(clusterTimeout)
		if got := fakeapi.Devices(t, u.client); !slices.Equal(got, []string{secondGPU}) {
			t.Errorf("published %v after the list", got)
		}
	})
}

func TestSlowListDelaysNothingElse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u, slow := startWithSlowCluster(t, clusterTimeout-time.Second)
		defer u.stop()
		u.setXIDs(t, 79)
		advance(time.Second)
		if slow.lists.Load() == 0 {
			t.Fatal("no list of the claims")
		}
		const thirdGPU = "gpu-0000-52-00-0"
		u.setInventory(readyWith("0000:1b:00.0", "0000:43:00.0", "0000:52:00.0"))
		advance(5 * time.Second)
		if got := fakeapi.Devices(t, u.client); !slices.Equal(got, []string{firstGPU, secondGPU, thirdGPU}) {
			t.Errorf("published %v while the claims are listed, want the new GPU too", got)
		}
		advance(clusterTimeout)
		if got := fakeapi.Devices(t, u.client); !slices.Equal(got, []string{secondGPU, thirdGPU}) {
			t.Errorf("published %v after the list", got)
		}
	})
}

// A list does not say which claims were allocated a device after it began.
func TestListCountsOnlyForDevicesThatHadToLeaveBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u, _ := startWithSlowCluster(t, clusterTimeout-time.Second)
		defer u.stop()
		u.setXIDs(t, 79)
		advance(time.Second)
		m := newMonitor(t, time.Now(), u.inv.Snapshot(), 79)
		second := u.inv.Snapshot().Node.GPUs[1].Card()
		m.Apply(device.Signal{Event: &device.HealthEvent{Card: second, Kind: device.EventXID, XID: 79, At: time.Now()}}, time.Now())
		u.health.set(m.View())
		advance(clusterTimeout)
		if got := fakeapi.Devices(t, u.client); !slices.Equal(got, []string{secondGPU}) {
			t.Errorf("published %v after a list from before the second GPU's fault", got)
		}
		advance(clusterTimeout + settleIntervalMax)
		if got := fakeapi.Devices(t, u.client); len(got) > 0 {
			t.Errorf("published %v after two lists", got)
		}
	})
}

// The device was healthy when the list ended, so nothing needed it then.
func TestOldListDoesNotWithdrawDeviceLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u, _ := startWithSlowCluster(t, clusterTimeout-time.Second)
		defer u.stop()
		u.setXIDs(t, 79)
		advance(time.Second)
		u.setXIDs(t) // healthy again, while the claims are listed
		advance(time.Hour)
		allocate(t, u.client)
		u.setXIDs(t, 79)
		advance(time.Minute)
		if got := fakeapi.Devices(t, u.client); !slices.Equal(got, []string{firstGPU, secondGPU}) {
			t.Errorf("published %v, but a claim was allocated the device after the last list", got)
		}
	})
}

func TestFailingListWithdrawsUnhealthyDeviceInTheEnd(t *testing.T) {
	for name, takes := range map[string]time.Duration{"error": 0, "timeout": 2 * clusterTimeout} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				u, slow := startWithSlowCluster(t, takes)
				defer u.stop()
				slow.fails.Store(true)
				u.setXIDs(t, 79)
				advance(4 * time.Minute)
				if got := fakeapi.Devices(t, u.client); !slices.Equal(got, []string{firstGPU, secondGPU}) {
					t.Errorf("published %v although a claim may have the device", got)
				}
				u.setXIDs(t) // healthy again, so the time begins anew
				advance(10 * time.Minute)
				slow.lists.Store(0)
				u.setXIDs(t, 79)
				advance(4 * time.Minute)
				if got := fakeapi.Devices(t, u.client); !slices.Equal(got, []string{firstGPU, secondGPU}) {
					t.Errorf("published %v although a claim may have the device", got)
				}
				if n, most := slow.lists.Load(), int64(4*time.Minute/(settleIntervalMax+min(takes, clusterTimeout)))+1; n > most {
					t.Errorf("%d lists, more than %d: there is no pause between them", n, most)
				}
				advance(3 * time.Minute)
				if got := fakeapi.Devices(t, u.client); !slices.Equal(got, []string{secondGPU}) {
					t.Errorf("published %v although all lists fail", got)
				}
				if takes > 0 {
					return
				}
				allocate(t, u.client)
				slow.fails.Store(false)
				advance(time.Minute)
				if got := fakeapi.Devices(t, u.client); !slices.Equal(got, []string{firstGPU, secondGPU}) {
					t.Errorf("published %v although a list names the device", got)
				}
			})
		})
	}
}

// flakyRecords acts as records that cannot be read while fail is true.
type flakyRecords struct {
	*fakeRecords
	fail atomic.Bool
}

func (r *flakyRecords) AllocatedDevices() (device.Allocations, error) {
	if r.fail.Load() {
		return device.Allocations{}, errors.New("read error")
	}
	return r.fakeRecords.AllocatedDevices()
}

// While the records cannot be read, a withdrawn device is published again. So a claim may have it
// afterwards.
func TestDeviceAllocatedWhileRecordsAreUnreadableStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := newPublishingNode(t, noTaintServer(), readyWith("0000:1b:00.0", "0000:43:00.0"))
		records := &flakyRecords{fakeRecords: u.records}
		u.publisher.opts.Claims, u.publisher.layouts.ownership = records, records
		u.run(t, u.publisher.publish)
		defer u.stop()
		advance(time.Minute)
		u.setXIDs(t, 79)
		advance(time.Minute)
		if got := fakeapi.Devices(t, u.client); !slices.Equal(got, []string{secondGPU}) {
			t.Fatalf("published %v", got)
		}
		records.fail.Store(true)
		u.setXIDs(t, 79)
		advance(time.Minute)
		if got := fakeapi.Devices(t, u.client); !slices.Equal(got, []string{firstGPU, secondGPU}) {
			t.Fatalf("published %v while the records are unreadable", got)
		}
		allocate(t, u.client)
		records.fail.Store(false)
		advance(time.Minute)
		if got := fakeapi.Devices(t, u.client); !slices.Equal(got, []string{firstGPU, secondGPU}) {
			t.Errorf("published %v while the claim is allocated", got)
		}
	})
}
