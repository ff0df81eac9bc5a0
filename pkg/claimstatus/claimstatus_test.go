package claimstatus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
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
	status *Reporter
	claims *heldClaims
	causes []string
	writes int
}

// heldClaims is a list of prepared claims. Each of them has all the devices.
type heldClaims struct {
	mu      sync.Mutex
	claims  []checkpoint.Record
	devices []ledger.PreparedDevice
	err     error // of the next look-up of devices
}

func (h *heldClaims) PreparedClaims() ([]checkpoint.Record, error) { return h.claims, nil }

func (h *heldClaims) PreparedDevices(types.UID) ([]ledger.PreparedDevice, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	err := h.err
	h.err = nil
	return slices.Clone(h.devices), err
}

// change changes the claims while the Reporter runs.
func (h *heldClaims) change(edit func(h *heldClaims)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	edit(h)
}

// noEvents drops all Events.
func noEvents(kubeletplugin.NamespacedObject, events.Reason, string) {}

// withStatusFixture runs the test in simulated time. The claim's status already has an entry of
// another driver.
func withStatusFixture(t *testing.T, test func(w *statusFixture)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &statusFixture{T: t, client: fake.NewClientset(allocatedClaim("1")), claims: &heldClaims{devices: bothDevices()}}
		w.status = New(w.client, noEvents, func(cause string) { w.causes = append(w.causes, cause) })
		w.react("patch", func(clienttesting.Action) (bool, runtime.Object, error) {
			w.writes++
			return false, nil, nil
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); w.status.Run(ctx, w.claims) }()
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
func bothDevices() []ledger.PreparedDevice {
	whole, part := checkpoint.Device{}, checkpoint.Device{}
	whole.Pool, whole.Device, whole.GPUUUID = "node", wholeName, "GPU-1"
	part.Pool, part.Device, part.GPUUUID, part.MIGUUID, part.ShareID = "node", partName, "GPU-2", "MIG-1", ptr.To(types.UID("share"))
	return []ledger.PreparedDevice{{Device: whole}, {
		Device:   part,
		Instance: &device.Instance{ID: 7, Placement: device.Placement{Start: 2, Size: 1}},
		Compute:  &device.ComputeInstance{ID: 0, Name: "1g.10gb"},
	}}
}

// react lets the API server answer requests about claims with this verb like react.
func (w *statusFixture) react(verb string, react clienttesting.ReactionFunc) {
	w.client.Lock()
	defer w.client.Unlock()
	w.client.PrependReactor(verb, "resourceclaims", react)
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

// lose says that the fixture's claim has lost the device.
func (w *statusFixture) lose(device, reason string) {
	w.status.Comparing()
	w.status.Compared([]*prepare.LostError{{
		Claim: "user/claim", UID: "1", Device: device, Reason: errors.New(reason)}}, map[types.UID]bool{"1": true})
}

// failWrites makes the next n writes of the claim's status fail with err.
func (w *statusFixture) failWrites(n int, err error) {
	w.react("patch", func(clienttesting.Action) (bool, runtime.Object, error) {
		if n == 0 {
			return false, nil, nil
		}
		n--
		w.writes++
		return true, nil, err
	})
}

// expectIdle checks that no write is left to do.
func (w *statusFixture) expectIdle() {
	w.Helper()
	actions := len(w.client.Actions())
	w.advance(time.Hour)
	if n := w.status.queue.Len(); n != 0 || len(w.client.Actions()) != actions {
		w.Errorf("%d claims are still queued, requests %v", n, w.client.Actions()[actions:])
	}
}

const (
	nic       = "nic.example.com/p/nic"
	wholeData = `gpu.nvidia.com/node/` + wholeName + ` {"parentUUID":"GPU-1","pciBusID":"0000:1b:00.0","type":"gpu","uuid":"GPU-1"}`
	partData  = `gpu.nvidia.com/node/` + partName + `/share {"computeInstanceID":0,"gpuInstanceID":7,"parentUUID":"GPU-2",` +
		`"pciBusID":"0000:43:00.0","placement":{"size":1,"start":2},"profile":"1g.10gb","type":"mig","uuid":"MIG-1"}`
	ready = ` Ready=True Prepared: The device is set up for the claim`
)

func TestStatusListsDevicesOfPreparedClaim(t *testing.T) {
	withStatusFixture(t, func(w *statusFixture) {
		w.status.Prepared(w.claim())
		w.advance(writeDelay - 1)
		w.expect(nic) // nothing is written before writeDelay has passed
		w.advance(1)
		w.expect(nic, wholeData+ready, partData+ready)
		if len(w.causes) != 0 || w.writes != 1 {
			t.Errorf("%d writes, errors %v", w.writes, w.causes)
		}
	})
}

func TestStatusIsNotWrittenIfUpToDate(t *testing.T) {
	withStatusFixture(t, func(w *statusFixture) {
		w.status.Prepared(w.claim())
		w.advance(writeDelay)
		first := w.claim()
		w.advance(time.Hour)
		w.status.Prepared(first)
		w.advance(writeDelay)
		if w.writes != 1 {
			t.Errorf("%d writes", w.writes)
		}
		// A partition that was created again has a new UUID, so the status must be written again. Its
		// condition must keep its time.
		w.claims.change(func(h *heldClaims) { h.devices[1].MIGUUID = "MIG-2" })
		w.status.Changed(t.Context(), claimObject("1"))
		w.advance(writeDelay)
		for i, e := range w.claim().Status.Devices {
			if e.Driver != device.DriverName {
				continue
			}
			got, want := e.Conditions[0].LastTransitionTime, first.Status.Devices[i].Conditions[0].LastTransitionTime
			if !got.Equal(&want) {
				t.Errorf("%s became ready at %s, want %s", e.Device, got, want)
			}
		}
		if w.writes != 2 {
			t.Errorf("%d writes", w.writes)
		}
	})
}

func TestStatusShowsLostDevice(t *testing.T) {
	const gone = ` Ready=False Lost: claim user/claim: device ` + partName + ` is lost and its containers can no longer start ` +
		`(it is gone): delete the claim's Pods`
	withStatusFixture(t, func(w *statusFixture) {
		w.status.Prepared(w.claim())
		w.advance(writeDelay)
		w.lose(partName, "it is gone")
		w.advance(writeDelay)
		w.expect(nic, wholeData+ready, partData+gone)

		w.status.Prepared(w.claim())
		w.advance(writeDelay)
		w.expect(nic, wholeData+ready, partData+ready)
	})
	withStatusFixture(t, func(w *statusFixture) {
		// The changes of Prepared and Lost must be written with one request, because both are pending.
		w.status.Prepared(w.claim())
		w.lose(partName, "it is gone")
		w.advance(writeDelay)
		w.expect(nic, wholeData+ready, partData+gone)
	})
	withStatusFixture(t, func(w *statusFixture) {
		w.lose(partName, "it is gone")
		w.status.Compared(nil, nil)
		w.advance(writeDelay)
		w.expect(nic, wholeData+ready, partData+ready)
	})
}

func TestStatusWriteIsRetriedForAWhile(t *testing.T) {
	conflict := apierrors.NewConflict(resourceapi.Resource("resourceclaims"), "claim", errors.New("try again"))
	withStatusFixture(t, func(w *statusFixture) {
		w.failWrites(3, conflict)
		w.status.Prepared(w.claim())
		w.advance(5 * time.Second)
		w.expect(nic, wholeData+ready, partData+ready)
		if diff := cmp.Diff([]string{"Conflict", "Conflict", "Conflict"}, w.causes); diff != "" {
			t.Error(diff)
		}
	})
	withStatusFixture(t, func(w *statusFixture) {
		w.failWrites(1000, errors.New("connection refused"))
		w.status.Prepared(w.claim())
		w.advance(time.Hour)
		w.expect(nic)
		if w.writes != maxTries || len(w.causes) != maxTries || w.causes[0] != "other" {
			t.Errorf("%d writes, errors %v", w.writes, w.causes)
		}
		w.expectIdle()
	})
}

func TestStatusWriteIsRetriedIfRecordIsUnreadable(t *testing.T) {
	withStatusFixture(t, func(w *statusFixture) {
		w.claims.change(func(h *heldClaims) { h.err = errors.New("input/output error") })
		w.status.Prepared(w.claim())
		w.advance(time.Second)
		w.expect(nic, wholeData+ready, partData+ready)
	})
	withStatusFixture(t, func(w *statusFixture) {
		w.claims.change(func(h *heldClaims) { h.devices = nil })
		w.status.Prepared(w.claim())
		w.advance(time.Second)
		w.expect(nic)
		if w.writes != 0 {
			t.Error("wrote the status of a claim without devices")
		}
	})
}

// A plugin that was killed may not have written the status of a claim that it had prepared.
func TestStartWritesStatusOfPreparedClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &statusFixture{T: t, client: fake.NewClientset(allocatedClaim("1"))}
		w.claims = &heldClaims{claims: []checkpoint.Record{{Namespace: "user", Name: "claim", ClaimUID: "1"}}, devices: bothDevices()}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go New(w.client, noEvents, nil).Run(ctx, w.claims)
		w.advance(writeDelay)
		w.expect(nic, wholeData+ready, partData+ready)
	})
}

// A retried status write must not go to a new claim with the same name.
func TestStatusOfDeletedClaimIsDropped(t *testing.T) {
	gone := func(t *testing.T, change func(w *statusFixture), want ...string) {
		t.Helper()
		withStatusFixture(t, func(w *statusFixture) {
			w.failWrites(1, errors.New("connection refused"))
			w.status.Prepared(w.claim())
			w.advance(writeDelay)
			change(w)
			w.advance(time.Minute)
			if w.writes != 1 || len(w.causes) != 1 {
				t.Errorf("%d writes, errors %v", w.writes, w.causes)
			}
			w.expectIdle()
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
	t.Run("released", func(t *testing.T) {
		gone(t, func(w *statusFixture) { w.claims.change(func(h *heldClaims) { h.devices = nil }) }, nic)
	})
}

func TestFirstStatusWriteDoesNotReadClaim(t *testing.T) {
	withStatusFixture(t, func(w *statusFixture) {
		c := w.claim()
		w.client.ClearActions()
		w.status.Prepared(c)
		w.status.Prepared(c)
		w.advance(writeDelay)
		if actions := w.client.Actions(); len(actions) != 1 || w.writes != 1 {
			t.Errorf("%v", actions)
		}
	})
}

func TestStatusNeverBlocks(t *testing.T) {
	withStatusFixture(t, func(w *statusFixture) {
		hang := make(chan struct{})
		w.react("*", func(clienttesting.Action) (bool, runtime.Object, error) {
			<-hang
			return true, nil, apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), "claim")
		})
		for i := range 1000 {
			c := allocatedClaim(types.UID(fmt.Sprint("uid-", i)))
			w.status.Prepared(c)
			w.advance(writeDelay)
			w.status.Prepared(c)
		}
		close(hang)
		w.advance(writeDelay)
		w.expectIdle()
	})
}
