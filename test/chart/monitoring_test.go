package chart

import (
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestMonitorsExcludeEachOther(t *testing.T) {
	_, err := template(t, "--set", "metrics.podMonitor.enabled=true", "--set", "metrics.serviceMonitor.enabled=true")
	if err == nil || !strings.Contains(err.Error(), "enable one") {
		t.Errorf("both monitors: %v", err)
	}
}

func TestServiceMonitorSelectsItsService(t *testing.T) {
	objects, text := render(t, "--set", "metrics.serviceMonitor.enabled=true", "--set", "metrics.serviceMonitor.labels.team=gpu")
	labels := only[*corev1.Service](t, objects, plugin).Labels
	_, monitor, found := strings.Cut(text, "kind: ServiceMonitor")
	_, selector, _ := strings.Cut(monitor, "matchLabels:\n")
	selector, _, _ = strings.Cut(selector, "  endpoints:")
	if !found || strings.TrimSpace(selector) == "" {
		t.Fatalf("no ServiceMonitor with a selector:\n%s", text)
	}
	for line := range strings.Lines(selector) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		if labels[key] != value {
			t.Errorf("the Service has %s=%q, the ServiceMonitor selects %q", key, labels[key], value)
		}
	}
	if !strings.Contains(monitor, "honorLabels: true") || !strings.Contains(monitor, "targetLabel: node") {
		t.Errorf("metrics lose their labels:\n%s", monitor)
	}
}

func TestEachAlertHasARunbook(t *testing.T) {
	_, text := render(t, "--set", "metrics.prometheusRule.enabled=true", "--set", "metrics.prometheusRule.runbooks=https://example.com/r")
	page, err := os.ReadFile("../../docs/runbooks.md")
	if err != nil {
		t.Fatal(err)
	}
	alerts := regexp.MustCompile(`- alert: (\w+)`).FindAllStringSubmatch(text, -1)
	if len(alerts) == 0 {
		t.Fatal("no alert")
	}
	for _, a := range alerts {
		link := "runbook_url: https://example.com/r#" + strings.ToLower(a[1]) + "\n"
		if !strings.Contains(string(page), "\n## "+a[1]+"\n") || !strings.Contains(text, link) {
			t.Errorf("alert %s has no section in docs/runbooks.md, or no link to it", a[1])
		}
	}
	if sections := strings.Count(string(page), "\n## "); sections != len(alerts) {
		t.Errorf("docs/runbooks.md has %d sections for %d alerts", sections, len(alerts))
	}
	if strings.Contains(text, "PLUGIN") || strings.Contains(text, "RUNBOOKS") {
		t.Errorf("a name was not filled in:\n%s", text)
	}
}

func TestDashboardsAreRendered(t *testing.T) {
	objects, _ := render(t, "--set", "metrics.dashboards.enabled=true")
	all := only[*corev1.ConfigMap](t, objects, plugin+"-dashboards")
	for _, name := range []string{"gpu-dra-fleet.json", "gpu-dra-node.json"} {
		var dashboard struct{ UID, Title string }
		if err := json.Unmarshal([]byte(all.Data[name]), &dashboard); err != nil || dashboard.UID+".json" != name {
			t.Errorf("%s: %v, %+v", name, err, dashboard)
		}
	}
	if all.Labels["grafana_dashboard"] != "1" || len(all.Data) != 2 {
		t.Errorf("labels %v, %d dashboards", all.Labels, len(all.Data))
	}
}
