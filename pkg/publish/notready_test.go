package publish

import (
	"slices"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
)

func TestNotReadyTaintKeepsHealthTaints(t *testing.T) {
	at := time.Date(2026, 3, 1, 12, 0, 0, 999, time.UTC)
	s := readyWith("0000:1b:00.0", "0000:43:00.0")
	m, all := newMarker(t, Features{DeviceTaints: true}, s, viewWithXIDs(t, at, s, 79), nil)
	m.conditions, m.now = []nodeview.Condition{{Code: "cdi-disabled", Since: at}}, at.Add(time.Hour)
	marked, count, settled := m.mark(all)
	first, second := marked[0].Devices[0].Taints, marked[0].Devices[1].Taints
	if !settled || len(first) != 2 || len(second) != 1 || first[0].Key != "gpu.nvidia.com/xid" {
		t.Fatalf("%+v, %+v", first, second)
	}
	for _, taint := range []resourceapi.DeviceTaint{first[1], second[0]} {
		if taint.Key != "gpu.nvidia.com/not-ready" || taint.Value != "cdi-disabled" ||
			taint.Effect != "NoSchedule" || !taint.TimeAdded.Time.Equal(at.Truncate(time.Second)) {
			t.Errorf("%+v", taint)
		}
	}
	if count[metrics.Taint{Key: "not-ready", Effect: "NoSchedule"}] != 2 {
		t.Errorf("%v", count)
	}
}

func TestUnreadyNodeKeepsClaimedDevicesWithoutTaintSupport(t *testing.T) {
	at := time.Now()
	s := readyWith("0000:1b:00.0", "0000:43:00.0")
	passing := []nodeview.Condition{{Code: "driver-missing", Transient: true, Since: at, Types: nodeview.NVIDIATypes}}
	for name, c := range map[string]struct {
		conditions []nodeview.Condition
		want       []string
	}{
		"persistent": {[]nodeview.Condition{{Code: "cdi-disabled", Since: at}}, []string{firstGPU}},
		"transient":  {passing, []string{firstGPU, secondGPU}},
	} {
		t.Run(name, func(t *testing.T) {
			m, all := newMarker(t, Features{}, s, &health.View{}, nil, firstGPU)
			m.conditions, m.now = c.conditions, at
			marked, count, settled := m.mark(all)
			var names []string
			for _, d := range marked[0].Devices {
				names = append(names, d.Name)
				if len(d.Taints) > 0 {
					t.Errorf("%+v", d.Taints)
				}
			}
			if !slices.Equal(names, c.want) || settled || len(count) > 0 {
				t.Errorf("%q, %v, %v", names, count, settled)
			}
		})
	}
}
