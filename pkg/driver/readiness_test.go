package driver

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
)

func TestReadinessNamesEveryReason(t *testing.T) {
	inv := &fakeInventory{}
	inv.set(readyWith("0000:1b:00.0"))
	r := nodeview.NewReadiness(inv, func() {})
	if s := r.Snapshot(); !s.Ready {
		t.Fatal("not ready without a condition")
	}
	r.Report(nodeview.Condition{Source: "runtime", Message: "CDI is off"})
	r.Report(nodeview.Condition{Source: "hook", Message: "noexec"})
	if s := r.Snapshot(); s.Ready || !r.Blocked() || s.Reason != "noexec; CDI is off" {
		t.Errorf("got %v, %q", s.Ready, s.Reason)
	}
	inv.set(inventory.Snapshot{Reason: "no driver"})
	if s := r.Snapshot(); s.Reason != "no driver; noexec; CDI is off" {
		t.Errorf("got %q", s.Reason)
	}
	inv.set(readyWith("0000:1b:00.0"))
	r.Clear("runtime")
	r.Clear("hook")
	if s := r.Snapshot(); !s.Ready || r.Blocked() {
		t.Errorf("still not ready: %q", s.Reason)
	}
}

func TestReadinessConditionKeepsItsStartTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		changes := 0
		r := nodeview.NewReadiness(alwaysReady{}, func() { changes++ })
		began := time.Now()
		r.Report(nodeview.Condition{Source: "runtime", Code: "a", Message: "one"})
		advance(time.Minute)
		r.Report(nodeview.Condition{Source: "runtime", Code: "a", Message: "another"})
		r.Report(nodeview.Condition{Source: "runtime", Code: "b", Message: "another"})
		r.Clear("hook")
		if c := r.Conditions(); len(c) != 1 || !c[0].Since.Equal(began) || c[0].Code != "b" || c[0].Message != "another" || changes != 2 {
			t.Errorf("%+v, %d changes", c, changes)
		}
		r.Clear("runtime")
		r.Report(nodeview.Condition{Source: "runtime", Code: "a"})
		if c := r.Conditions(); !c[0].Since.Equal(began.Add(time.Minute)) || changes != 4 {
			t.Errorf("%+v, %d changes", c, changes)
		}
	})
}

func TestConditionDueFirstIsShown(t *testing.T) {
	at := time.Now()
	early := nodeview.Condition{Code: "early", Transient: true, Since: at, Types: nodeview.NVIDIATypes}
	late := nodeview.Condition{Code: "late", Since: at.Add(time.Second)}
	for name, c := range map[string]struct {
		after   time.Duration
		of      string
		want    string
		pending bool
	}{
		"one is transient":               {0, "gpu", "", true},
		"the other is due":               {time.Second, "gpu", "late", false},
		"both are due":                   {time.Hour, "gpu", "late", false},
		"a share":                        {time.Hour, "mig-share", "late", false},
		"a type that one affects":        {time.Second, "vfio", "late", false},
		"a type that one affects, early": {0, "vfio", "", true},
	} {
		t.Run(name, func(t *testing.T) {
			got, shown, pending := nodeview.ShownCondition([]nodeview.Condition{early, late}, c.of, at.Add(c.after))
			if got.Code != c.want || shown != (c.want != "") || pending != c.pending {
				t.Errorf("%+v, %v, %v", got, shown, pending)
			}
		})
	}
	if _, shown, pending := nodeview.ShownCondition([]nodeview.Condition{early}, "vfio", at.Add(time.Hour)); shown || pending {
		t.Error("a missing NVIDIA driver affects a device that does not need it")
	}
}

func TestReasonCodesAreLabelValues(t *testing.T) {
	for _, code := range []string{
		nodeview.CodeCDIDisabled, nodeview.CodeCDIDirectory, nodeview.CodeHookMissing,
		nodeview.CodeBaseSpec, nodeview.CodeReleased, nodeview.CodeDevicePlugin,
		inventory.CodeNotScanned, inventory.CodeDriverMissing, inventory.CodeScanFailed, inventory.CodeNoGPU,
	} {
		if wrong := validation.IsValidLabelValue(code); len(wrong) > 0 || code == "" {
			t.Errorf("%q: %v", code, wrong)
		}
	}
}

func TestNotReadyTaintKeepsHealthTaints(t *testing.T) {
	at := time.Date(2026, 3, 1, 12, 0, 0, 999, time.UTC)
	s := readyWith("0000:1b:00.0", "0000:43:00.0")
	m, all := newMarker(t, Features{DeviceTaints: true}, s, viewWithXIDs(t, at, s, 79), "")
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
			m, all := newMarker(t, Features{}, s, nil, "", firstGPU)
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
