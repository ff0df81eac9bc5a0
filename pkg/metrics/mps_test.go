package metrics

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestMPSRestartsAreCountedOnce(t *testing.T) {
	m := New("v1")
	at := func(want ...string) {
		t.Helper()
		if diff := cmp.Diff(want, scrape(t, m, "gpu_dra_mps_")); diff != "" {
			t.Error(diff)
		}
	}
	none := []string{"gpu_dra_mps_start_duration_seconds_sum 0", "gpu_dra_mps_start_duration_seconds_count 0",
		"gpu_dra_mps_start_errors_total 0"}
	m.MPS([]MPSDaemon{{"old", "Ready", 3}})
	at(append([]string{`gpu_dra_mps_daemons{state="Ready"} 1`, "gpu_dra_mps_restarts_total 0"}, none...)...)
	m.MPS([]MPSDaemon{{"old", "Starting", 4}, {"new", "Ready", 0}, {"poor", "Failed", 2}})
	at(append([]string{
		`gpu_dra_mps_daemons{state="Failed"} 1`, `gpu_dra_mps_daemons{state="Ready"} 1`, `gpu_dra_mps_daemons{state="Starting"} 1`,
		"gpu_dra_mps_restarts_total 3",
	}, none...)...)
	m.MPS([]MPSDaemon{{"old", "Ready", 4}})
	m.MPS(nil)
	m.MPS([]MPSDaemon{{"old", "Ready", 1}}) // another daemon with the same ID
	at(append([]string{`gpu_dra_mps_daemons{state="Ready"} 1`, "gpu_dra_mps_restarts_total 4"}, none...)...)
}

func TestMPSStartAndShareMetrics(t *testing.T) {
	m := New("v1")
	m.MPSStart(time.Second, false)
	m.MPSStart(2*time.Second, true)
	m.Shares(map[string]int{"gpu-share": 8})
	want := []string{"gpu_dra_mps_start_duration_seconds_sum 3", "gpu_dra_mps_start_duration_seconds_count 2",
		"gpu_dra_mps_start_errors_total 1"}
	if diff := cmp.Diff(want, scrape(t, m, "gpu_dra_mps_start")); diff != "" {
		t.Error(diff)
	}
	want = []string{`gpu_dra_inventory_devices{type="gpu-share"} 8`, `gpu_dra_inventory_devices{type="mig-share"} 0`}
	if diff := cmp.Diff(want, scrape(t, m, "gpu_dra_inventory_devices")); diff != "" {
		t.Error(diff)
	}
}
