package doctor_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/doctor"
	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fleettest"
)

// healthy returns a cluster in which the doctor finds no errors and no warnings.
func healthy() (*fleettest.Cluster, *fleet.Snapshot) {
	c := fleettest.New()
	c.Node("n1", fleettest.H100, 2, "dynamic", "[{kind: fractions}]")
	s := &fleet.Snapshot{
		Version: "v1.37.0", Gates: map[string]bool{"DRAPartitionableDevices": true}, Nodes: c.Nodes, Slices: c.Slices, Classes: c.Classes,
		Configs:  map[string]string{"gpu/config": "mps: true\n"},
		Settings: map[string]string{"gpu/config": "mig: {policy: dynamic}\nshares: [{kind: fractions}]\n"},
		DaemonSets: []*appsv1.DaemonSet{{
			ObjectMeta: metav1.ObjectMeta{Namespace: "gpu", Name: "gpu-kubelet-plugin", Labels: map[string]string{
				"app.kubernetes.io/name": "gpu-dra-driver", "app.kubernetes.io/component": "kubelet-plugin",
			}},
			Status: appsv1.DaemonSetStatus{DesiredNumberScheduled: 1, NumberReady: 1, UpdatedNumberScheduled: 1},
		}},
	}
	return c, s
}

func TestHealthyClusterHasOnlyNotes(t *testing.T) {
	_, s := healthy()
	r := doctor.Check(s)
	if r.Failed() {
		t.Errorf("%+v", r.Findings)
	}
	var b strings.Builder
	r.Text(&b, false)
	for _, want := range []string{"mig.policy=dynamic shares=fractions mps=true", "No errors and no warnings."} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("lacks %q:\n%s", want, b.String())
		}
	}
}

// Each reason why a node is not ready has a repair of its own.
func TestReasonsOfNodesHaveRepairs(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "..", "..", "docs", "operations.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "| code | problem | tainted |")
	table, _, _ = strings.Cut(table, "\n\n")
	codes := regexp.MustCompile("(?m)^\\| `([a-z-]+)` \\|").FindAllStringSubmatch(table, -1)
	if len(codes) < 9 {
		t.Fatalf("the table of reasons has only %v", codes)
	}
	for _, code := range codes {
		c, s := healthy()
		c.Taint("n1", "", "gpu.nvidia.com/not-ready", code[1], resourceapi.DeviceTaintEffectNoSchedule)
		for _, f := range doctor.Check(s).Findings {
			if f.Code == "not-ready" && strings.HasSuffix(f.Repair, "docs/operations.md") {
				t.Errorf("%s: %s", code[1], f.Repair)
			}
		}
	}
}

func TestRepairNamesTheRelease(t *testing.T) {
	_, s := healthy()
	s.DaemonSets[0].Annotations = map[string]string{"meta.helm.sh/release-name": "gpus"}
	s.Configs["gpu/config"] = "devicePluginConflict: warn"
	want := "helm upgrade gpus CHART --namespace gpu --reset-then-reuse-values --set devicePluginConflict=refuse"
	if r := doctor.Check(s); !slices.ContainsFunc(r.Findings, func(f doctor.Finding) bool { return strings.HasSuffix(f.Repair, want) }) {
		t.Errorf("%+v", r.Findings)
	}
}

func TestFindings(t *testing.T) {
	other := func(image string) *appsv1.DaemonSet {
		d := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: "d"}}
		d.Spec.Template.Spec.Containers = []corev1.Container{{Image: image}}
		return d
	}
	for _, c := range []struct {
		name     string
		change   func(*fleettest.Cluster, *fleet.Snapshot)
		severity doctor.Severity
		code     string
		want     string
	}{
		{"slow scheduler", func(_ *fleettest.Cluster, s *fleet.Snapshot) {
			s.Version = "v1.36.3"
		}, doctor.Note, "slow-scheduler", "1 nodes publish counters"},
		{"slow scheduler, many nodes", func(c *fleettest.Cluster, s *fleet.Snapshot) {
			s.Version = "v1.36.3"
			for i := range 50 {
				c.Node(fmt.Sprintf("m%d", i), fleettest.H100, 1, "dynamic", "")
			}
			s.Slices, s.Nodes = c.Slices, c.Nodes
		}, doctor.Warning, "slow-scheduler", "51 nodes publish counters"},
		{"shares with an old scheduler", func(_ *fleettest.Cluster, s *fleet.Snapshot) {
			s.Version = "v1.36.1"
		}, doctor.Error, "shares-version", "while shares of it are in use"},
		{"gate off", func(_ *fleettest.Cluster, s *fleet.Snapshot) {
			s.Gates["DRAPartitionableDevices"] = false
		}, doctor.Error, "gate", "Devices have counters"},
		{"NVIDIA's DRA driver publishes", func(_ *fleettest.Cluster, s *fleet.Snapshot) {
			s.Slices[len(s.Slices)-1].Spec.Devices[0].Name = "gpu-0"
		}, doctor.Warning, "predecessor", "publishes the devices of n1"},
		{"no plugin", func(_ *fleettest.Cluster, s *fleet.Snapshot) { s.DaemonSets = nil }, doctor.Error, "no-plugin", "not installed"},
		{"plugin not ready", func(_ *fleettest.Cluster, s *fleet.Snapshot) {
			s.DaemonSets[0].Status.NumberReady = 0
		}, doctor.Error, "plugin-not-ready", "ready on 0 of 1 nodes"},
		{"plugin outdated", func(_ *fleettest.Cluster, s *fleet.Snapshot) {
			s.DaemonSets[0].Status.UpdatedNumberScheduled = 0
		}, doctor.Warning, "plugin-outdated", "updated on 0 of 1"},
		{"node not ready", func(c *fleettest.Cluster, _ *fleet.Snapshot) {
			c.Taint("n1", "", "gpu.nvidia.com/not-ready", "cdi-disabled", resourceapi.DeviceTaintEffectNoSchedule)
		}, doctor.Error, "not-ready", "Nodes prepare no claims (cdi-disabled): n1"},
		{"tainted GPU", func(c *fleettest.Cluster, _ *fleet.Snapshot) {
			c.Taint("n1", fleettest.Device(1), "gpu.nvidia.com/xid", "79", resourceapi.DeviceTaintEffectNoSchedule)
		}, doctor.Warning, "taint", "gpu.nvidia.com/xid=79:NoSchedule: n1/gpu-0000-11-00-0"},
		{"node gone", func(_ *fleettest.Cluster, s *fleet.Snapshot) { s.Nodes = nil }, doctor.Warning, "stale-slices", "Node n1 is gone"},
		{"incomplete", func(_ *fleettest.Cluster, s *fleet.Snapshot) { s.Slices = s.Slices[1:] }, doctor.Warning, "incomplete", "n1"},
		{"class missing", func(_ *fleettest.Cluster, s *fleet.Snapshot) {
			s.Classes = s.Classes[1:]
		}, doctor.Warning, "class", "DeviceClass gpu.nvidia.com does not exist"},
		{"class with a failing selector", func(c *fleettest.Cluster, s *fleet.Snapshot) {
			c.Class("bad", "device.attributes['gpu.nvidia.com'].nothing == 1")
			s.Classes = c.Classes
		}, doctor.Error, "class-selector", "DeviceClass bad fails"},
		{"class that selects nothing", func(c *fleettest.Cluster, s *fleet.Snapshot) {
			c.Class("none", fleettest.IsType("vfio"))
			s.Classes = c.Classes
		}, doctor.Note, "class-empty", "DeviceClass none"},
		{"one extended resource twice", func(c *fleettest.Cluster, s *fleet.Snapshot) {
			c.Class("again", fleettest.IsType("gpu")).Spec.ExtendedResourceName = ptr.To("nvidia.com/gpu")
			s.Classes = c.Classes
		}, doctor.Warning, "extended-resource", "several classes: again, gpu.nvidia.com"},
		{"device plugin", func(_ *fleettest.Cluster, s *fleet.Snapshot) {
			s.DaemonSets = append(s.DaemonSets, other("nvcr.io/nvidia/k8s-device-plugin:v0.17"))
		}, doctor.Note, "other-driver", "DaemonSet other/d runs NVIDIA's device plugin"},
		{"device plugin on the same node", func(c *fleettest.Cluster, _ *fleet.Snapshot) {
			c.Nodes[0].Status.Capacity = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("2")}
		}, doctor.Error, "two-drivers", "the same GPUs on n1"},
		{"device gone", func(c *fleettest.Cluster, s *fleet.Snapshot) {
			c.Held("a", "n1", fleettest.Device(7))
			s.Claims = c.Claims
		}, doctor.Warning, "device-gone", "team-a/a"},
		{"idle claim", func(c *fleettest.Cluster, s *fleet.Snapshot) {
			c.Held("a", "n1", fleettest.Device(0)).Status.ReservedFor = nil
			s.Claims = c.Claims
		}, doctor.Note, "idle-claim", "team-a/a"},
		{"unreadable config", func(_ *fleettest.Cluster, s *fleet.Snapshot) {
			s.Configs["gpu/config"] = "a: ["
		}, doctor.Warning, "config", "ConfigMap gpu/config"},
		{"conflict allowed", func(_ *fleettest.Cluster, s *fleet.Snapshot) {
			s.Configs["gpu/config"] = "devicePluginConflict: warn"
		}, doctor.Warning, "device-plugin-conflict", "may give one GPU to two Pods"},
		{"no right to read DaemonSets", func(_ *fleettest.Cluster, s *fleet.Snapshot) {
			s.DaemonSets, s.Missing = nil, []string{"DaemonSets: forbidden"}
		}, doctor.Note, "not-read", "DaemonSets: forbidden"},
		{"no right to read classes", func(_ *fleettest.Cluster, s *fleet.Snapshot) {
			s.Classes, s.Missing = nil, []string{"DeviceClasses: forbidden"}
		}, doctor.Note, "not-read", "DeviceClasses: forbidden"},
		{"not read", func(_ *fleettest.Cluster, s *fleet.Snapshot) {
			s.Missing = []string{"Pods: forbidden"}
		}, doctor.Note, "not-read", "Pods: forbidden"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cluster, s := healthy()
			c.change(cluster, s)
			r := doctor.Check(s)
			for _, f := range r.Findings {
				if f.Repair == "" && f.Severity != doctor.Note {
					t.Errorf("no repair: %+v", f)
				}
			}
			if !slices.ContainsFunc(r.Findings, func(f doctor.Finding) bool {
				return f.Severity == c.severity && f.Code == c.code && strings.Contains(f.Problem, c.want)
			}) {
				t.Errorf("want %s %s %q in %+v", c.severity, c.code, c.want, r.Findings)
			}
			if r.Failed() != (c.severity != doctor.Note) {
				t.Errorf("failed is %v: %+v", r.Failed(), r.Findings)
			}
		})
	}
}
