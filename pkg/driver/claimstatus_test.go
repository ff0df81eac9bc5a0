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

// statusWorld is an API server with one allocated claim, and a writer that runs. All of it lives in a bubble of simulated time.
type statusWorld struct {
	*testing.T

	client *fake.Clientset
	status *claimStatus
	causes []string
	writes int
}

// inStatusWorld runs a test with the claim's entries of other drivers in place.
func inStatusWorld(t *testing.T, test func(w *statusWorld)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &statusWorld{T: t, client: fake.NewClientset(allocatedClaim("1"))}
		w.status = newClaimStatus(w.client, func(cause string) { w.causes = append(w.causes, cause) })
		w.client.PrependReactor("patch", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
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

// bothDevices are a whole GPU and a part of another.
func bothDevices() ([]givenDevice, error) {
	return []givenDevice{
		{Pool: "node", Device: wholeName, Data: givenData{Type: "gpu", UUID: "GPU-1", ParentUUID: "GPU-1", PCIBusID: "0000:1b:00.0"}},
		{Pool: "node", Device: partName, ShareID: ptr.To(types.UID("share")), Data: givenData{
			Type: "mig", UUID: "MIG-1", ParentUUID: "GPU-2", Profile: "1g.10gb", Placement: &device.Placement{Start: 2, Size: 1},
			GPUInstanceID: ptr.To[uint32](7), ComputeInstanceID: ptr.To[uint32](0),
		}},
	}, nil
}

func (w *statusWorld) claim() *resourceapi.ResourceClaim {
	w.Helper()
	c, err := w.client.ResourceV1().ResourceClaims("user").Get(w.Context(), "claim", metav1.GetOptions{})
	if err != nil {
		w.Fatal(err)
	}
	return c
}

// later lets simulated time pass, and what is due in it happen.
func (w *statusWorld) later(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// says is one line for each entry of the claim's status.
func (w *statusWorld) says() []string {
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

func (w *statusWorld) expect(want ...string) {
	w.Helper()
	slices.Sort(want)
	if diff := cmp.Diff(want, w.says()); diff != "" {
		w.Error(diff)
	}
}

// object names the claim as the kubelet does.
func object(uid types.UID) kubeletplugin.NamespacedObject {
	return kubeletplugin.NamespacedObject{NamespacedName: types.NamespacedName{Namespace: "user", Name: "claim"}, UID: uid}
}

// fails lets the next n writes fail so.
func (w *statusWorld) fails(n int, err error) {
	w.client.PrependReactor("patch", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
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

func TestStatusSaysWhatAPreparedClaimGot(t *testing.T) {
	inStatusWorld(t, func(w *statusWorld) {
		w.status.Prepared(t.Context(), w.claim(), bothDevices)
		w.later(statusDelay - 1)
		w.expect(nic) // the calls that came with it may be under way
		w.later(1)
		w.expect(nic, wholeData+ready, partData+ready)
		if len(w.causes) != 0 || w.writes != 1 {
			t.Errorf("%d writes, errors %v", w.writes, w.causes)
		}
	})
}

func TestStatusIsNotWrittenAgainWhereItSaysSoAlready(t *testing.T) {
	inStatusWorld(t, func(w *statusWorld) {
		w.status.Prepared(t.Context(), w.claim(), bothDevices)
		w.later(statusDelay)
		first := w.claim()
		w.later(time.Hour)
		w.status.Prepared(t.Context(), first, bothDevices)
		w.later(statusDelay)
		if w.writes != 1 {
			t.Errorf("%d writes", w.writes)
		}
		// A device that was cut again is another one; the other's condition keeps its time.
		w.status.Changed(t.Context(), object("1"), func() ([]givenDevice, error) {
			again, err := bothDevices()
			again[1].Data.UUID = "MIG-2"
			return again, err
		})
		w.later(statusDelay)
		for i, e := range w.claim().Status.Devices {
			if e.Driver == DriverName && !e.Conditions[0].LastTransitionTime.Equal(&first.Status.Devices[i].Conditions[0].LastTransitionTime) {
				t.Errorf("%s became ready at %s, and was at %s", e.Device, e.Conditions[0].LastTransitionTime, first.Status.Devices[i].Conditions[0].LastTransitionTime)
			}
		}
		if w.writes != 2 {
			t.Errorf("%d writes", w.writes)
		}
	})
}

// The kubelet has just read the claim for each of its calls.
func TestAClaimIsNotReadForItsStatusBeforeThatIsWritten(t *testing.T) {
	inStatusWorld(t, func(w *statusWorld) {
		c := w.claim()
		w.client.ClearActions()
		w.status.Prepared(t.Context(), c, bothDevices)
		w.status.Prepared(t.Context(), c, bothDevices)
		w.later(statusDelay)
		if actions := w.client.Actions(); len(actions) != 1 || w.writes != 1 {
			t.Errorf("%v", actions)
		}
	})
}

func TestStatusSaysWhichDeviceWasLost(t *testing.T) {
	const gone = ` Ready=False Lost: cannot be made again`
	inStatusWorld(t, func(w *statusWorld) {
		w.status.Prepared(t.Context(), w.claim(), bothDevices)
		w.later(statusDelay)
		w.status.Lost(t.Context(), object("1"), partName, "Lost", "cannot be made again")
		w.later(statusDelay)
		w.expect(nic, wholeData+ready, partData+gone)

		w.status.Prepared(t.Context(), w.claim(), bothDevices)
		w.later(statusDelay)
		w.expect(nic, wholeData+ready, partData+ready)
	})
	inStatusWorld(t, func(w *statusWorld) {
		// Nothing was written in between.
		w.status.Prepared(t.Context(), w.claim(), bothDevices)
		w.status.Lost(t.Context(), object("1"), partName, "Lost", "cannot be made again")
		w.later(statusDelay)
		w.expect(nic, wholeData+ready, partData+gone)
	})
	inStatusWorld(t, func(w *statusWorld) {
		w.status.Lost(t.Context(), object("1"), partName, "Lost", "of which nothing was said")
		w.later(statusDelay)
		w.expect(nic)
	})
}

func TestStatusIsTriedAgainForAWhile(t *testing.T) {
	conflict := apierrors.NewConflict(resourceapi.Resource("resourceclaims"), "claim", errors.New("try again"))
	inStatusWorld(t, func(w *statusWorld) {
		w.fails(3, conflict)
		w.status.Prepared(t.Context(), w.claim(), bothDevices)
		w.later(5 * time.Second)
		w.expect(nic, wholeData+ready, partData+ready)
		if diff := cmp.Diff([]string{"Conflict", "Conflict", "Conflict"}, w.causes); diff != "" {
			t.Error(diff)
		}
	})
	inStatusWorld(t, func(w *statusWorld) {
		w.fails(1000, errors.New("connection refused"))
		w.status.Prepared(t.Context(), w.claim(), bothDevices)
		w.later(time.Hour)
		w.expect(nic)
		if w.writes != statusTries || len(w.causes) != statusTries || w.causes[0] != "other" {
			t.Errorf("%d writes, errors %v", w.writes, w.causes)
		}
		if len(w.status.pending) != 0 {
			t.Errorf("%d changes still wait", len(w.status.pending))
		}
	})
}

func TestStatusOfAClaimWhoseRecordCannotBeReadIsTriedAgain(t *testing.T) {
	inStatusWorld(t, func(w *statusWorld) {
		tries := 0
		w.status.Prepared(t.Context(), w.claim(), func() ([]givenDevice, error) {
			if tries++; tries == 1 {
				return nil, errors.New("input/output error")
			}
			return bothDevices()
		})
		w.later(time.Second)
		w.expect(nic, wholeData+ready, partData+ready)
	})
	inStatusWorld(t, func(w *statusWorld) {
		w.status.Prepared(t.Context(), w.claim(), func() ([]givenDevice, error) { return nil, nil })
		w.later(time.Second)
		w.expect(nic)
		if w.writes != 0 {
			t.Error("wrote of a claim that has no device")
		}
	})
}

// A write that comes too late is dropped, and never goes to a new claim of the same name.
func TestStatusOfAClaimThatIsGoneIsDropped(t *testing.T) {
	gone := func(t *testing.T, change func(w *statusWorld), want ...string) {
		t.Helper()
		inStatusWorld(t, func(w *statusWorld) {
			w.fails(1, errors.New("connection refused"))
			w.status.Prepared(t.Context(), w.claim(), bothDevices)
			w.later(statusDelay)
			change(w)
			w.later(time.Minute)
			if w.writes != 1 || len(w.causes) != 1 || len(w.status.pending) != 0 {
				t.Errorf("%d writes, errors %v, %d changes wait", w.writes, w.causes, len(w.status.pending))
			}
			if want != nil {
				w.expect(want...)
			}
		})
	}
	remove := func(w *statusWorld) {
		if err := w.client.ResourceV1().ResourceClaims("user").Delete(w.Context(), "claim", metav1.DeleteOptions{}); err != nil {
			w.Fatal(err)
		}
	}
	t.Run("deleted", func(t *testing.T) { gone(t, remove) })
	t.Run("made anew", func(t *testing.T) {
		gone(t, func(w *statusWorld) {
			remove(w)
			if _, err := w.client.ResourceV1().ResourceClaims("user").Create(w.Context(), allocatedClaim("2"), metav1.CreateOptions{}); err != nil {
				w.Fatal(err)
			}
		}, nic)
	})
	t.Run("not allocated any more", func(t *testing.T) {
		gone(t, func(w *statusWorld) {
			c := w.claim()
			c.Status.Allocation = nil
			if _, err := w.client.ResourceV1().ResourceClaims("user").UpdateStatus(w.Context(), c, metav1.UpdateOptions{}); err != nil {
				w.Fatal(err)
			}
		}, nic)
	})
	t.Run("given back", func(t *testing.T) { gone(t, func(w *statusWorld) { w.status.Forget("1") }, nic) })
}

func TestStatusKeepsNobodyWaiting(t *testing.T) {
	inStatusWorld(t, func(w *statusWorld) {
		hang := make(chan struct{})
		w.client.PrependReactor("*", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
			<-hang
			return true, nil, apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), "claim")
		})
		for i := range statusClaims + 2 {
			c := allocatedClaim(types.UID(fmt.Sprint("uid-", i)))
			w.status.Prepared(t.Context(), c, bothDevices)
			w.status.Prepared(t.Context(), c, bothDevices) // takes the place of the one before
		}
		if n := len(w.status.pending); n != statusClaims {
			t.Errorf("%d changes wait, want at most %d", n, statusClaims)
		}
		if len(w.causes) != 4 || w.causes[0] != "queue-full" {
			t.Errorf("errors %v", w.causes)
		}
		close(hang)
		w.later(statusDelay)
		if n := len(w.status.pending); n != 0 {
			t.Errorf("%d changes still wait", n)
		}
	})
}

// A named claim's next Pod may have it prepared as soon as its lock is let go of.
func TestWhatIsToBeSaidOfAClaimIsForgottenBeforeItsNextPodHasIt(t *testing.T) {
	n := newNode(t)
	d, err := New(t.Context(), n.cfg, Parts{Client: n.client, StatusClient: n.client, Hardware: n.hardware(), Metrics: metrics.New("test")})
	if err != nil {
		t.Fatal(err)
	}
	defer d.presence.End()
	for name, giveBack := range map[string]func(uid types.UID) error{
		"by the kubelet": func(uid types.UID) error { return d.preparer.Unprepare(t.Context(), uid) },
		"because it is gone": func(uid types.UID) error {
			if err := d.preparer.Records.Save(checkpoint.Record{ClaimUID: uid, State: checkpoint.Prepared}); err != nil {
				return err
			}
			_, err := d.preparer.GiveBack(t.Context(), uid, func(context.Context, checkpoint.Record) error { return nil })
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := allocatedClaim("uid")
			d.status.Prepared(t.Context(), c, bothDevices)
			// Who has the claim's lock next comes after this.
			if err := giveBack(c.UID); err != nil || d.status.pending[c.UID] != nil {
				t.Errorf("%v; there is still to be written %+v", err, d.status.pending[c.UID])
			}
		})
	}
}

func TestAStatusThatIsSwitchedOffIsNotWritten(t *testing.T) {
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
	<-time.After(2 * statusDelay) // by when it would be written
	if msg := n.unprepare(t, c); msg != "" {
		t.Fatal(msg)
	}
	for _, a := range n.client.Actions() {
		if a.GetResource().Resource == "resourceclaims" && a.GetVerb() != "get" {
			t.Errorf("%s %s/%s", a.GetVerb(), a.GetResource().Resource, a.GetSubresource())
		}
	}
}
