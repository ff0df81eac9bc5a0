package publish

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fakeapi"
)

func (u *publishingNode) taintValues(t *testing.T) map[string]int {
	t.Helper()
	values := map[string]int{}
	for _, s := range fakeapi.Slices(t, u.client) {
		for _, d := range s.Spec.Devices {
			for _, taint := range d.Taints {
				values[strings.TrimPrefix(taint.Key, taintPrefix)+"="+taint.Value]++
			}
		}
	}
	return values
}

// withoutDriver returns the snapshot s after the node has lost its GPU driver.
func withoutDriver(s inventory.Snapshot) inventory.Snapshot {
	s.Ready, s.Reason, s.Code, s.Since = false, "no driver", inventory.CodeDriverMissing, time.Now()
	return s
}

func TestTransientConditionTaintsAfterGrace(t *testing.T) {
	baseSpec := nodeview.Condition{Source: "base-spec", Code: "base-spec-unwritable", Message: "disk full", Transient: true}
	for name, c := range map[string]struct {
		shut, open func(u *publishingNode)
		want       string
	}{
		"the driver is away": {
			func(u *publishingNode) { u.setInventory(withoutDriver(manyGPUs())) },
			func(u *publishingNode) { u.setInventory(manyGPUs()) },
			"driver-missing",
		},
		"the base spec cannot be written": {
			func(u *publishingNode) { u.node.Report(baseSpec) },
			func(u *publishingNode) { u.node.Clear("base-spec") },
			"base-spec-unwritable",
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				u := startPublishingNode(t, fakeapi.New(), manyGPUs())
				defer u.stop()
				advance(time.Minute)
				before := fakeapi.SliceWrites(u.client)["update"]

				c.shut(u)
				advance(29 * time.Second)
				c.open(u)
				advance(time.Minute)
				if now := fakeapi.SliceWrites(u.client)["update"]; now != before {
					t.Errorf("%d writes for a condition that ended early", now-before)
				}

				began := time.Now()
				c.shut(u)
				advance(29 * time.Second)
				if got := u.taintValues(t); len(got) > 0 {
					t.Errorf("too early: %v", got)
				}
				advance(5 * time.Second)
				if got := u.taintValues(t); got["not-ready="+c.want] != 70 || len(got) != 1 {
					t.Fatalf("%v", got)
				}
				for range 5 { // a later change must write nothing
					u.health.set(&health.View{})
					advance(time.Minute)
				}
				all := fakeapi.Slices(t, u.client)
				for _, s := range all {
					if s.Spec.Pool.Generation != 1 || !s.Spec.Devices[0].Taints[0].TimeAdded.Time.Equal(began) {
						t.Errorf("%+v, %+v", s.Spec.Pool, s.Spec.Devices[0].Taints)
					}
				}
				if now := fakeapi.SliceWrites(u.client)["update"]; now != before+len(all) {
					t.Errorf("%d writes for %d slices", now-before, len(all))
				}

				c.open(u)
				advance(5 * time.Second)
				if got := u.taintValues(t); len(got) > 0 || len(fakeapi.Devices(t, u.client)) != 70 {
					t.Errorf("ready again: %v", got)
				}
			})
		})
	}
}

// When a second condition begins before the first one ends, the devices must never be without a
// taint. Pods that are scheduled in a gap between two taints would hang.
func TestOverlappingConditionTaintsWithoutGap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := startPublishingNode(t, fakeapi.New(), manyGPUs())
		defer u.stop()
		advance(time.Minute)
		u.node.Report(nodeview.Condition{Source: "release", Code: "hardware-released", Message: "released"})
		advance(10 * time.Second)
		untainted := 0
		fakeapi.Prepend(u.client, "update", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
			for _, d := range a.(clienttesting.UpdateAction).GetObject().(*resourceapi.ResourceSlice).Spec.Devices {
				if len(d.Taints) == 0 {
					untainted++
				}
			}
			return false, nil, nil
		})

		u.setInventory(withoutDriver(manyGPUs()))
		advance(5 * time.Second)
		if got := u.taintValues(t); got["not-ready=hardware-released"] != 70 {
			t.Errorf("while both conditions last: %v", got)
		}
		u.node.Clear("release")
		advance(5 * time.Second)
		if got := u.taintValues(t); got["not-ready=driver-missing"] != 70 || untainted > 0 {
			t.Errorf("after the first condition: %v, and %d devices were written without a taint", got, untainted)
		}

		u.setInventory(manyGPUs())
		advance(5 * time.Second)
		if got := u.taintValues(t); len(got) > 0 {
			t.Errorf("ready again: %v", got)
		}
		u.setInventory(withoutDriver(manyGPUs()))
		advance(29 * time.Second)
		if got := u.taintValues(t); len(got) > 0 {
			t.Errorf("a later transient condition set taints early: %v", got)
		}
	})
}

// neverScanned returns the snapshot of a plugin that has not scanned the hardware since its start.
func neverScanned() inventory.Snapshot {
	return inventory.Snapshot{Reason: "no driver", Code: inventory.CodeDriverMissing, Since: time.Now()}
}

func TestUnscannedNodeAdoptsEarlierSlices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fakeapi.New()
		earlier := startPublishingNode(t, client, manyGPUs())
		advance(time.Minute)
		earlier.stop()
		ill := fakeapi.Slices(t, client)[0]
		ill.Spec.Devices[0].Taints = []resourceapi.DeviceTaint{{
			Key: taintPrefix + "unhealthy", Value: "xid-79", Effect: resourceapi.DeviceTaintEffectNoSchedule,
		}}
		if _, err := client.ResourceV1().ResourceSlices().Update(t.Context(), &ill, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}

		u := startPublishingNode(t, client, neverScanned())
		advance(29 * time.Second)
		if got := u.taintValues(t); len(got) != 1 {
			t.Errorf("too early: %v", got)
		}
		advance(10 * time.Second)
		want := map[string]int{"not-ready=driver-missing": 70, "unhealthy=xid-79": 1}
		if got := u.taintValues(t); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%v", got)
		}
		u.stop()

		// This plugin instance has never scanned the hardware, so it must leave all published slices as
		// they are.
		before := fakeapi.SliceWrites(client)["update"]
		u = startPublishingNode(t, client, neverScanned())
		defer u.stop()
		advance(5 * time.Minute)
		if got, now := u.taintValues(t), fakeapi.SliceWrites(client)["update"]; fmt.Sprint(got) != fmt.Sprint(want) || now != before {
			t.Errorf("%v after %d writes", got, now-before)
		}
		u.setInventory(manyGPUs())
		advance(10 * time.Second)
		if got := u.taintValues(t); len(got) > 0 || len(fakeapi.Devices(t, client)) != 70 {
			t.Errorf("ready again: %v", got)
		}
	})
}

func TestNewNodePublishesNothingUntilReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fakeapi.New()
		u := startPublishingNode(t, client, neverScanned())
		defer u.stop()
		advance(time.Hour)
		if got := fakeapi.SliceWrites(client); len(got) > 0 {
			t.Errorf("%v", got)
		}
		lists := 0
		for _, a := range client.Actions() {
			if a.GetVerb() == "list" {
				lists++
			}
		}
		if lists > 1 {
			t.Errorf("%d lists", lists)
		}
		u.setInventory(manyGPUs())
		advance(10 * time.Second)
		if got := len(fakeapi.Devices(t, client)); got != 70 {
			t.Errorf("%d devices", got)
		}
	})
}
