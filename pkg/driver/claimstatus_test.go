package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
)

const (
	wholeName = "gpu-0000-1b-00-0"
	partName  = "gpu-0000-43-00-0-mig-19-2"
)

// statusFixture has a claim status writer that runs in simulated time against a fake API server
// with one allocated claim.
type statusFixture struct {
	*testing.T

	client *fake.Clientset
	status *claimStatus
	causes []string
	writes int
}

// withStatusFixture runs the test in simulated time. The claim's status already has an entry of
// another driver.
func withStatusFixture(t *testing.T, test func(w *statusFixture)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &statusFixture{T: t, client: fake.NewClientset(allocatedClaim("1"))}
		w.status = newClaimStatus(w.client, func(cause string) { w.causes = append(w.causes, cause) })
		prependReactor(w.client, "patch", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
			w.writes++
			return false, nil, nil
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); w.status.Run(ctx) }()
		defer func() { cancel(); <-done }()
		test(w)
	})
}

func allocatedClaim(uid types.UID) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "user", Name: "claim", UID: uid},
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{},
			Devices:    []resourceapi.AllocatedDeviceStatus{{Driver: "nic.example.com", Pool: "p", Device: "nic", Conditions: []metav1.Condition{}}},
		},
	}
}

// bothDevices returns the claim's devices in these tests: a whole GPU and a partition of another
// GPU.
func bothDevices() ([]statusDevice, error) {
	return []statusDevice{
		{Pool: "node", Device: wholeName, Data: statusDeviceData{Type: "gpu", UUID: "GPU-1", ParentUUID: "GPU-1", PCIBusID: "0000:1b:00.0"}},
		{Pool: "node", Device: partName, ShareID: ptr.To(types.UID("share")), Data: statusDeviceData{
			Type: "mig", UUID: "MIG-1", ParentUUID: "GPU-2", Profile: "1g.10gb", Placement: &device.Placement{Start: 2, Size: 1},
			GPUInstanceID: ptr.To[uint32](7), ComputeInstanceID: ptr.To[uint32](0),
		}},
	}, nil
}

func (w *statusFixture) claim() *resourceapi.ResourceClaim {
	w.Helper()
	c, err := w.client.ResourceV1().ResourceClaims("user").Get(w.Context(), "claim", metav1.GetOptions{})
	if err != nil {
		w.Fatal(err)
	}
	return c
}

// advance lets the simulated time d pass, and waits until the status writer has no more work at
// that time.
func (w *statusFixture) advance(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// entries returns the entries in the claim's status, each as one line of text.
func (w *statusFixture) entries() []string {
	w.Helper()
	var lines []string
	for _, e := range w.claim().Status.Devices {
		line := e.Driver + "/" + e.Pool + "/" + e.Device
		if e.ShareID != nil {
			line += "/" + *e.ShareID
		}
		if e.Data != nil {
			line += " " + string(e.Data.Raw)
		}
		for _, c := range e.Conditions {
			line += fmt.Sprintf(" %s=%s %s: %s", c.Type, c.Status, c.Reason, c.Message)
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return lines
}

func (w *statusFixture) expect(want ...string) {
	w.Helper()
	slices.Sort(want)
	if diff := cmp.Diff(want, w.entries()); diff != "" {
		w.Error(diff)
	}
}

// claimObject returns the name and UID of the fixture's claim, as the kubelet passes them to an
// Unprepare.
func claimObject(uid types.UID) kubeletplugin.NamespacedObject {
	return kubeletplugin.NamespacedObject{NamespacedName: types.NamespacedName{Namespace: "user", Name: "claim"}, UID: uid}
}

// failWrites makes the next n writes of the claim's status fail with err.
func (w *statusFixture) failWrites(n int, err error) {
	prependReactor(w.client, "patch", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
		if n == 0 {
			return false, nil, nil
		}
		n--
		w.writes++
		return true, nil, err
	})
}

const (
	nic       = "nic.example.com/p/nic"
	wholeData = `gpu.nvidia.com/node/` + wholeName + ` {"parentUUID":"GPU-1","pciBusID":"0000:1b:00.0","type":"gpu","uuid":"GPU-1"}`
	partData  = `gpu.nvidia.com/node/` + partName + `/share {"computeInstanceID":0,"gpuInstanceID":7,"parentUUID":"GPU-2",` +
		`"placement":{"size":1,"start":2},"profile":"1g.10gb","type":"mig","uuid":"MIG-1"}`
	ready = ` Ready=True Prepared: The device is set up for the claim`
)

func TestStatusListsDevicesOfPreparedClaim(t *testing.T) {
	withStatusFixture(t, func(w *statusFixture) {
		w.status.Prepared(t.Context(), w.claim(), bothDevices)
		w.advance(statusDelay - 1)
		w.expect(nic) // nothing is written before statusDelay has passed
		w.advance(1)
		w.expect(nic, wholeData+ready, partData+ready)
		if len(w.causes) != 0 || w.writes != 1 {
			t.Errorf("%d writes, errors %v", w.writes, w.causes)
		}
	})
}

func TestStatusIsNotWrittenIfUpToDate(t *testing.T) {
	withStatusFixture(t, func(w *statusFixture) {
		w.status.Prepared(t.Context(), w.claim(), bothDevices)
		w.advance(statusDelay)
		first := w.claim()
		w.advance(time.Hour)
		w.status.Prepared(t.Context(), first, bothDevices)
		w.advance(statusDelay)
		if w.writes != 1 {
			t.Errorf("%d writes", w.writes)
		}
		// A partition that was created again has a new UUID, so the status must be written again. Its
		// condition must keep its time.
		w.status.Changed(t.Context(), claimObject("1"), func() ([]statusDevice, error) {
			again, err := bothDevices()
			again[1].Data.UUID = "MIG-2"
			return again, err
		})
		w.advance(statusDelay)
		for i, e := range w.claim().Status.Devices {
			if e.Driver == DriverName && !e.Conditions[0].LastTransitionTime.Equal(&first.Status.Devices[i].Conditions[0].LastTransitionTime) {
				t.Errorf("%s became ready at %s, want %s", e.Device, e.Conditions[0].LastTransitionTime,
					first.Status.Devices[i].Conditions[0].LastTransitionTime)
			}
		}
		if w.writes != 2 {
			t.Errorf("%d writes", w.writes)
		}
	})
}

// The writer must use the claim that the caller of Prepared has read, and not read the claim again.
func TestFirstStatusWriteDoesNotReadTheClaim(t *testing.T) {
	withStatusFixture(t, func(w *statusFixture) {
		c := w.claim()
		w.client.ClearActions()
		w.status.Prepared(t.Context(), c, bothDevices)
		w.status.Prepared(t.Context(), c, bothDevices)
		w.advance(statusDelay)
		if actions := w.client.Actions(); len(actions) != 1 || w.writes != 1 {
			t.Errorf("%v", actions)
		}
	})
}

func TestStatusShowsLostDevice(t *testing.T) {
	const gone = ` Ready=False Lost: cannot be created again`
	withStatusFixture(t, func(w *statusFixture) {
		w.status.Prepared(t.Context(), w.claim(), bothDevices)
		w.advance(statusDelay)
		w.status.Lost(t.Context(), claimObject("1"), partName, "Lost", "cannot be created again")
		w.advance(statusDelay)
		w.expect(nic, wholeData+ready, partData+gone)

		w.status.Prepared(t.Context(), w.claim(), bothDevices)
		w.advance(statusDelay)
		w.expect(nic, wholeData+ready, partData+ready)
	})
	withStatusFixture(t, func(w *statusFixture) {
		// The changes of Prepared and Lost must be written with one request, because both are pending.
		w.status.Prepared(t.Context(), w.claim(), bothDevices)
		w.status.Lost(t.Context(), claimObject("1"), partName, "Lost", "cannot be created again")
		w.advance(statusDelay)
		w.expect(nic, wholeData+ready, partData+gone)
	})
	withStatusFixture(t, func(w *statusFixture) {
		w.status.Lost(t.Context(), claimObject("1"), partName, "Lost", "has no entry in the status")
		w.advance(statusDelay)
		w.expect(nic)
	})
}

func TestStatusWriteIsRetriedForAWhile(t *testing.T) {
	conflict := apierrors.NewConflict(resourceapi.Resource("resourceclaims"), "claim", errors.New("try again"))
	withStatusFixture(t, func(w *statusFixture) {
		w.failWrites(3, conflict)
		w.status.Prepared(t.Context(), w.claim(), bothDevices)
		w.advance(5 * time.Second)
		w.expect(nic, wholeData+ready, partData+ready)
		if diff := cmp.Diff([]string{"Conflict", "Conflict", "Conflict"}, w.causes); diff != "" {
			t.Error(diff)
		}
	})
	withStatusFixture(t, func(w *statusFixture) {
		w.failWrites(1000, errors.New("connection refused"))
		w.status.Prepared(t.Context(), w.claim(), bothDevices)
		w.advance(time.Hour)
		w.expect(nic)
		if w.writes != statusTries || len(w.causes) != statusTries || w.causes[0] != "other" {
			t.Errorf("%d writes, errors %v", w.writes, w.causes)
		}
		if len(w.status.pending) != 0 {
			t.Errorf("%d changes are still pending", len(w.status.pending))
		}
	})
}

func TestStatusWriteIsRetriedIfRecordIsUnreadable(t *testing.T) {
	withStatusFixture(t, func(w *statusFixture) {
		tries := 0
		w.status.Prepared(t.Context(), w.claim(), func() ([]statusDevice, error) {
			if tries++; tries == 1 {
				return nil, errors.New("input/output error")
			}
			return bothDevices()
		})
		w.advance(time.Second)
		w.expect(nic, wholeData+ready, partData+ready)
	})
	withStatusFixture(t, func(w *statusFixture) {
		w.status.Prepared(t.Context(), w.claim(), func() ([]statusDevice, error) { return nil, nil })
		w.advance(time.Second)
		w.expect(nic)
		if w.writes != 0 {
			t.Error("wrote the status of a claim without devices")
		}
	})
}

// A retried status write must not go to a new claim with the same name.
func TestStatusOfDeletedClaimIsDropped(t *testing.T) {
	gone := func(t *testing.T, change func(w *statusFixture), want ...string) {
		t.Helper()
		withStatusFixture(t, func(w *statusFixture) {
			w.failWrites(1, errors.New("connection refused"))
			w.status.Prepared(t.Context(), w.claim(), bothDevices)
			w.advance(statusDelay)
			change(w)
			w.advance(time.Minute)
			if w.writes != 1 || len(w.causes) != 1 || len(w.status.pending) != 0 {
				t.Errorf("%d writes, errors %v, %d pending changes", w.writes, w.causes, len(w.status.pending))
			}
			if want != nil {
				w.expect(want...)
			}
		})
	}
	remove := func(w *statusFixture) {
		if err := w.client.ResourceV1().ResourceClaims("user").Delete(w.Context(), "claim", metav1.DeleteOptions{}); err != nil {
			w.Fatal(err)
		}
	}
	t.Run("deleted", func(t *testing.T) { gone(t, remove) })
	t.Run("created again", func(t *testing.T) {
		gone(t, func(w *statusFixture) {
			remove(w)
			if _, err := w.client.ResourceV1().ResourceClaims("user").Create(w.Context(), allocatedClaim("2"), metav1.CreateOptions{}); err != nil {
				w.Fatal(err)
			}
		}, nic)
	})
	t.Run("deallocated", func(t *testing.T) {
		gone(t, func(w *statusFixture) {
			c := w.claim()
			c.Status.Allocation = nil
			if _, err := w.client.ResourceV1().ResourceClaims("user").UpdateStatus(w.Context(), c, metav1.UpdateOptions{}); err != nil {
				w.Fatal(err)
			}
		}, nic)
	})
	t.Run("released", func(t *testing.T) { gone(t, func(w *statusFixture) { w.status.Forget("1") }, nic) })
}

func TestStatusNeverBlocksAndIsBounded(t *testing.T) {
	withStatusFixture(t, func(w *statusFixture) {
		hang := make(chan struct{})
		prependReactor(w.client, "*", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
			<-hang
			return true, nil, apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), "claim")
		})
		for i := range maxPendingStatus + 2 {
			c := allocatedClaim(types.UID(fmt.Sprint("uid-", i)))
			w.status.Prepared(t.Context(), c, bothDevices)
			w.status.Prepared(t.Context(), c, bothDevices) // replaces the pending change
		}
		if n := len(w.status.pending); n != maxPendingStatus {
			t.Errorf("%d pending changes, want at most %d", n, maxPendingStatus)
		}
		if len(w.causes) != 4 || w.causes[0] != "queue-full" {
			t.Errorf("errors %v", w.causes)
		}
		close(hang)
		w.advance(statusDelay)
		if n := len(w.status.pending); n != 0 {
			t.Errorf("%d changes are still pending", n)
		}
	})
}

// When a claim is released, its pending status write must be dropped while the claim's lock is
// held. After that, the claim's next Pod may prepare it and queue a new write.
func TestReleaseDropsPendingStatus(t *testing.T) {
	n := newNode(t)
	d, err := New(t.Context(), n.cfg, Parts{Client: n.client, StatusClient: n.client, Hardware: n.hardware(), Metrics: metrics.New("test")})
	if err != nil {
		t.Fatal(err)
	}
	defer d.instanceLock.Release()
	for name, release := range map[string]func(uid types.UID) error{
		"unprepared": func(uid types.UID) error { return d.preparer.Unprepare(t.Context(), uid) },
		"orphaned": func(uid types.UID) error {
			if err := d.preparer.Records.Save(checkpoint.Record{ClaimUID: uid, State: checkpoint.Prepared}); err != nil {
				return err
			}
			_, err := d.preparer.UnprepareOrphan(t.Context(), uid, func(context.Context, checkpoint.Record) error { return nil })
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := allocatedClaim("uid")
			d.status.Prepared(t.Context(), c, bothDevices)
			// When release returns, another goroutine can take the claim's lock, so the pending write must
			// be gone.
			if err := release(c.UID); err != nil || d.status.pending[c.UID] != nil {
				t.Errorf("%v; still pending: %+v", err, d.status.pending[c.UID])
			}
		})
	}
}

func TestDisabledStatusIsNotWritten(t *testing.T) {
	n := newNode(t)
	n.cfg.ClaimStatus = false
	n.start(t)
	n.register(t)
	eventually(t, "both GPUs are published", func() bool { return len(published(t, n.client)) == 2 })
	c := n.claim(t, "c", wholeName)
	n.client.ClearActions()
	if answer := n.prepare(t, c); answer.GetError() != "" {
		t.Fatal(answer.GetError())
	}
	<-time.After(2 * statusDelay) // within this time a writer that is not switched off writes
	if msg := n.unprepare(t, c); msg != "" {
		t.Fatal(msg)
	}
	for _, a := range n.client.Actions() {
		if a.GetResource().Resource == "resourceclaims" && a.GetVerb() != "get" {
			t.Errorf("%s %s/%s", a.GetVerb(), a.GetResource().Resource, a.GetSubresource())
		}
	}
}
