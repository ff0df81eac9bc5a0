package publish

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fakeapi"
)

// The slice controller creates the slices of a new node. A later change writes only the slice that
// differs.
func TestNewNodeIsPublishedWithinTwoSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fakeapi.New()
		u := startPublishingNode(t, client, manyGPUs())
		advance(2 * time.Second)
		if got := fakeapi.SliceWrites(client); got["create"] != 2 || len(got) != 1 {
			t.Fatalf("writes %v", got)
		}
		s := manyGPUs()
		s.Node.GPUs[69].UUID = "GPU-another"
		u.setInventory(s)
		advance(time.Second)
		if got := fakeapi.SliceWrites(client); got["create"] != 2 || got["update"] != 1 || len(got) != 2 {
			t.Errorf("writes %v", got)
		}
		for _, slice := range fakeapi.Slices(t, client) {
			if slice.Spec.Pool.Generation != 1 || slice.Spec.Pool.ResourceSliceCount != 2 ||
				len(slice.OwnerReferences) != 1 || slice.OwnerReferences[0].UID != "node-uid" {
				t.Errorf("slice %s: %+v of %+v", slice.Name, slice.Spec.Pool, slice.OwnerReferences)
			}
		}
	})
}

// An earlier plugin instance has ended before it wrote the taints of any slice. The next instance
// must write them slice by slice, in the same pool generation.
func TestRestartWritesMissingTaintsSliceBySlice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fakeapi.New()
		earlier := startPublishingNode(t, client, manyGPUs())
		advance(time.Minute)
		earlier.stop()

		u := newPublishingNode(t, client, manyGPUs())
		u.node.Report(nodeview.Condition{Source: "release", Code: "hardware-released", Message: "released"})
		u.run(t, u.publisher.publish)
		advance(time.Minute)
		if n := u.taints(t); n != 70 {
			t.Fatalf("%d taints are published", n)
		}
		if got := fakeapi.SliceWrites(client); got["create"] != 2 || got["update"] != 2 || len(got) != 2 {
			t.Errorf("writes %v", got)
		}
		for _, slice := range fakeapi.Slices(t, client) {
			if slice.Spec.Pool.Generation != 1 {
				t.Errorf("slice %s: %+v", slice.Name, slice.Spec.Pool)
			}
		}
	})
}
