package driver

import (
	"context"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/fakeapi"
)

// collectGarbage deletes slices whose owner is gone, as Kubernetes' garbage collector does, until
// the test ends.
func collectGarbage(t *testing.T, client *fake.Clientset) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	t.Cleanup(func() { stop(); <-done })
	go func() {
		defer close(done)
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			uids := map[types.UID]bool{}
			if nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{}); err == nil {
				for i := range nodes.Items {
					uids[nodes.Items[i].UID] = true
				}
			}
			stored, err := client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
			if err != nil {
				continue
			}
			for i := range stored.Items {
				if !uids[stored.Items[i].OwnerReferences[0].UID] {
					_ = client.ResourceV1().ResourceSlices().Delete(ctx, stored.Items[i].Name, metav1.DeleteOptions{})
				}
			}
		}
	}()
}

func TestSlicesBelongToReregisteredNode(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	collectGarbage(t, n.client)
	n.start(t)
	n.register(t)
	eventually(t, "both GPUs are published", func() bool { return len(published(t, n.client)) == 2 })
	held := n.claim(t, "held", firstGPU)
	eventually(t, "a claim is prepared", func() bool { return n.prepare(t, held).GetError() == "" })

	nodes := n.client.CoreV1().Nodes()
	if err := nodes.Delete(t.Context(), "node", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the slices are gone with their Node", func() bool { return len(published(t, n.client)) == 0 })
	again := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", UID: "new-uid"}}
	if _, err := nodes.Create(t.Context(), again, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	eventually(t, "both GPUs are published for the new Node", func() bool {
		all := fakeapi.Slices(t, n.client)
		return len(published(t, n.client)) == 2 &&
			!slices.ContainsFunc(all, func(s resourceapi.ResourceSlice) bool { return s.OwnerReferences[0].UID != again.UID })
	})
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("the new Node had its slices after %s", took)
	}
	if err := n.probe.isReady(t.Context()); err != nil {
		t.Error(err)
	}
	if msg := n.unprepare(t, held); msg != "" {
		t.Error(msg)
	}
	next := n.claim(t, "next", secondGPU)
	if msg := n.prepare(t, next).GetError(); msg != "" {
		t.Error(msg)
	}
}
