package driver

import (
	"slices"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

const firstGPU, secondGPU = "gpu-0000-1b-00-0", "gpu-0000-43-00-0"

// ill is a view in which a card fell off the bus at that time.
func ill(t *testing.T, at time.Time, s inventory.Snapshot, kinds ...uint64) *health.View {
	t.Helper()
	m := health.New(health.Options{}, at)
	var gpus []device.GPU
	for _, g := range s.Node.GPUs {
		gpus = append(gpus, g.GPU)
	}
	m.Expect(gpus, at)
	for _, xid := range kinds {
		m.Apply(device.Signal{Event: &device.HealthEvent{Card: gpus[0].Card(), Kind: device.EventXID, XID: xid, At: at}}, at)
	}
	return m.View()
}

func markerOf(t *testing.T, f Features, s inventory.Snapshot, view *health.View, effects string, held ...string) (marker, []resourceslice.Slice) {
	t.Helper()
	e, err := health.ParseEffects(effects)
	if err != nil {
		t.Fatal(err)
	}
	m := marker{view: view, effects: e, features: f, gpus: map[string]device.GPU{}, held: map[string]bool{}}
	for _, g := range s.Node.GPUs {
		m.gpus[g.WholeName()] = g.GPU
	}
	for _, h := range held {
		m.held[h] = true
	}
	all, _, _ := wholeGPUs(t.Context(), s, f)
	return m, all
}

func TestTaintsSayWhatIsKnown(t *testing.T) {
	at := time.Date(2026, 3, 1, 12, 0, 0, 999, time.UTC)
	s := readyWith("0000:1b:00.0", "0000:43:00.0")
	view := ill(t, at, s, 79, 144, 31)
	for name, c := range map[string]struct {
		features Features
		effects  string
		want     map[string]resourceapi.DeviceTaintEffect
	}{
		"by default": {Features{DeviceTaints: true, InformingTaints: true}, "", map[string]resourceapi.DeviceTaintEffect{
			"gpu.nvidia.com/unhealthy": "NoSchedule", "gpu.nvidia.com/degraded": "None",
		}},
		"where None is not known": {Features{DeviceTaints: true}, "", map[string]resourceapi.DeviceTaintEffect{"gpu.nvidia.com/unhealthy": "NoSchedule"}},
		"as the admin says": {Features{DeviceTaints: true, InformingTaints: true}, "unhealthy=NoExecute,degraded=NoSchedule", map[string]resourceapi.DeviceTaintEffect{
			"gpu.nvidia.com/unhealthy": "NoExecute", "gpu.nvidia.com/degraded": "NoSchedule",
		}},
		"not at all": {Features{DeviceTaints: true, InformingTaints: true}, "unhealthy=off,degraded=off", nil},
	} {
		t.Run(name, func(t *testing.T) {
			m, all := markerOf(t, c.features, s, view, c.effects)
			marked, count, settled := m.mark(all)
			if !settled || len(marked) != 1 || len(marked[0].Devices) != 2 || len(marked[0].Devices[1].Taints) != 0 {
				t.Fatalf("%+v", marked)
			}
			got := marked[0].Devices[0].Taints
			if len(got) != len(c.want) || len(count) != len(c.want) {
				t.Errorf("%+v, %v", got, count)
			}
			for _, taint := range got {
				if c.want[taint.Key] != taint.Effect || !taint.TimeAdded.Time.Equal(at.Truncate(time.Second)) {
					t.Errorf("%+v", taint)
				}
				if want := map[string]string{"gpu.nvidia.com/unhealthy": "xid-79", "gpu.nvidia.com/degraded": "xid-144"}[taint.Key]; taint.Value != want {
					t.Errorf("%+v", taint)
				}
			}
		})
	}
}

func TestWithoutTaintsADeviceIsWithdrawnUnlessItIsHeld(t *testing.T) {
	s := readyWith("0000:1b:00.0", "0000:43:00.0")
	view := ill(t, time.Now(), s, 79)
	for name, c := range map[string]struct {
		effects string
		held    []string
		want    []string
		settled bool
	}{
		"withdrawn":           {"", nil, []string{secondGPU}, true},
		"held":                {"", []string{firstGPU}, []string{firstGPU, secondGPU}, false},
		"another is held":     {"", []string{secondGPU}, []string{secondGPU}, true},
		"it is not taken out": {"unhealthy=none", nil, []string{firstGPU, secondGPU}, true},
	} {
		t.Run(name, func(t *testing.T) {
			m, all := markerOf(t, Features{}, s, view, c.effects, c.held...)
			marked, count, settled := m.mark(all)
			var names []string
			for _, d := range marked[0].Devices {
				names = append(names, d.Name)
				if len(d.Taints) > 0 {
					t.Errorf("%+v", d.Taints)
				}
			}
			if !slices.Equal(names, c.want) || settled != c.settled || len(count) > 0 {
				t.Errorf("%q, %v, %v", names, count, settled)
			}
		})
	}
	only := readyWith("0000:1b:00.0")
	m, all := markerOf(t, Features{}, only, ill(t, time.Now(), only, 79), "")
	if marked, _, _ := m.mark(all); len(marked) != 0 {
		t.Errorf("a slice without devices is published: %+v", marked)
	}
}

func TestALostCardStaysInSight(t *testing.T) {
	s := readyWith("0000:1b:00.0", "0000:43:00.0")
	inv := &fakeInventory{}
	h := newHealthWatch(nil, nil, t.TempDir(), "boot", inv)
	held := true
	h.inUse = func(string) bool { return held }
	o := offeredInventory{readiness: newReadiness(inv, func() {}), health: h}
	h.view.Store(ill(t, time.Now(), s, 79))

	inv.set(readyWith("0000:43:00.0"))
	if now := o.Snapshot(); !now.Ready || len(now.Node.GPUs) != 2 || now.Node.GPUs[1].WholeName() != firstGPU {
		t.Errorf("%+v", now)
	}
	inv.set(inventory.Snapshot{Known: true, Reason: "no GPU of this node can be offered"})
	if now := o.Snapshot(); !now.Ready || len(now.Node.GPUs) != 1 {
		t.Errorf("the only card: %+v", now)
	}
	inv.set(inventory.Snapshot{Known: true, Empty: true, Reason: "the driver lists no GPU"})
	if now := o.Snapshot(); !now.Ready || now.Empty || len(now.Node.GPUs) != 1 {
		t.Errorf("the only card was taken out, and a claim has it: %+v", now)
	}
	held = false
	if now := o.Snapshot(); now.Ready || !now.Empty {
		t.Errorf("the only card was taken out: %+v", now)
	}
	inv.set(readyWith("0000:43:00.0"))
	if now := o.Snapshot(); len(now.Node.GPUs) != 1 {
		t.Errorf("a card was taken out: %+v", now)
	}
	onBus := readyWith("0000:43:00.0")
	onBus.Node.Problems = []nvidia.Problem{{PCIAddress: "0000:1b:00.0"}}
	inv.set(onBus)
	if now := o.Snapshot(); len(now.Node.GPUs) != 2 {
		t.Errorf("a card that is on the bus: %+v", now)
	}
	inv.set(inventory.Snapshot{Known: true, Reason: "no GPU of this node can be offered"})
	o.readiness.Report(condition{source: "runtime", message: "CDI is off"})
	if now := o.Snapshot(); now.Ready {
		t.Errorf("a closed node: %+v", now)
	}
	inv.set(inventory.Snapshot{Reason: "not looked yet"})
	if now := o.Snapshot(); now.Ready || len(now.Node.GPUs) != 0 {
		t.Errorf("a node of which nothing is known: %+v", now)
	}
}

func TestMetricsCountTaints(t *testing.T) {
	s := readyWith("0000:1b:00.0", "0000:43:00.0")
	m, all := markerOf(t, Features{DeviceTaints: true}, s, ill(t, time.Now(), s, 95), "")
	if _, count, _ := m.mark(all); count[metrics.Taint{State: "unhealthy", Effect: "NoSchedule"}] != 1 {
		t.Errorf("%v", count)
	}
}
