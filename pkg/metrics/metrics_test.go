package metrics

import (
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// scrape returns the lines that Prometheus would read and that start with begin. It leaves out
// histogram buckets.
func scrape(t *testing.T, m *Metrics, begin string) []string {
	t.Helper()
	answer := httptest.NewRecorder()
	promhttp.HandlerFor(m.Registry, promhttp.HandlerOpts{}).ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), "GET",
		"/metrics", nil))
	var lines []string
	for line := range strings.Lines(answer.Body.String()) {
		if strings.HasPrefix(line, begin) && !strings.Contains(line, "_bucket{") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

func TestEveryMetricHasPrefixAndHelp(t *testing.T) {
	m := New("v1")
	m.Request(Prepare)("hardware")
	m.ClaimStatusError("conflict")
	m.PublishError()
	m.Repaired("cdi-spec")
	m.CountPrepared(func() (int, int, error) { return 1, 2, nil })
	m.Inventory(true, 8)
	m.InventoryProblems(map[string]int{"missing-file": 1})
	m.Publisher(true)
	m.MIGCall("create", time.Second, "in-use")
	m.MIG(MIGState{Offered: map[string]int{"1g.10gb": 7}, GPUs: map[string]int{"": 1}})
	m.MPS([]MPSDaemon{{ID: "a", State: "Ready"}})
	var names []string
	for _, line := range scrape(t, m, "# HELP ") {
		name, help, _ := strings.Cut(strings.TrimPrefix(line, "# HELP "), " ")
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") {
			continue
		}
		if !strings.HasSuffix(help, ".") {
			t.Errorf("%s is described by %q", name, help)
		}
		names = append(names, name)
	}
	want := []string{
		"gpu_dra_build_info", "gpu_dra_claim_status_errors_total", "gpu_dra_device_plugin", "gpu_dra_driver_released",
		"gpu_dra_held_gpus", "gpu_dra_inventory_devices", "gpu_dra_inventory_problems", "gpu_dra_inventory_ready",
		"gpu_dra_mig_gpus", "gpu_dra_mig_instances", "gpu_dra_mig_operation_duration_seconds", "gpu_dra_mig_operation_errors_total",
		"gpu_dra_mps_daemons", "gpu_dra_mps_restarts_total", "gpu_dra_mps_start_duration_seconds", "gpu_dra_mps_start_errors_total",
		"gpu_dra_predecessor_claims", "gpu_dra_predecessor_unreadable", "gpu_dra_prepared_claims", "gpu_dra_publish_errors_total",
		"gpu_dra_publisher", "gpu_dra_repairs_total",
		"gpu_dra_request_duration_seconds", "gpu_dra_request_errors_total", "gpu_dra_requests_in_flight", "gpu_dra_slow_scheduler",
	}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Error(diff)
	}
}

func TestMissingValuesLoseTheirSeries(t *testing.T) {
	m := New("v1")
	m.MIG(MIGState{
		Offered: map[string]int{"1g.10gb": 7, "3g.40gb": 2}, Ours: map[string]int{"1g.10gb": 1},
		GPUs: map[string]int{"": 1, "an admin cut it": 1},
	})
	m.MIG(MIGState{Offered: map[string]int{"1g.10gb": 2}, Foreign: map[string]int{"1g.10gb": 2}, GPUs: map[string]int{"an admin cut it": 2}})
	want := []string{
		`gpu_dra_inventory_devices{type="mig"} 2`,
		`gpu_dra_mig_gpus{reason="an admin cut it"} 2`,
		`gpu_dra_mig_instances{profile="1g.10gb",state="foreign"} 2`,
		`gpu_dra_mig_instances{profile="1g.10gb",state="offered"} 2`,
	}
	if diff := cmp.Diff(want, slices.Concat(scrape(t, m, "gpu_dra_inventory_devices"), scrape(t, m, "gpu_dra_mig"))); diff != "" {
		t.Error(diff)
	}
}

func TestOnlyFailedMIGCallsCountAsErrors(t *testing.T) {
	m := New("v1")
	m.MIGCall("destroy", 250*time.Millisecond, "")
	m.MIGCall("destroy", 250*time.Millisecond, "in-use")
	want := []string{
		`gpu_dra_mig_operation_duration_seconds_sum{operation="destroy"} 0.5`,
		`gpu_dra_mig_operation_duration_seconds_count{operation="destroy"} 2`,
		`gpu_dra_mig_operation_errors_total{code="in-use",operation="destroy"} 1`,
	}
	if diff := cmp.Diff(want, scrape(t, m, "gpu_dra_mig_operation")); diff != "" {
		t.Error(diff)
	}
}
