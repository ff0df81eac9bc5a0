package publish

import (
	"cmp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fakeapi"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

const firstGPU, secondGPU = "gpu-0000-1b-00-0", "gpu-0000-43-00-0"

// viewWithXIDs returns the health view after the first GPU of the snapshot s has reported XIDs at
// the time at. kinds has the numbers of the XIDs.
func viewWithXIDs(t *testing.T, at time.Time, s inventory.Snapshot, kinds ...uint64) *health.View {
	t.Helper()
	return newMonitor(t, at, s, kinds...).View()
}

func newMonitor(t *testing.T, at time.Time, s inventory.Snapshot, kinds ...uint64) *health.Monitor {
	t.Helper()
	m := health.New(nil, at)
	var gpus []device.GPU
	for _, g := range s.Node.GPUs {
		gpus = append(gpus, g.GPU)
	}
	m.Expect(gpus, at)
	for _, xid := range kinds {
		m.Apply(device.Signal{Event: &device.HealthEvent{Card: gpus[0].Card(), Kind: device.EventXID, XID: xid, At: at}}, at)
	}
	return m
}

func newMarker(
	t *testing.T, f Features, s inventory.Snapshot, view *health.View, effects map[string]health.Effect, claimed ...string,
) (marker, []resourceslice.Slice) {
	t.Helper()
	e, errs := health.NewEffects(effects, nil)
	if errs != nil {
		t.Fatal(errs)
	}
	m := marker{
		view: view, effects: e, features: f, gpus: map[string]device.GPU{}, claimed: sets.New(claimed...), withdrawn: sets.Set[string]{},
	}
	for _, g := range s.Node.GPUs {
		m.gpus[g.WholeName()] = g.GPU
	}
	var offerings []device.Offering
	for _, g := range s.Node.GPUs {
		offerings = append(offerings, device.Offering{GPU: g.GPU, Layout: device.Layout{Whole: true}})
	}
	return m, device.Slices(device.Offer(offerings), s.Node.Driver, false)
}

func TestMarkTaints(t *testing.T) {
	at := time.Date(2026, 3, 1, 12, 0, 0, 999, time.UTC)
	s := readyWith("0000:1b:00.0", "0000:43:00.0")
	all, withoutNone := Features{DeviceTaints: true, InformingTaints: true}, Features{DeviceTaints: true}
	xids := func(codes ...uint64) *health.View { return viewWithXIDs(t, at, s, codes...) }
	pending := device.Condition{Remap: &device.Remap{Pending: true}}
	reset := device.Condition{Recovery: device.RecoveryReset}
	lost := device.Condition{Reach: device.ReachLost}
	for name, c := range map[string]struct {
		features Features
		view     *health.View
		effects  map[string]health.Effect
		want     []string
	}{
		"an XID":                  {all, xids(79), nil, []string{"xid=79:NoSchedule"}},
		"an XID that degrades":    {all, xids(144), nil, []string{"xid=144:None"}},
		"without the effect None": {withoutNone, xids(144), nil, nil},
		"an application's XID":    {all, xids(31), nil, nil},
		// Each taint key has one taint, with the most severe effect.
		"a grave and a mild XID": {all, xids(144, 79, 31), nil, []string{"xid=79:NoSchedule"}},
		"the milder of two XIDs withdraws": {
			all, xids(144, 79), map[string]health.Effect{"unhealthy": "none", "degraded": "NoSchedule"}, []string{"xid=144:NoSchedule"},
		},
		"of two XIDs one is off": {all, xids(144, 79), map[string]health.Effect{"unhealthy": "off"}, []string{"xid=144:None"}},
		"configured effect":      {all, xids(79), map[string]health.Effect{"unhealthy": "NoExecute"}, []string{"xid=79:NoExecute"}},
		"not at all":             {all, xids(79, 144), map[string]health.Effect{"unhealthy": "off", "degraded": "off"}, nil},
		"the driver asks for a reset": {
			all, viewWithCondition(t, at, s, nil, reset), nil, []string{"unhealthy=recovery-gpu-reset:NoSchedule"},
		},
		"an XID, and the driver asks for a reset": {
			all, viewWithCondition(t, at, s, []uint64{95}, reset), nil, []string{"unhealthy=recovery-gpu-reset:NoSchedule", "xid=95:NoSchedule"},
		},
		"a remap is pending": {all, viewWithCondition(t, at, s, nil, pending), nil, []string{"degraded=remap-pending:None"}},
		"lost":               {all, viewWithCondition(t, at, s, nil, lost), nil, []string{"gpu-lost=:NoSchedule"}},
		"lost after an XID":  {all, viewWithCondition(t, at, s, []uint64{79}, lost), nil, []string{"gpu-lost=:NoSchedule", "xid=79:NoSchedule"}},
		"unmonitored": {
			all, viewWithCondition(t, at, s, nil, device.Condition{Reach: device.ReachFailed}), nil, []string{"unmonitored=:None"},
		},
		"unmonitored, evicting": {
			all, viewWithCondition(t, at, s, nil, device.Condition{Reach: device.ReachFailed}),
			map[string]health.Effect{"unknown": "NoExecute"}, []string{"unmonitored=:NoExecute"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, published := newMarker(t, c.features, s, c.view, c.effects)
			marked, count, settled := m.mark(published)
			if !settled || len(marked) != 1 || len(marked[0].Devices) != 2 || len(marked[0].Devices[1].Taints) != 0 {
				t.Fatalf("%+v", marked)
			}
			var got []string
			for _, taint := range marked[0].Devices[0].Taints {
				key := strings.TrimPrefix(taint.Key, "gpu.nvidia.com/")
				got = append(got, key+"="+taint.Value+":"+string(taint.Effect))
				if count[metrics.Taint{Key: key, Effect: string(taint.Effect)}] != 1 {
					t.Errorf("counted %v", count)
				}
				if taint.TimeAdded.Before(stamp(at)) || taint.TimeAdded.After(at.Add(time.Minute)) {
					t.Errorf("%s was added at %s", key, taint.TimeAdded)
				}
			}
			slices.Sort(got)
			if !slices.Equal(got, c.want) || len(count) != len(c.want) {
				t.Errorf("%q, want %q; counted %v", got, c.want, count)
			}
		})
	}
}

func TestUnvalidatedGPUsAreTainted(t *testing.T) {
	at := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	s := readyWith("0000:1b:00.0", "0000:43:00.0")
	taintsOf := func(f Features, required bool, monitor *health.Monitor) map[string]string {
		m, slices := newMarker(t, f, s, monitor.View(), nil)
		m.requireValidation = required
		marked, _, _ := m.mark(slices)
		taints := map[string]string{}
		for _, slice := range marked {
			for _, d := range slice.Devices {
				for _, taint := range d.Taints {
					taints[d.Name] += taint.Key + ":" + string(taint.Effect)
				}
			}
		}
		return taints
	}
	const want = "gpu.nvidia.com/unvalidated:NoSchedule"
	all := Features{DeviceTaints: true, InformingTaints: true}
	m := newMonitor(t, at, s)
	if got := taintsOf(all, true, m); got[firstGPU] != want || got[secondGPU] != want {
		t.Errorf("without a check: %v", got)
	}
	if got := taintsOf(all, true, health.New(nil, at)); got[firstGPU] != want {
		t.Errorf("a GPU that the health monitor does not know yet: %v", got)
	}
	if got := taintsOf(all, false, m); len(got) > 0 {
		t.Errorf("the setting is off: %v", got)
	}
	if got := taintsOf(Features{}, true, m); len(got) > 0 {
		t.Errorf("without device taints: %v", got)
	}
	m.Validate(map[string]time.Time{s.Node.GPUs[0].UUID: at})
	if got := taintsOf(all, true, m); got[firstGPU] != "" || got[secondGPU] != want {
		t.Errorf("after a check of the first GPU: %v", got)
	}
}

// viewWithCondition returns the health view after the first GPU of the snapshot s has reported the
// XIDs at the time at, and the hardware condition c half a minute later.
func viewWithCondition(t *testing.T, at time.Time, s inventory.Snapshot, xids []uint64, c device.Condition) *health.View {
	t.Helper()
	m := newMonitor(t, at, s, xids...)
	for i := range 4 {
		now := at.Add(30*time.Second + time.Duration(i)*5*time.Second)
		for n, g := range s.Node.GPUs {
			is := device.Condition{}
			if n == 0 {
				is = c
			}
			is.Card, is.At, is.Reach = g.Card(), now, cmp.Or(is.Reach, device.ReachOK)
			m.Apply(device.Signal{Condition: &is}, now)
		}
	}
	return m.View()
}

// Tolerations that were written for NVIDIA's DRA driver must match this driver's taints, too.
func TestReferenceDriverTolerationsMatch(t *testing.T) {
	at := time.Now()
	s := readyWith("0000:1b:00.0")
	for name, c := range map[string]struct {
		view       *health.View
		effects    map[string]health.Effect
		toleration resourceapi.DeviceToleration
	}{
		"any XID": {viewWithXIDs(t, at, s, 79), nil, resourceapi.DeviceToleration{
			Key: "gpu.nvidia.com/xid", Operator: resourceapi.DeviceTolerationOpExists,
		}},
		"one XID": {viewWithXIDs(t, at, s, 79), nil, resourceapi.DeviceToleration{
			Key: "gpu.nvidia.com/xid", Operator: resourceapi.DeviceTolerationOpEqual, Value: "79", Effect: resourceapi.DeviceTaintEffectNoSchedule,
		}},
		"a lost GPU": {viewWithCondition(t, at, s, nil, device.Condition{Reach: device.ReachLost}), nil, resourceapi.DeviceToleration{
			Key: "gpu.nvidia.com/gpu-lost", Operator: resourceapi.DeviceTolerationOpEqual,
		}},
		"not monitored": {
			viewWithCondition(t, at, s, nil, device.Condition{Reach: device.ReachFailed}), map[string]health.Effect{"unknown": "NoSchedule"},
			resourceapi.DeviceToleration{Key: "gpu.nvidia.com/unmonitored", Operator: resourceapi.DeviceTolerationOpEqual},
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, published := newMarker(t, Features{DeviceTaints: true, InformingTaints: true}, s, c.view, c.effects)
			marked, _, _ := m.mark(published)
			classes := scheduler.Classes{device.DriverName: `device.attributes["gpu.nvidia.com"].type == "gpu"`}
			other := c.toleration
			other.Key = "gpu.nvidia.com/other"
			for toleration, want := range map[resourceapi.DeviceToleration]int{c.toleration: 1, other: 0} {
				got, err := scheduler.New(device.DriverName, marked, classes).Allocate(t.Context(), scheduler.NewTaken(), resourceapi.DeviceClaim{
					Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{
						DeviceClassName: device.DriverName, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
						Tolerations: []resourceapi.DeviceToleration{toleration},
					}}},
				})
				if err != nil || len(got) != want {
					t.Errorf("%d devices for a claim that tolerates %s: %v", len(got), toleration.Key, err)
				}
			}
		})
	}
}

func TestUnhealthyDeviceIsWithdrawnUnlessClaimed(t *testing.T) {
	s := readyWith("0000:1b:00.0", "0000:43:00.0")
	view := viewWithXIDs(t, time.Now(), s, 79)
	for name, c := range map[string]struct {
		effects map[string]health.Effect
		held    []string
		want    []string
		settled bool
	}{
		"withdrawn":           {nil, nil, []string{secondGPU}, true},
		"held":                {nil, []string{firstGPU}, []string{firstGPU, secondGPU}, false},
		"another is held":     {nil, []string{secondGPU}, []string{secondGPU}, true},
		"it is not taken out": {map[string]health.Effect{"unhealthy": "none"}, nil, []string{firstGPU, secondGPU}, true},
	} {
		t.Run(name, func(t *testing.T) {
			m, all := newMarker(t, Features{}, s, view, c.effects, c.held...)
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
	m, all := newMarker(t, Features{}, only, viewWithXIDs(t, time.Now(), only, 79), nil)
	if marked, _, _ := m.mark(all); len(marked) != 0 {
		t.Errorf("a slice without devices is published: %+v", marked)
	}
}

// Kubernetes 1.34 rejects a slice if a device has more than four taints. On such a cluster the
// marker must leave out the mildest ones.
func TestTaintsStayWithinAPIServerLimit(t *testing.T) {
	at, s := time.Now(), readyWith("0000:1b:00.0")
	v := health.Verdict{State: health.Lost, Causes: []health.Finding{
		{State: health.Lost, Code: "off-the-bus", Since: at}, {State: health.Unhealthy, Code: "xid-95", XID: 95, Since: at},
		{State: health.Unhealthy, Code: "recovery-gpu-reset", Since: at}, {State: health.Unknown, Code: "watcher", Since: at},
		{State: health.Degraded, Code: "remap-pending", Since: at},
	}}
	notReady := &resourceapi.DeviceTaint{Key: notReadyTaint, Value: nodeview.CodeHookMissing, Effect: resourceapi.DeviceTaintEffectNoSchedule}
	for _, c := range []struct {
		features Features
		want     int
	}{{Features{DeviceTaints: true}, 4}, {Features{DeviceTaints: true, InformingTaints: true}, 6}} {
		m, published := newMarker(t, c.features, s, &health.View{}, map[string]health.Effect{"unknown": "NoSchedule", "degraded": "NoExecute"})
		taints := m.allTaints(published[0].Devices[0], v, notReady)
		if len(taints) != c.want {
			t.Errorf("%+v: want %d taints: %v", c.features, c.want, taints)
		}
		if !slices.ContainsFunc(taints, func(t resourceapi.DeviceTaint) bool { return t.Effect == resourceapi.DeviceTaintEffectNoExecute }) {
			t.Errorf("%+v: the gravest taint is missing: %v", c.features, taints)
		}
	}
}

func TestTaintsAreCounted(t *testing.T) {
	s := readyWith("0000:1b:00.0", "0000:43:00.0")
	m, all := newMarker(t, Features{DeviceTaints: true}, s, viewWithXIDs(t, time.Now(), s, 95), nil)
	if _, count, _ := m.mark(all); count[metrics.Taint{Key: "xid", Effect: "NoSchedule"}] != 1 {
		t.Errorf("%v", count)
	}
}

// Without device taints an unhealthy device leaves the slices. A claim that was allocated the
// device keeps it there, even before the claim is prepared.
func TestAllocatedUnhealthyDeviceStaysWithoutTaintSupport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := noTaintServer()
		lists := 0
		fakeapi.Prepend(client, "list", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
			lists++
			return false, nil, nil
		})
		allocate(t, client)
		u := startPublishingNode(t, client, readyWith("0000:1b:00.0", "0000:43:00.0"))
		advance(time.Minute)
		lists = 0
		u.setXIDs(t, 79)
		advance(time.Minute)
		if got := fakeapi.Devices(t, client); !slices.Equal(got, []string{firstGPU, secondGPU}) {
			t.Errorf("published %v while the claim is allocated", got)
		}
		if most := int(time.Minute/settleIntervalMax) + 1; lists > most {
			t.Errorf("listed the claims %d times in a minute, more than %d", lists, most)
		}
		if err := client.ResourceV1().ResourceClaims("default").Delete(t.Context(), "c", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		advance(settleIntervalMax + settleInterval)
		if got := fakeapi.Devices(t, client); !slices.Equal(got, []string{secondGPU}) {
			t.Errorf("published %v after the claim has ended", got)
		}
		lists = 0
		advance(time.Minute)
		if lists > 0 {
			t.Errorf("listed the claims %d times after the device was withdrawn", lists)
		}
		u.stop()
	})
}

// The whole GPU and its other shapes can be had while a process has it open.
func TestOnlyTheDeviceForVirtualMachinesIsTaintedWhileTheGPUIsInUse(t *testing.T) {
	s := readyWith("0000:1b:00.0", "0000:43:00.0")
	m, _ := newMarker(t, Features{DeviceTaints: true}, s, viewWithXIDs(t, time.Now(), s), nil)
	m.held = map[device.PCIAddress]time.Time{"0000:1b:00.0": time.Now()}
	for name, want := range map[string]int{firstGPU: 0, firstGPU + "-vfio": 1, secondGPU + "-vfio": 0} {
		taints := m.allTaints(resourceapi.Device{Name: name}, health.Verdict{}, nil)
		if len(taints) != want || want == 1 && (taints[0].Key != "gpu.nvidia.com/in-use" ||
			taints[0].Effect != resourceapi.DeviceTaintEffectNoSchedule || taints[0].TimeAdded == nil) {
			t.Errorf("%s has the taints %v", name, taints)
		}
	}
}
