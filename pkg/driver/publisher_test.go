package driver

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// fakeInventory fakes an inventory. It returns the snapshot that the test has set.
type fakeInventory struct {
	mu      sync.Mutex
	s       inventory.Snapshot
	changed chan struct{}
}

func (f *fakeInventory) Snapshot() inventory.Snapshot {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.s
}

func (f *fakeInventory) RequestScan() {}

func (f *fakeInventory) set(s inventory.Snapshot) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.s = s
	if f.changed != nil {
		wake(f.changed)
	}
}

func (f *fakeInventory) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.changed == nil {
		f.changed = make(chan struct{}, 1)
	}
	return f.changed
}

func readyWith(addresses ...device.PCIAddress) inventory.Snapshot {
	s := inventory.Snapshot{Ready: true, Known: true}
	s.Node.Driver = device.Driver{Version: "580.65.06", CUDAVersion: "13.0"}
	for _, a := range addresses {
		s.Node.GPUs = append(s.Node.GPUs, nvidia.GPU{GPU: device.GPU{
			PCIAddress: a, UUID: "GPU-" + string(a), ProductName: "NVIDIA H100", MemoryBytes: 80 << 30,
		}})
	}
	return s
}

const gpuName = "gpu-0000-1b-00-0"

// snapshotOfHalves returns a snapshot with one GPU, which has two memory slices and can be split
// into halves.
func snapshotOfHalves() inventory.Snapshot {
	return inventory.Snapshot{Ready: true, Known: true, Node: nvidia.Node{GPUs: []nvidia.GPU{{GPU: device.GPU{
		PCIAddress: "0000:1b:00.0", UUID: "GPU-1", ProductName: "NVIDIA H100", MemoryBytes: 80 << 30,
		MIG: &device.MIG{
			Profiles: []device.Profile{{ID: 9, Name: "3g.40gb", Slices: 3, MaxInstances: 2, MemoryBytes: 40 << 30, Size: 1, Starts: []uint32{0, 1}}},
		},
	}}}}}
}

// apiServer returns a fake API server that does two things that the plain fake client does not: it
// stores nothing in dry runs, and it gives slices names and resource versions. The slice controller
// recognizes its own writes by these.
func apiServer() *fake.Clientset {
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", UID: "node-uid"}})
	var version atomic.Int64
	prependReactor(client, "*", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if written, ok := a.(interface{ GetObject() runtime.Object }); ok {
			if slice, ok := written.GetObject().(*resourceapi.ResourceSlice); ok {
				slice.ResourceVersion = strconv.FormatInt(version.Add(1), 10)
				if slice.Name == "" {
					slice.Name = slice.GenerateName + slice.ResourceVersion
				}
			}
		}
		return false, nil, nil
	})
	prependReactor(client, "create", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		create, ok := a.(clienttesting.CreateActionImpl)
		if ok && len(create.CreateOptions.DryRun) > 0 {
			return true, create.GetObject(), nil
		}
		return false, nil, nil
	})
	return client
}

// prependReactor adds a reactor to a client that may be in use. The fake client reads its reactors
// under its lock, and adds them without.
func prependReactor(client *fake.Clientset, verb, resource string, react clienttesting.ReactionFunc) {
	client.Lock()
	defer client.Unlock()
	client.PrependReactor(verb, resource, react)
}

func wholeGPUs(_ context.Context, s inventory.Snapshot, _ Features) ([]resourceslice.Slice, bool, error) {
	var offerings []device.Offering
	for _, g := range s.Node.GPUs {
		offerings = append(offerings, device.Offering{GPU: g.GPU, Layout: device.Layout{Whole: true}})
	}
	return device.Slices(device.Offer(offerings), s.Node.Driver), true, nil
}

func unmarked(all []resourceslice.Slice, _ inventory.Snapshot, _ Features) ([]resourceslice.Slice, bool) {
	return all, true
}

func published(t *testing.T, client *fake.Clientset) []string {
	t.Helper()
	list, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var devices []string
	for _, s := range list.Items {
		for _, d := range s.Spec.Devices {
			devices = append(devices, d.Name)
		}
	}
	return devices
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 20 s: %s", what)
		}
		<-time.After(10 * time.Millisecond)
	}
}

func TestSlicesFollowTheInventory(t *testing.T) {
	client, inv := apiServer(), &fakeInventory{}
	inv.set(inventory.Snapshot{Reason: "the driver is not loaded"})
	changed := make(chan struct{}, 1)
	p := &publisher{
		client: client, nodeName: "node", inv: inv, leader: newLeaderLock(t.TempDir(), time.Now()),
		slices: wholeGPUs, onVersion: func(string) {}, mark: unmarked,
		conditionsDue: func(time.Time) (due, pending bool) { return false, false },
		onError:       func(_ context.Context, err error, msg string) { t.Logf("%s: %v", msg, err) }, onLeadership: func(bool, bool) {},
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- p.Run(ctx, changed) }()

	changed <- struct{}{} // the publisher wakes, but the node is still not ready
	if got := published(t, client); len(got) != 0 {
		t.Fatalf("published %v without a driver", got)
	}
	inv.set(readyWith("0000:1b:00.0", "0000:43:00.0"))
	changed <- struct{}{}
	eventually(t, "both GPUs are published", func() bool {
		return slices.Equal(published(t, client), []string{"gpu-0000-1b-00-0", "gpu-0000-43-00-0"})
	})
	inv.set(readyWith("0000:43:00.0"))
	changed <- struct{}{}
	eventually(t, "the lost GPU is withdrawn", func() bool {
		return slices.Equal(published(t, client), []string{"gpu-0000-43-00-0"})
	})

	// The test deletes all slices, as the kubelet does when it starts. The controller must create them
	// again.
	if err := client.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, s := range mustList(t, client) {
		if err := client.ResourceV1().ResourceSlices().Delete(ctx, s.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "deleted slices come back", func() bool { return len(published(t, client)) == 1 })

	stop()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if len(published(t, client)) != 1 {
		t.Error("the plugin deleted its slices when it stopped: an update must keep the GPUs published")
	}
}

func mustList(t *testing.T, client *fake.Clientset) []resourceapi.ResourceSlice {
	t.Helper()
	list, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return list.Items
}

func TestIsRecoverable(t *testing.T) {
	cause := errors.New("conflict")
	if err := recoverable(cause); !isRecoverable(err) || !errors.Is(err, cause) {
		t.Error("a recoverable error is not recognized or lost its cause")
	}
	if isRecoverable(cause) {
		t.Error("a plain error is recoverable")
	}
}
