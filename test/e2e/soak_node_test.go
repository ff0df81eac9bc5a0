package e2e

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// bareNode reads those parts of the node's state that the soak test must leave unchanged. The
// result has one function for each part. It reads that part again and returns what differs from the
// first time, or the empty string.
func (w *world) bareNode(t *testing.T) map[string]func() string {
	t.Helper()
	shell := func(script string) func() string {
		return func() string {
			t.Helper()
			return w.on(t, h100, "/bin/sh", "-c", script)
		}
	}
	// notOurs leaves out the tools of this check, and shims: containerd sometimes leaks a shim and a
	// container's mounted root file system if the kubelet is killed during a start (seen with 2.4.2).
	const notOurs = `^containerd-shim$|^sh$|^cat$|^grep$|^sort$`
	looks := map[string]func() string{
		"the hardware":   func() string { t.Helper(); return w.nvmlsim(t, h100, "show", "-o", "yaml") },
		"what it offers": func() string { t.Helper(); return w.offered(t) },
		"the processes":  shell(`for p in /proc/[0-9]*; do cat $p/comm 2>/dev/null; done | grep -v -E '` + notOurs + `' | sort`),
		"the mounts": shell(
			`cut -d' ' -f5 /proc/1/mountinfo | grep -v -E '^/run/containerd/io.containerd.runtime.v2.task/k8s.io/[0-9a-f]+/rootfs$' | sed -E ` +
				`'s/[0-9a-f]{64}/ID/g' | sort`,
		),
		"the Pods' control groups": shell(`find /sys/fs/cgroup -type d -path '*/pod*' | sed -E 's/[0-9a-f]{64}/ID/g' | sort`),
		// Links to the device nodes of partitions stay until the next reboot (docs/operations.md).
		"the device nodes": shell(
			`find /dev -path /dev/pts -prune -o -path /dev/shm -prune -o -path '/dev/char/*' -lname '*/nvidia-caps/*' -o -print | sort`,
		),
		"the kubelet's Pods":  shell(`ls /var/lib/kubelet/pods`),
		"what is not mounted": shell(`find /run/netns /dev/shm -mindepth 1 2>/dev/null | sed -E 's/cni-[0-9a-f-]+/cni/' | sort`),
	}
	before := map[string]func() string{}
	for name, look := range looks {
		was := look()
		before[name] = func() string {
			if now := look(); now != was {
				return difference(was, now)
			}
			return ""
		}
	}
	return before
}

// isAsBefore waits until no function of bareNode returns a difference.
func (w *world) isAsBefore(t *testing.T, before map[string]func() string) {
	t.Helper()
	eventually(t, 45*time.Second, "the node is as before", func() (bool, string) {
		var others strings.Builder
		for _, name := range slices.Sorted(maps.Keys(before)) {
			if other := before[name](); other != "" {
				fmt.Fprintf(&others, "%s:\n%s", name, other)
			}
		}
		return others.Len() == 0, others.String()
	})
}

// difference returns the lines that the two texts do not have equally often, each with the change
// of its count.
func difference(was, now string) string {
	var out strings.Builder
	count := map[string]int{}
	for line := range strings.Lines(was) {
		count[line]--
	}
	for line := range strings.Lines(now) {
		count[line]++
	}
	for _, line := range slices.Sorted(maps.Keys(count)) {
		if n := count[line]; n != 0 {
			fmt.Fprintf(&out, "%+d %s", n, line)
		}
	}
	return cmp.Or(out.String(), "another order of the same lines")
}

// offered returns the devices and counter sets of the node's slices as text. It omits the fields
// that change with each publication.
func (w *world) offered(t *testing.T) string {
	t.Helper()
	devices, counters := map[string]resourceapi.Device{}, map[string]resourceapi.CounterSet{}
	for _, slice := range w.slices(t, h100) {
		for _, d := range slice.Spec.Devices {
			devices[d.Name] = d
		}
		for _, c := range slice.Spec.SharedCounters {
			counters[c.Name] = c
		}
	}
	text, err := yaml.Marshal(map[string]any{"devices": devices, "counters": counters})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func (w *world) supervisorProcess(t *testing.T) string {
	t.Helper()
	return strings.TrimSpace(w.on(t, h100, "pgrep", "-o", "-f", "^/usr/bin/gpu-mps supervise"))
}

// counterForm matches the lines of the plugin's metrics that the soak test adds up.
var counterForm = regexp.MustCompile(
	`(?m)^gpu_dra_((?:repairs_total|request_errors_total)\{.*\}|request_duration_seconds_count\{.*\}) (\S+)$`,
)

// count adds the plugin's current metrics to s.counted, because a kill resets them. What the plugin
// counts between this call and the kill is lost.
func (s *soak) count() {
	s.t.Helper()
	pod, err := s.Client.CoreV1().Pods(s.plugin.Namespace).Get(s.t.Context(), s.plugin.Name, metav1.GetOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	// The request may fail, because a plugin that has just started does not serve yet. It has counted
	// nothing then.
	metrics, _ := s.node(s.t, h100).Exec(s.t.Context(), "curl", "--silent", "--max-time", "5", "http://"+pod.Status.PodIP+":8080/metrics")
	for _, m := range counterForm.FindAllStringSubmatch(metrics, -1) {
		n, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			s.t.Fatal(err)
		}
		s.counted[m[1]] += n
	}
}

// progress returns one line on the Pods that have ended and the kills so far.
func (s *soak) progress() string {
	var kinds []string
	all := 0
	for _, kind := range soakKinds {
		all += s.done[kind.name]
		kinds = append(kinds, fmt.Sprintf("%d %s", s.done[kind.name], kind.name))
	}
	return fmt.Sprintf(
		"%s: %d Pods (%s), plugin killed %d times, kubelet %d times",
		time.Since(s.began).Round(time.Second),
		all,
		strings.Join(kinds, ", "),
		s.kills,
		s.kubeletKills,
	)
}

// report logs how long the Pods took to start, the sums of the plugin's metrics over all kills, and
// how often Prepare failed.
func (s *soak) report() {
	s.t.Helper()
	s.count()
	var out strings.Builder
	table := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "kind\tPods\tstart, median\tstart, longest")
	for _, kind := range soakKinds {
		starts := slices.Sorted(slices.Values(s.starts[kind.name]))
		fmt.Fprintf(table, "%s\t%d\t%s\t%s\n", kind.name, s.done[kind.name], starts[len(starts)/2], starts[len(starts)-1])
	}
	_ = table.Flush()
	for _, series := range slices.Sorted(maps.Keys(s.counted)) {
		fmt.Fprintf(&out, "%s: %.0f\n", series, s.counted[series])
	}
	s.t.Logf("%s; the kubelet reported %d failed attempts to prepare\n%s", s.progress(), s.failedPrepares(), out.String())
}

// failedPrepares returns how often Prepare has failed, by the kubelet's Events.
func (s *soak) failedPrepares() (n int) {
	s.t.Helper()
	list, err := s.Client.CoreV1().
		Events(s.namespace).
		List(s.t.Context(), metav1.ListOptions{FieldSelector: "reason=FailedPrepareDynamicResources"})
	if err != nil {
		s.t.Fatal(err)
	}
	for _, e := range list.Items {
		n += int(max(e.Count, 1))
	}
	return n
}
