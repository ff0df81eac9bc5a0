package metrics

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
)

// described returns the labels of every metric that the plugin can have, by the metric's name.
func described(t *testing.T) map[string][]string {
	t.Helper()
	m := New("v1")
	m.CountPrepared(func() (int, int, error) { return 0, 0, nil })
	m.ReadOccupancy(func() (Occupancy, bool) { return Occupancy{}, true })
	m.Inventory(true, 0)
	m.ReceivesEvents(true)
	descriptions := make(chan *prometheus.Desc)
	go func() { m.Registry.Describe(descriptions); close(descriptions) }()
	form := regexp.MustCompile(`^Desc\{fqName: "([^"]+)", help: .*constLabels: \{(.*)\}, variableLabels: \{(.*)\}\}$`)
	all := map[string][]string{}
	for d := range descriptions {
		parts := form.FindStringSubmatch(d.String())
		if parts == nil {
			t.Errorf("cannot parse: %s", d)
			continue
		}
		if !strings.HasPrefix(parts[1], "gpu_dra_") {
			continue // metrics of the Go runtime and of the process
		}
		labels := strings.FieldsFunc(parts[3], func(r rune) bool { return r == ',' })
		for _, constant := range regexp.MustCompile(`(\w+)="`).FindAllStringSubmatch(parts[2], -1) {
			labels = append(labels, constant[1])
		}
		slices.Sort(labels)
		all[parts[1]] = labels
	}
	return all
}

var metricName = regexp.MustCompile("gpu_dra_[a-z_]+")

func TestDocsTableListsEveryMetricWithLabels(t *testing.T) {
	page, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "\n### Metrics\n")
	section, _, _ = strings.Cut(section, "\n### Alerts")
	table := map[string][]string{}
	for line := range strings.Lines(section) {
		cells := strings.Split(strings.TrimSpace(line), "|")
		if len(cells) < 4 || !strings.Contains(cells[1], "`") {
			continue
		}
		labels := strings.FieldsFunc(cells[2], func(r rune) bool { return r == ',' || r == ' ' })
		slices.Sort(labels)
		for _, name := range metricName.FindAllString(cells[1], -1) {
			table[name] = labels
		}
		if strings.TrimSpace(cells[3]) == "" {
			t.Errorf("%s has no meaning in the table", cells[1])
		}
	}
	// Without this transformer, cmp would report nil and empty labels as different.
	sorted := cmp.Transformer("sorted", func(labels []string) string { return strings.Join(labels, ", ") })
	if diff := cmp.Diff(table, described(t), sorted); diff != "" {
		t.Errorf("-page +registry:\n%s", diff)
	}
}

// The documentation must not name a metric that does not exist, because an alert on such a metric
// would never fire.
func TestDocsNameOnlyExistingMetrics(t *testing.T) {
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil || len(pages) == 0 {
		t.Fatalf("no pages: %v", err)
	}
	all := described(t)
	for _, page := range append(pages, "../../README.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range metricName.FindAllString(string(text), -1) {
			if _, there := all[name]; !there {
				t.Errorf("%s names the missing metric %s", page, name)
			}
		}
	}
}
