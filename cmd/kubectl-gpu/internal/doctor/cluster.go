package doctor

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
)

// manyNodes is the number of nodes with counters from which the slow scheduler is felt.
// docs/performance.md has the figures.
const manyNodes = 50

func unread(s *fleet.Snapshot) []Finding {
	var all []Finding
	for _, what := range s.Missing {
		all = append(all, Finding{Note, "not-read", "Not read: " + what, "let the user read them: docs/kubectl-gpu.md has a ClusterRole"})
	}
	return all
}

// ours returns the driver's slices.
func ours(s *fleet.Snapshot) []*resourceapi.ResourceSlice {
	var all []*resourceapi.ResourceSlice
	for _, slice := range s.Slices {
		if slice.Spec.Driver == device.DriverName {
			all = append(all, slice)
		}
	}
	return all
}

// versions checks the versions of Kubernetes with known defects (docs/install.md).
func versions(s *fleet.Snapshot) []Finding {
	v, err := version.ParseGeneric(s.Version)
	if err != nil {
		return []Finding{{Note, "version", fmt.Sprintf("The version of Kubernetes (%q) is unknown", s.Version), ""}}
	}
	counted, shared := map[string]bool{}, false
	for _, slice := range ours(s) {
		if len(slice.Spec.SharedCounters) > 0 {
			counted[slice.Spec.Pool.Name] = true
		}
		shared = shared || slices.ContainsFunc(slice.Spec.Devices, func(d resourceapi.Device) bool {
			return ptr.Deref(d.AllowMultipleAllocations, false)
		})
	}
	var all []Finding
	if n := len(counted); n > 0 && v.LessThan(version.MustParseGeneric("1.37.0")) {
		f := Finding{Note, "slow-scheduler", fmt.Sprintf(
			"%d nodes publish counters. Before 1.37 the scheduler's time grows with the square of such nodes (kubernetes PR 138917)", n),
			"upgrade to Kubernetes 1.37. If no claim needs partitions: " + helmSet(s, "mig.policy=static")}
		if n >= manyNodes {
			f.Severity = Warning
		}
		all = append(all, f)
	}
	if shared && v.LessThan(version.MustParseGeneric("1.36.2")) {
		all = append(all, Finding{Error, "shares-version",
			"Kubernetes " + s.Version + " allocates a whole GPU while shares of it are in use",
			"upgrade to Kubernetes 1.36.2 or later. If no claim needs shares: " + helmSet(s, "shares=null")})
	}
	return all
}

// gates checks that the feature gates that published devices need are on.
func gates(s *fleet.Snapshot) []Finding {
	uses := map[string]string{}
	for _, slice := range ours(s) {
		if len(slice.Spec.SharedCounters) > 0 {
			uses[fleet.GatePartitions] = "counters"
		}
		for _, d := range slice.Spec.Devices {
			if ptr.Deref(d.AllowMultipleAllocations, false) {
				uses[fleet.GateConsumableCapacity] = "shares"
			}
		}
	}
	var all []Finding
	for _, gate := range []string{fleet.GatePartitions, fleet.GateConsumableCapacity} {
		if what, used := uses[gate]; used && !s.On(gate) {
			all = append(all, Finding{Error, "gate", fmt.Sprintf("Devices have %s, but the feature gate %s is off", what, gate),
				fmt.Sprintf("set --feature-gates=%s=true on kube-apiserver, kube-scheduler, kube-controller-manager and kubelets", gate)})
		}
	}
	if !s.On(fleet.GateTaints) {
		all = append(all, Finding{Note, "gate", "Without the feature gate DRADeviceTaints unhealthy GPUs are withdrawn instead of tainted", ""})
	}
	if len(s.Gates) == 0 {
		all = append(all, Finding{Note, "gate", "The API server's feature gates could not be read. The defaults of its version are assumed",
			"let the user read the path /metrics: docs/kubectl-gpu.md has a ClusterRole"})
	}
	return all
}

// component is the label by which the chart marks the plugin.
const component = "app.kubernetes.io/component"

// isPlugin reports whether the labels are those of the chart's plugin.
func isPlugin(labels map[string]string) bool {
	return labels["app.kubernetes.io/name"] == "gpu-dra-driver" && labels[component] == "kubelet-plugin"
}

// plugin checks the driver's DaemonSets and their Pods.
func plugin(s *fleet.Snapshot) []Finding {
	var all []Finding
	found := false
	for _, d := range s.DaemonSets {
		if d.Labels["app.kubernetes.io/name"] != "gpu-dra-driver" {
			continue
		}
		found = found || isPlugin(d.Labels)
		status := d.Status
		if ready, want := status.NumberReady, status.DesiredNumberScheduled; ready < want {
			all = append(all, Finding{Error, "plugin-not-ready",
				fmt.Sprintf("DaemonSet %s is ready on %d of %d nodes", fleet.Key(d), ready, want),
				fmt.Sprintf("kubectl -n %s describe pods -l %s=%s shows the reason of each Pod", d.Namespace, component, d.Labels[component])})
		}
		if updated, want := status.UpdatedNumberScheduled, status.DesiredNumberScheduled; updated < want && isPlugin(d.Labels) {
			all = append(all, Finding{Warning, "plugin-outdated",
				fmt.Sprintf("DaemonSet %s is updated on %d of %d nodes", fleet.Key(d), updated, want),
				fmt.Sprintf("kubectl -n %s rollout status daemonset/%s", d.Namespace, d.Name)})
		}
	}
	if !found && !s.Lacks(fleet.DaemonSets) {
		all = append(all, Finding{Error, "no-plugin", "The driver's DaemonSet is not installed",
			"helm install gpu-dra-driver CHART --namespace gpu-dra-driver: docs/install.md"})
	}
	published := s.SlicesOf()
	var without []string
	for _, p := range s.Pods {
		if isPlugin(p.Labels) && p.Spec.NodeName != "" && len(published[p.Spec.NodeName]) == 0 {
			without = append(without, p.Spec.NodeName)
		}
	}
	if len(without) > 0 {
		all = append(all, Finding{Note, "no-gpus",
			fmt.Sprintf("The plugin runs on %s, but publishes nothing there", some(slices.Compact(without))),
			"nothing, if these nodes have no NVIDIA GPU. Otherwise kubectl describe node " + without[0] + " shows the plugin's Events"})
	}
	return all
}

// repairs says what to do about each reason of the taint not-ready. docs/operations.md lists them.
var repairs = map[string]string{
	"cdi-disabled":         "enable CDI in the container runtime, and restart it: docs/install.md",
	"cdi-directory":        "let the container runtime read the chart's cdiRoot",
	"hook-missing":         "restart the plugin's Pod, which installs the hook",
	"hardware-released":    "kubectl annotate node NODE gpu.nvidia.com/release-driver- when the driver upgrade is done: docs/health.md",
	"device-plugin":        "keep NVIDIA's device plugin off these nodes with a nodeSelector",
	"base-spec-unwritable": "make cdiRoot writable for the plugin: is the disk full or read-only?",
	"driver-missing":       "load the NVIDIA driver: the plugin's Event names the missing part",
	"scan-failed":          "run nvidia-smi on the node: the driver does not answer",
	"not-scanned":          "run nvidia-smi on the node: the driver does not answer",
	"no-gpu":               "run nvidia-smi on the node: the driver lists no GPU",
}

// notReady checks the taint by which a node says that it prepares no claims.
func notReady(s *fleet.Snapshot) []Finding {
	nodes := map[string]map[string]bool{}
	for _, slice := range ours(s) {
		for _, d := range slice.Spec.Devices {
			for _, t := range d.Taints {
				if t.Key == device.DriverName+"/not-ready" {
					if nodes[t.Value] == nil {
						nodes[t.Value] = map[string]bool{}
					}
					nodes[t.Value][slice.Spec.Pool.Name] = true
				}
			}
		}
	}
	var all []Finding
	for _, code := range sortedKeys(nodes) {
		repair, known := repairs[code]
		if !known {
			repair = "kubectl describe node NODE shows the plugin's Events: docs/operations.md"
		}
		repair = strings.ReplaceAll(repair, "NODE", sortedKeys(nodes[code])[0])
		all = append(all, Finding{Error, "not-ready", fmt.Sprintf("Nodes prepare no claims (%s): %s", code, namesIn(nodes[code])), repair})
	}
	return all
}

// tainted counts GPUs with other taints.
func tainted(s *fleet.Snapshot) []Finding {
	gpus := map[string]map[string]bool{}
	severity := map[string]Severity{}
	for _, slice := range ours(s) {
		for _, d := range slice.Spec.Devices {
			name, ok := device.ParseName(d.Name)
			if !ok {
				continue
			}
			for _, t := range d.Taints {
				if t.Key == device.DriverName+"/not-ready" {
					continue
				}
				text := fleet.TaintText(t)
				if gpus[text] == nil {
					gpus[text] = map[string]bool{}
				}
				gpus[text][slice.Spec.Pool.Name+"/"+name.GPU] = true
				severity[text] = Warning
				if t.Effect == resourceapi.DeviceTaintEffectNone {
					severity[text] = Note
				}
			}
		}
	}
	var all []Finding
	for _, text := range sortedKeys(gpus) {
		all = append(all, Finding{severity[text], "taint", fmt.Sprintf("GPUs have the taint %s: %s", text, namesIn(gpus[text])),
			"docs/health.md says what each taint means and how it ends"})
	}
	return all
}

// pools checks for incomplete pools, and for slices of nodes that are gone.
func pools(s *fleet.Snapshot) []Finding {
	var all []Finding
	incomplete := map[string]bool{}
	for name, published := range s.SlicesOf() {
		if newest := fleet.Newest(published); int64(len(newest)) < newest[0].Spec.Pool.ResourceSliceCount {
			incomplete[name] = true
		}
		if s.Node(name) == nil {
			all = append(all, Finding{Warning, "stale-slices", fmt.Sprintf("Node %s is gone, but its ResourceSlices are still there", name),
				fmt.Sprintf("kubectl delete resourceslices --field-selector spec.nodeName=%s", name)})
		}
	}
	if len(incomplete) > 0 {
		all = append(all, Finding{Warning, "incomplete", "The slices of these nodes are incomplete: " + namesIn(incomplete),
			"wait a minute and run this again. If it stays: kubectl gpu gather --logs 1000 has the plugin's logs"})
	}
	slices.SortFunc(all, func(a, b Finding) int { return strings.Compare(a.Problem, b.Problem) })
	return all
}

// policies shows the settings in force that decide what is published.
func policies(s *fleet.Snapshot) []Finding {
	var all []Finding
	for _, name := range sortedKeys(s.Configs) {
		var config struct {
			MPS      bool   `json:"mps"`
			Conflict string `json:"devicePluginConflict"`
		}
		set, err := settings.Parse([]byte(s.Settings[name]))
		if err = errors.Join(err, yaml.Unmarshal([]byte(s.Configs[name]), &config)); err != nil {
			all = append(all, Finding{Warning, "config", fmt.Sprintf("ConfigMap %s cannot be read: %v", name, err),
				"helm upgrade with the chart of this program's version: docs/operations.md"})
			continue
		}
		kinds := map[string]bool{}
		for _, rule := range set.Shares {
			kinds[string(rule.Kind)] = true
		}
		text := fmt.Sprintf("In force by ConfigMap %s: mig.policy=%s shares=%s mps=%t",
			name, orNone(string(set.MIG.Policy)), orNone(strings.Join(sortedKeys(kinds), ",")), config.MPS)
		if names := sortedKeys(set.Configurations); len(names) > 0 {
			text += ", and on some nodes configurations " + strings.Join(names, ", ")
		}
		all = append(all, Finding{Note, "policy", text, ""})
		if config.Conflict == "warn" {
			all = append(all, Finding{Warning, "device-plugin-conflict",
				"devicePluginConflict is warn: this driver and the device plugin may give one GPU to two Pods",
				"when the migration is over: " + helmSet(s, "devicePluginConflict=refuse")})
		}
	}
	return all
}

func orNone(s string) string {
	if s == "" {
		return "(default)"
	}
	return s
}
