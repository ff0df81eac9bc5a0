package prometheus

import (
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/rules"
)

// Each alert fires on the series of its trouble, after its time and not before. It does not fire on
// the series of a healthy node, nor where the trouble is expected. A series has one value a minute.
func TestEachAlertFiresOnlyOnItsTrouble(t *testing.T) {
	const released = "\n  gpu_dra_driver_released{node=\"n\"} 1x40"
	const up = `up{node="n", job="gpu-dra-driver-kubelet-plugin"}`
	cases := map[string]struct {
		trouble string
		after   time.Duration // the alert fires at this age of the trouble
		fine    []string
	}{
		"GPUDRADeviceUnhealthy": {`gpu_dra_gpu_health{node="n", device="d", state="Lost", code="xid-79"} 1x40`, 0,
			[]string{`gpu_dra_gpu_health{node="n", device="d", state="Healthy", code=""} 1x40`}},
		"GPUDRADeviceDegraded": {`gpu_dra_gpu_health{node="n", device="d", state="Unknown", code="silent"} 1x40`, 15 * time.Minute,
			[]string{`gpu_dra_gpu_health{node="n", device="d", state="Unknown", code="released"} 1x40` + released}},
		"GPUDRANoHealthEvents": {`gpu_dra_health_events_heard{node="n"} 0x40`, 5 * time.Minute,
			[]string{`gpu_dra_health_events_heard{node="n"} 1x40`, `gpu_dra_health_events_heard{node="n"} 0x40` + released}},
		"GPUDRANodeNotReady": {`gpu_dra_inventory_ready{node="n"} 0x40`, 10 * time.Minute,
			[]string{`gpu_dra_inventory_ready{node="n"} 1x40`, `gpu_dra_inventory_ready{node="n"} 0x40` + released}},
		"GPUDRADevicePlugin": {`gpu_dra_device_plugin{node="n"} 1x40`, 10 * time.Minute, []string{`gpu_dra_device_plugin{node="n"} 0x40`}},
		"GPUDRAPluginDown": {up + ` 0x40`, 5 * time.Minute, []string{up + ` 1x40`,
			`up{node="n", job="another"} 0x40`, up + " 0x40\n  up{node=\"n\", job=\"gpu-dra-driver-kubelet-plugin\", pod=\"new\"} 1x40"}},
		"GPUDRANoPublisher": {"gpu_dra_publisher{node=\"n\"} 0x40\n  gpu_dra_inventory_ready{node=\"n\"} 1x40", 10 * time.Minute,
			[]string{"gpu_dra_publisher{node=\"n\", pod=\"old\"} 0x40\n  gpu_dra_publisher{node=\"n\", pod=\"new\"} 1x40\n" +
				"  gpu_dra_inventory_ready{node=\"n\"} 1x40", `gpu_dra_publisher{node="n"} 0x40`}},
		"GPUDRAPredecessorUnreadable": {`gpu_dra_predecessor_unreadable{node="n"} 1x40`, 5 * time.Minute,
			[]string{`gpu_dra_predecessor_unreadable{node="n"} 0x40`}},
		// The first error of its cause: the series begins with 1.
		"GPUDRARequestErrors": {`gpu_dra_request_errors_total{node="n", operation="prepare", cause="step"} 1x40`, 5 * time.Minute,
			[]string{`gpu_dra_request_errors_total{node="n", operation="prepare", cause="step"} 0x40`}},
		"GPUDRARequestsStuck": {`gpu_dra_requests_in_flight{node="n", operation="prepare"} 1x40`, 5 * time.Minute,
			[]string{`gpu_dra_requests_in_flight{node="n", operation="prepare"} 0 1 0 1 0 1 0x30`,
				"gpu_dra_requests_in_flight{node=\"n\", operation=\"prepare\"} 1x40\n" +
					"  gpu_dra_request_duration_seconds_count{node=\"n\", operation=\"prepare\"} 0+5x40"}},
		"GPUDRAPublishErrors": {`gpu_dra_publish_errors_total{node="n"} 0+1x40`, 16 * time.Minute,
			[]string{`gpu_dra_publish_errors_total{node="n"} 7x40`}},
		"GPUDRARepairs": {`gpu_dra_repairs_total{node="n", kind="cdi"} 0+1x40`, 11 * time.Minute,
			[]string{`gpu_dra_repairs_total{node="n", kind="cdi"} 0 3x40`}},
		"GPUDRAMIGErrors": {`gpu_dra_mig_operation_errors_total{node="n", operation="create", code="in-use"} 0+1x40`, 11 * time.Minute,
			[]string{`gpu_dra_mig_operation_errors_total{node="n", operation="create", code="in-use"} 2x40`}},
		"GPUDRAMPSDaemons": {`gpu_dra_mps_restarts_total{node="n"} 0 0 1x40`, 2 * time.Minute,
			[]string{`gpu_dra_mps_restarts_total{node="n"} 3x40`}},
	}
	for _, name := range names(t) {
		c, known := cases[name]
		if !known {
			t.Errorf("alert %s has no case", name)
			continue
		}
		delete(cases, name)
		t.Run(name, func(t *testing.T) {
			if fired := firstFiring(t, name, c.trouble); fired < 0 || fired > c.after+time.Minute || fired < c.after-time.Minute {
				t.Errorf("fires after %s, want %s", fired, c.after)
			}
			for _, series := range c.fine {
				if fired := firstFiring(t, name, series); fired >= 0 {
					t.Errorf("fires after %s although this is fine: %s", fired, series)
				}
			}
		})
	}
	for name := range cases {
		t.Errorf("there is no alert %s", name)
	}
}

// names returns the names of all alerts.
func names(t *testing.T) (all []string) {
	t.Helper()
	for _, g := range groups(t, "") {
		for _, r := range g.Rules() {
			all = append(all, r.Name())
		}
	}
	return all
}

// groups returns the groups of the chart's alerts, which evaluate the series.
func groups(t *testing.T, series string) map[string]*rules.Group {
	t.Helper()
	storage := promqltest.LoadedStorage(t, "load 1m\n  "+series)
	manager := newRules(t.Context(), storage.DB, newEngine())
	all, errs := manager.LoadGroups(time.Minute, labels.EmptyLabels(), "", nil, false, alertsFile(t))
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	return all
}

// firstFiring returns the age of the series when the alert fires, or -1 if it does not within 40
// minutes.
func firstFiring(t *testing.T, name, series string) time.Duration {
	t.Helper()
	for _, g := range groups(t, series) {
		for _, r := range g.Rules() {
			if r.Name() != name {
				continue
			}
			alert, ok := r.(*rules.AlertingRule)
			if !ok {
				t.Fatal(fmt.Sprint(name, " is no alert"))
			}
			for age := time.Duration(0); age <= 40*time.Minute; age += time.Minute {
				g.Eval(t.Context(), time.Unix(0, 0).Add(age))
				if alert.State() == rules.StateFiring {
					return age
				}
			}
		}
	}
	return -1
}
