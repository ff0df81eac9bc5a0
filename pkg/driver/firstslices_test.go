package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// manyGPUs returns a snapshot with 70 GPUs, which need two slices.
func manyGPUs() inventory.Snapshot {
	var addresses []device.PCIAddress
	for i := range 70 {
		addresses = append(addresses, device.PCIAddress(fmt.Sprintf("0000:%02x:00.0", i)))
	}
	return readyWith(addresses...)
}

// storedWrites counts the client's writes of slices by verb. It leaves out dry runs.
func storedWrites(client *fake.Clientset) map[string]int {
	counts := map[string]int{}
	for _, a := range client.Actions() {
		if a.GetResource().Resource != "resourceslices" {
			continue
		}
		if create, ok := a.(clienttesting.CreateActionImpl); ok && len(create.CreateOptions.DryRun) > 0 {
			continue
		}
		switch verb := a.GetVerb(); verb {
		case "create", "update", "patch", "delete":
			counts[verb]++
		}
	}
	return counts
}

func startPublisher(
	t *testing.T, client *fake.Clientset, inv *fakeInventory,
	mark func([]resourceslice.Slice, inventory.Snapshot, Features) ([]resourceslice.Slice, bool),
) chan struct{} {
	t.Helper()
	changed := make(chan struct{}, 1)
	p := &publisher{
		client: client, nodeName: "node", inv: inv, leader: newLeaderLock(t.TempDir(), time.Now()),
		slices: wholeGPUs, onVersion: func(string) {}, mark: mark,
		onError: func(_ context.Context, err error, msg string) { t.Logf("%s: %v", msg, err) }, onLeadership: func(bool, bool) {},
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx, changed) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return changed
}

func TestControllerKeepsFirstSlices(t *testing.T) {
	client, inv := apiServer(), &fakeInventory{}
	s := manyGPUs()
	inv.set(s)
	changed := startPublisher(t, client, inv, unmarked)
	eventually(t, "all GPUs are published", func() bool { return len(published(t, client)) == len(s.Node.GPUs) })
	if got := storedWrites(client); got["create"] != 2 || len(got) != 1 {
		t.Fatalf("writes %v", got)
	}
	// The slices exist now, so the slice controller makes this change. It must write only the slice
	// that differs.
	s = manyGPUs()
	s.Node.GPUs[69].UUID = "GPU-another"
	inv.set(s)
	changed <- struct{}{}
	eventually(t, "the change is published", func() bool { return storedWrites(client)["update"] > 0 })
	if got := storedWrites(client); got["create"] != 2 || got["update"] != 1 || len(got) != 2 {
		t.Errorf("writes %v", got)
	}
	for _, slice := range mustList(t, client) {
		if slice.Spec.Pool.Generation != 1 || slice.Spec.Pool.ResourceSliceCount != 2 ||
			len(slice.OwnerReferences) != 1 || slice.OwnerReferences[0].UID != "node-uid" {
			t.Errorf("slice %s: %+v of %+v", slice.Name, slice.Spec.Pool, slice.OwnerReferences)
		}
	}
}

func TestControllerWritesMissingFirstSlices(t *testing.T) {
	client, inv := apiServer(), &fakeInventory{}
	refused := false
	prependReactor(client, "create", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		create, ok := a.(clienttesting.CreateActionImpl)
		if !ok || len(create.CreateOptions.DryRun) > 0 {
			return false, nil, nil
		}
		if slice, ok := create.GetObject().(*resourceapi.ResourceSlice); ok && len(slice.Spec.Devices) < 64 && !refused {
			refused = true
			return true, nil, errors.New("the API server is busy")
		}
		return false, nil, nil
	})
	s := manyGPUs()
	inv.set(s)
	startPublisher(t, client, inv, unmarked)
	eventually(t, "all GPUs are published", func() bool { return len(published(t, client)) == len(s.Node.GPUs) })
	if !refused {
		t.Error("nothing was refused")
	}
}

// An earlier plugin instance has ended before it wrote the taints of any slice. The next instance
// must write them slice by slice, in the same pool generation.
func TestRestartWritesMissingTaintsSliceBySlice(t *testing.T) {
	client, inv := apiServer(), &fakeInventory{}
	s := manyGPUs()
	inv.set(s)
	earlier, _, _ := wholeGPUs(t.Context(), s, Features{})
	if _, published, err := (&publisher{client: client, nodeName: "node"}).publishFirst(t.Context(), earlier); !published || err != nil {
		t.Fatal(published, err)
	}
	startPublisher(t, client, inv, func(all []resourceslice.Slice, _ inventory.Snapshot, _ Features) ([]resourceslice.Slice, bool) {
		marked := slices.Clone(all)
		for i := range marked {
			marked[i].Devices = slices.Clone(marked[i].Devices)
			marked[i].Devices[0].Taints = []resourceapi.DeviceTaint{{
				Key: "gpu.nvidia.com/unhealthy", Effect: resourceapi.DeviceTaintEffectNoSchedule,
			}}
		}
		return marked, true
	})
	eventually(t, "all taints are published", func() bool {
		return !slices.ContainsFunc(mustList(t, client), func(s resourceapi.ResourceSlice) bool { return len(s.Spec.Devices[0].Taints) == 0 })
	})
	if got := storedWrites(client); got["create"] != 2 || got["update"] != 2 || len(got) != 2 {
		t.Errorf("writes %v", got)
	}
	for _, slice := range mustList(t, client) {
		if slice.Spec.Pool.Generation != 1 {
			t.Errorf("slice %s: %+v", slice.Name, slice.Spec.Pool)
		}
	}
}
