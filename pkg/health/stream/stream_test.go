package stream

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/predecessor"
)

const (
	gpu   = "gpu-0000-1b-00-0"
	half  = gpu + "-mig-9-0"
	other = "gpu-0000-43-00-0"
)

// node fakes the sources of the stream, and what its nodeview looks at.
// It has a GPU that can be split into halves, and one that
// cannot be split.
type node struct {
	snapshot inventory.Snapshot
	view     *health.View
	lost     map[string]string
	stale    bool
	// changed and lostChanged are closed at a change.
	changed, lostChanged chan struct{}
	here                 *nodeview.Node
}

func newNode() *node {
	halves := &device.MIG{Profiles: []device.Profile{{ID: 9, Name: "3g.40gb", Slices: 3, MaxInstances: 2, Size: 1, Starts: []uint32{0, 1}}}}
	n := &node{view: &health.View{}, changed: make(chan struct{}), lostChanged: make(chan struct{})}
	n.snapshot = inventory.Snapshot{Ready: true, Known: true, Node: nvidia.Node{GPUs: []nvidia.GPU{
		{GPU: device.GPU{PCIAddress: "0000:1b:00.0", UUID: "GPU-1", MIG: halves}},
		{GPU: device.GPU{PCIAddress: "0000:43:00.0", UUID: "GPU-2"}},
	}}}
	return n
}

func (n *node) Snapshot() inventory.Snapshot                      { return n.snapshot }
func (n *node) Missing(inventory.Snapshot) []device.GPU           { return nil }
func (n *node) Lent(inventory.Snapshot) []device.GPU              { return nil }
func (n *node) View() *health.View                                { return n.view }
func (n *node) Changed() <-chan struct{}                          { return n.changed }
func (n *node) Stale(time.Time) bool                              { return n.stale }
func (n *node) LostDevices() (map[string]string, <-chan struct{}) { return n.lost, n.lostChanged }

// noReferenceDriver fakes a node on which NVIDIA's DRA driver never ran.
type noReferenceDriver struct{}

func (noReferenceDriver) Claims() ([]predecessor.Claim, error) { return nil, nil }
func (noReferenceDriver) Changed() bool                        { return false }

// fail lets the GPU with this address report an XID that makes it unhealthy.
func (n *node) fail(address device.PCIAddress, uuid string) {
	m := health.New(nil, time.Now())
	card := device.Card{PCIAddress: address, UUID: uuid}
	m.Apply(device.Signal{Event: &device.HealthEvent{Card: card, Kind: device.EventXID, XID: 79, At: time.Now()}}, time.Now())
	n.view = m.View()
}

// next waits for the next report. It returns the report by device name, and the time since the last
// one.
type next func() (map[string]kubeletplugin.DeviceHealth, time.Duration)

// withStream runs the test with a stream in simulated time. The stream starts after setUp.
func withStream(t *testing.T, setUp func(n *node), test func(n *node, next next)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := newNode()
		setUp(n)
		n.here = nodeview.New(n, n, noReferenceDriver{}, noClaims)
		ctx, cancel := context.WithCancel(t.Context())
		reports, done := make(chan kubeletplugin.DeviceHealthReport), make(chan struct{})
		go func() {
			defer close(done)
			Send(ctx, reports, Sources{Pool: "node", Node: n.here.View, Verdicts: n, LostDevices: n.LostDevices})
		}()
		last := time.Now()
		test(n, func() (map[string]kubeletplugin.DeviceHealth, time.Duration) {
			devices := map[string]kubeletplugin.DeviceHealth{}
			for _, d := range (<-reports).Devices {
				if devices[d.DeviceName] = d; d.PoolName != "node" || !d.LastUpdated.Equal(time.Now()) {
					t.Errorf("%+v at %s", d, time.Now())
				}
			}
			since := time.Since(last)
			last = time.Now()
			return devices, since
		})
		cancel()
		<-done
	})
}

func TestReportCoversEveryDevice(t *testing.T) {
	for name, c := range map[string]struct {
		setUp func(n *node)
		want  map[string]kubeletplugin.HealthStatus // by device, for each of them and its shares
		says  string                                // the message of the first GPU
	}{
		"all are healthy": {func(*node) {}, map[string]kubeletplugin.HealthStatus{gpu: "Healthy", half: "Healthy", other: "Healthy"}, ""},
		"the node is not ready": {
			func(n *node) { n.snapshot.Ready, n.snapshot.Reason = false, "the driver went away" },
			map[string]kubeletplugin.HealthStatus{gpu: "Unknown", half: "Unknown", other: "Unknown"}, "the driver went away",
		},
		"a GPU is unhealthy": {
			func(n *node) { n.fail("0000:1b:00.0", "GPU-1") },
			map[string]kubeletplugin.HealthStatus{gpu: "Unhealthy", half: "Unhealthy", other: "Healthy"}, "PCIe bus",
		},
		"a GPU is unhealthy and the verdicts are stale": {
			func(n *node) { n.fail("0000:1b:00.0", "GPU-1"); n.stale = true },
			map[string]kubeletplugin.HealthStatus{gpu: "Unhealthy", half: "Unhealthy", other: "Unknown"}, "PCIe bus",
		},
		"a claim has lost a device": {
			func(n *node) { n.lost = map[string]string{half: "it is gone", half + "-share": "it is gone"} },
			map[string]kubeletplugin.HealthStatus{gpu: "Healthy", half: "Unhealthy", other: "Healthy"}, "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			withStream(t, c.setUp, func(_ *node, next next) {
				devices, _ := next()
				if len(devices) != 8 { // both GPUs, two halves of the first, and shares of each of them
					t.Errorf("%d devices: %v", len(devices), devices)
				}
				for device, want := range c.want {
					if got := devices[device].Health; got != want || devices[device+"-share"].Health != want {
						t.Errorf("%s is %s and its shares are %s, want %s", device, got, devices[device+"-share"].Health, want)
					}
				}
				if got := devices[gpu].Message; !strings.Contains(got, c.says) || c.says == "" && got != "" {
					t.Errorf("the message is %q, want %q", got, c.says)
				}
			})
		})
	}
}

func TestChangesAreReportedAtOnce(t *testing.T) {
	for name, change := range map[string]func(n *node) string{
		"of a verdict": func(n *node) string { n.fail("0000:43:00.0", "GPU-2"); close(n.changed); return other },
		"of the node": func(n *node) string {
			n.here.Report(nodeview.Condition{Source: "hook", Message: "the hook is missing"})
			return gpu
		},
		"of a claim's devices": func(n *node) string {
			n.lost = map[string]string{half: "it is gone"}
			close(n.lostChanged)
			return half
		},
	} {
		t.Run(name, func(t *testing.T) {
			withStream(t, func(*node) {}, func(n *node, next next) {
				next()
				if _, after := next(); after != interval {
					t.Errorf("without a change the next report comes after %s, want %s", after, interval)
				}
				synctest.Wait()
				ill := change(n)
				if devices, after := next(); after != 0 || devices[ill].Health == kubeletplugin.HealthStatusHealthy {
					t.Errorf("after %s %s is %s", after, ill, devices[ill].Health)
				}
			})
		})
	}
}

// noClaims fakes a node without claims.
func noClaims(string) (bool, error) { return false, nil }
