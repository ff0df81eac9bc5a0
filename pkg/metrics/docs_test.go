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

// described are all metrics that a plugin can have, with their labels, whether or not they have a series yet.
func described(t *testing.T) map[string][]string {
	t.Helper()
	m := New("v1")
	m.Held(func() (int, int, error) { return 0, 0, nil })
	m.Inventory(true, 0)
	m.Hears(true)
	descriptions := make(chan *prometheus.Desc)
	go func() { m.Registry.Describe(descriptions); close(descriptions) }()
	form := regexp.MustCompile(`^Desc\{fqName: "([^"]+)", help: .*constLabels: \{(.*)\}, variableLabels: \{(.*)\}\}$`)
	all := map[string][]string{}
	for d := range descriptions {
		parts := form.FindStringSubmatch(d.String())
		if parts == nil {
			t.Errorf("not understood: %s", d)
			continue
		}
		if !strings.HasPrefix(parts[1], "gpu_dra_") {
			continue // Go's own, and the process's
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

// Who adds a metric says in the table what it means, and with which labels.
func TestTheTableOfTheDocumentationHasEveryMetricWithItsLabels(t *testing.T) {
	page, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "\n### Metrics\n")
	section, _, _ = strings.Cut(section, "\n\nWorth an alert:")
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
			t.Errorf("%s: what does it mean?", cells[1])
		}
	}
	// Whether labels are none or not there is the same.
	if diff := cmp.Diff(table, described(t), cmp.Transformer("sorted", func(labels []string) string { return strings.Join(labels, ", ") })); diff != "" {
		t.Errorf("-page +registry:\n%s", diff)
	}
}

// An alert on a metric that there is not never fires.
func TestTheDocumentationNamesNoMetricThatThereIsNot(t *testing.T) {
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
				t.Errorf("%s: there is no metric %s", page, name)
			}
		}
	}
}
