// Package doctor looks for what is wrong with this driver in a cluster: versions and feature gates,
// the plugin, nodes that are not ready, classes, claims, and leftovers of other drivers. It reads a
// [fleet.Snapshot] only. Each check is a function in the list checks, and each finding names what
// repairs it.
package doctor

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/paint"
)

// Severity is how bad a finding is.
type Severity string

const (
	// Error means that claims fail or wait because of it.
	Error Severity = "error"
	// Warning means that something will go wrong, or works worse than it could.
	Warning Severity = "warning"
	// Note is something to know.
	Note Severity = "note"
)

// Finding is one thing that the doctor found.
type Finding struct {
	Severity Severity `json:"severity"`
	// Code names the check.
	Code    string `json:"code"`
	Problem string `json:"problem"`
	// Repair is a command, or what to change.
	Repair string `json:"repair,omitempty"`
}

// Report is everything that the doctor found.
type Report struct {
	Version  string    `json:"kubernetes"`
	Findings []Finding `json:"findings"`
}

// checks are all checks, in the order of their findings.
var checks = []func(*fleet.Snapshot) []Finding{
	unread, versions, gates, plugin, notReady, tainted, pools, classes, otherDrivers, predecessor, claims, policies,
}

// Check makes all checks.
func Check(s *fleet.Snapshot) Report {
	r := Report{Version: s.Version, Findings: []Finding{}}
	for _, check := range checks {
		r.Findings = append(r.Findings, check(s)...)
	}
	order := []Severity{Error, Warning, Note}
	slices.SortStableFunc(r.Findings, func(a, b Finding) int {
		return slices.Index(order, a.Severity) - slices.Index(order, b.Severity)
	})
	return r
}

// Failed reports whether there is an error or a warning.
func (r Report) Failed() bool {
	return slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Severity != Note })
}

// Text writes the findings for people.
func (r Report) Text(w io.Writer, _ bool) {
	for _, f := range r.Findings {
		severity := fmt.Sprintf("%-8s", strings.ToUpper(string(f.Severity)))
		switch f.Severity {
		case Error:
			severity = paint.Bad(w, severity)
		case Warning:
			severity = paint.Careful(w, severity)
		}
		fmt.Fprintln(w, severity, f.Problem)
		if f.Repair != "" {
			fmt.Fprintf(w, "         Repair: %s\n", f.Repair)
		}
	}
	if !r.Failed() {
		fmt.Fprintln(w, paint.Good(w, "No errors and no warnings."))
	}
}

// some lists a few names and counts the others.
func some(names []string) string {
	const shown = 5
	slices.Sort(names)
	if len(names) > shown+1 {
		return fmt.Sprintf("%s and %d others", strings.Join(names[:shown], ", "), len(names)-shown)
	}
	return strings.Join(names, ", ")
}

func namesIn(set map[string]bool) string { return some(slices.Collect(maps.Keys(set))) }

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// helmSet is the command that changes values of the chart's release. The plugin's DaemonSet names
// the release.
func helmSet(s *fleet.Snapshot, values string) string {
	release, namespace := "RELEASE", "NAMESPACE"
	for _, d := range s.DaemonSets {
		if isPlugin(d.Labels) {
			release = cmp.Or(d.Annotations["meta.helm.sh/release-name"], release)
			namespace = d.Namespace
		}
	}
	return fmt.Sprintf("helm upgrade %s CHART --namespace %s --reset-then-reuse-values --set %s", release, namespace, values)
}
