package publish

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/klog/v2"

	"github.com/go-logr/logr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/predecessor"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/publish/leader"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fakeapi"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/inventorytest"
)

// readyWith returns the snapshot of a ready node with GPUs at these addresses.
var readyWith = inventorytest.Ready

// fakeHealth fakes the health verdicts.
type fakeHealth struct {
	mu      sync.Mutex
	view    *health.View
	changed chan struct{}
}

func (f *fakeHealth) View() *health.View {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.view
}

func (f *fakeHealth) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changed
}

func (f *fakeHealth) set(v *health.View) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.view = v
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *fakeHealth) SetLeader(bool)                          {}
func (f *fakeHealth) Missing(inventory.Snapshot) []device.GPU { return nil }
func (f *fakeHealth) Lent(inventory.Snapshot) []device.GPU    { return nil }

// noReferenceDriver fakes a node on which NVIDIA's DRA driver never ran.
type noReferenceDriver struct{}

func (noReferenceDriver) Claims() ([]predecessor.Claim, error) { return nil, nil }
func (noReferenceDriver) Changed() bool                        { return false }

// noEvents drops all Events.
type noEvents struct{}

func (noEvents) Event(events.Reason, string)                 {}
func (noEvents) EventOnChange(events.Reason, string, string) {}

// publishingNode is a node with a publisher, fake hardware and a fake API server.
type publishingNode struct {
	client    *fake.Clientset
	inv       *inventorytest.Inventory
	node      *nodeview.Node
	health    *fakeHealth
	records   *fakeRecords
	publisher *Publisher
	stop      func()
}

// newPublishingNode returns a node with the snapshot s. Its publisher does not run yet.
func newPublishingNode(t *testing.T, client kubernetes.Interface, s inventory.Snapshot) *publishingNode {
	t.Helper()
	u := &publishingNode{
		inv:    inventorytest.New(s),
		health: &fakeHealth{view: &health.View{}, changed: make(chan struct{})}, records: &fakeRecords{},
	}
	u.client, _ = client.(*fake.Clientset)
	u.node = nodeview.New(u.inv, u.health, noReferenceDriver{}, noClaims)
	u.node.SetConfigured(device.Policies{})
	effects, errs := health.NewEffects(nil, nil)
	if errs != nil {
		t.Fatal(errs)
	}
	u.publisher = New(Options{
		Client: client, NodeName: "node", Leader: leader.New(t.TempDir()),
		Node: u.node, Health: u.health, Effects: effects, Claims: u.records,
		Events: noEvents{}, Metrics: metrics.New("test"),
	})
	return u
}

// run runs the function publish, and follows the node's changes, until u.stop is called.
func (u *publishingNode) run(t *testing.T, publish func(context.Context) error) {
	t.Helper()
	ctx, stop := context.WithCancel(klog.NewContext(t.Context(), logr.New(slowLogger{})))
	var running sync.WaitGroup
	running.Go(func() { u.node.Run(ctx) })
	done := make(chan error, 1)
	go func() { done <- publish(ctx) }()
	u.stop = sync.OnceFunc(func() {
		stop()
		running.Wait()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(u.stop)
}

// slowLogger drops all logs. One line takes a nanosecond: the slice controller syncs again and
// again at the very moment when its cache expires, and simulated time would never pass.
type slowLogger struct{}

func (slowLogger) Init(logr.RuntimeInfo)            {}
func (slowLogger) Enabled(int) bool                 { return true }
func (slowLogger) Error(error, string, ...any)      {}
func (s slowLogger) WithValues(...any) logr.LogSink { return s }
func (s slowLogger) WithName(string) logr.LogSink   { return s }
func (slowLogger) Info(_ int, message string, _ ...any) {
	if message == "Scheduled re-sync" {
		time.Sleep(time.Nanosecond) //nolint:forbidigo // simulated time
	}
}

// startPublishingNode starts a publisher with the snapshot s, as the leader. The caller must be in
// a synctest bubble.
func startPublishingNode(t *testing.T, client *fake.Clientset, s inventory.Snapshot) *publishingNode {
	t.Helper()
	u := newPublishingNode(t, client, s)
	u.run(t, u.publisher.publish)
	return u
}

// setInventory sets the snapshot of the fake inventory.
func (u *publishingNode) setInventory(s inventory.Snapshot) {
	u.inv.Set(s)
	u.node.Update()
}

// setXIDs replaces the health verdicts: the first GPU has reported XIDs with these numbers.
func (u *publishingNode) setXIDs(t *testing.T, kinds ...uint64) {
	t.Helper()
	u.health.set(viewWithXIDs(t, time.Now(), u.inv.Snapshot(), kinds...))
}

// taints returns the number of published taints.
func (u *publishingNode) taints(t *testing.T) (n int) {
	t.Helper()
	for _, s := range fakeapi.Slices(t, u.client) {
		for _, d := range s.Spec.Devices {
			n += len(d.Taints)
		}
	}
	return n
}

// advance advances the time of a synctest bubble and waits until all goroutines wait.
func advance(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // simulated time
	synctest.Wait()
}

// manyGPUs returns a snapshot with 70 GPUs, which need two slices.
func manyGPUs() inventory.Snapshot {
	var addresses []device.PCIAddress
	for i := range 70 {
		addresses = append(addresses, device.PCIAddress(fmt.Sprintf("0000:%02x:00.0", i)))
	}
	return readyWith(addresses...)
}

func TestSlicesFollowTheInventory(t *testing.T) {
	client := fakeapi.New()
	u := newPublishingNode(t, client, inventory.Snapshot{Reason: "the driver is not loaded"})
	u.run(t, u.publisher.Run)
	u.setInventory(inventory.Snapshot{Reason: "the driver is not loaded yet"}) // the publisher wakes, but the node is still not ready
	if got := fakeapi.Devices(t, client); len(got) != 0 {
		t.Fatalf("published %v without a driver", got)
	}
	u.setInventory(readyWith("0000:1b:00.0", "0000:43:00.0"))
	fakeapi.Eventually(t, "both GPUs are published", func() bool {
		return slices.Equal(fakeapi.Devices(t, client), []string{firstGPU, secondGPU})
	})
	u.setInventory(readyWith("0000:43:00.0"))
	fakeapi.Eventually(t, "the lost GPU is withdrawn", func() bool {
		return slices.Equal(fakeapi.Devices(t, client), []string{secondGPU})
	})

	// The test deletes all slices, as the kubelet does when it starts. The controller must create them
	// again.
	for _, s := range fakeapi.Slices(t, client) {
		if err := client.ResourceV1().ResourceSlices().Delete(t.Context(), s.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	fakeapi.Eventually(t, "deleted slices come back", func() bool { return len(fakeapi.Devices(t, client)) == 1 })

	u.stop()
	if len(fakeapi.Devices(t, client)) != 1 {
		t.Error("the plugin deleted its slices when it stopped: an update must keep the GPUs published")
	}
}

// noClaims fakes a node without claims.
func noClaims(string) (bool, error) { return false, nil }
