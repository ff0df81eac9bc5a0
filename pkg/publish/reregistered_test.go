package publish

import (
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/fakeapi"
)

// The garbage collector deletes the slices of a Node that is gone. Nothing must be written until
// the Node is back. Then even a node that is not ready must get its slices back, with their taints.
func TestSlicesWaitForTheNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := newPublishingNode(t, fakeapi.New(), manyGPUs())
		u.publisher.SetNodeUID("node-uid")
		u.run(t, u.publisher.publish)
		defer u.stop()
		advance(time.Minute)
		nodes, slices := u.client.CoreV1().Nodes(), u.client.ResourceV1().ResourceSlices()
		for _, uid := range []types.UID{"second", "third"} {
			if err := nodes.Delete(t.Context(), "node", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			u.publisher.SetNodeUID("")
			advance(5 * time.Second)
			for _, s := range fakeapi.Slices(t, u.client) {
				if err := slices.Delete(t.Context(), s.Name, metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			before := fakeapi.SliceWrites(u.client)
			advance(time.Minute)
			u.setInventory(withoutDriver(manyGPUs()))
			advance(10 * time.Minute)
			if now := fakeapi.SliceWrites(u.client); now["create"] != before["create"] || now["update"] != before["update"] {
				t.Errorf("without a Node: %v writes after %v", now, before)
			}

			again := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", UID: uid}}
			if _, err := nodes.Create(t.Context(), again, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			u.publisher.SetNodeUID(uid)
			advance(5 * time.Second)
			for _, s := range fakeapi.Slices(t, u.client) {
				if got := s.OwnerReferences[0].UID; got != uid {
					t.Errorf("slice %s belongs to Node %s, not to %s", s.Name, got, uid)
				}
			}
			if got := u.taintValues(t); got["not-ready=driver-missing"] != 70 || len(got) != 1 {
				t.Errorf("with Node %s: %v", uid, got)
			}
			u.setInventory(manyGPUs())
			advance(5 * time.Second)
			if got := u.taints(t); got != 0 || len(fakeapi.Devices(t, u.client)) != 70 {
				t.Errorf("with Node %s, when the node is ready again: %d taints", uid, got)
			}
		}
	})
}
