package cluster

import (
	"strings"
	"testing"
)

func TestOptionDefaults(t *testing.T) {
	completed, err := Options{
		Nodes:        []NodeOptions{{}, {Name: "gpu"}, {}},
		FeatureGates: map[string]bool{"DRADeviceTaintRules": false, "New": true},
	}.complete()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, node := range completed.Nodes {
		names = append(names, node.Name)
	}
	if got := strings.Join(names, " "); completed.Name != "default" || got != "node1 gpu node3" {
		t.Errorf("cluster %q with nodes %s", completed.Name, got)
	}
	if gates := completed.FeatureGates; gates["DRADeviceTaintRules"] || !gates["New"] || !gates["DRAListTypeAttributes"] {
		t.Errorf("gates are %v: the caller's must win over the defaults, and the other defaults stay", gates)
	}
	release, err := Options{Kubernetes: "1.37", ReleaseDefaults: true, FeatureGates: map[string]bool{"New": true}}.complete()
	if gates := release.FeatureGates; err != nil || len(gates) != 1 || !gates["New"] {
		t.Errorf("gates of a release as users get it are %v (%v), want only the caller's", gates, err)
	}
	without, err := Options{FeatureGates: map[string]bool{"DRAPartitionableDevices": false}}.complete()
	if on, set := without.FeatureGates["DRADeviceCompatibilityGroups"]; err != nil || on || !set {
		t.Errorf("a gate whose needed gate is off is %v (set: %v, %v), want off", on, set, err)
	}
	if empty, err := (Options{}).complete(); err != nil || len(empty.Nodes) != 1 {
		t.Errorf("the zero value makes %d nodes (%v), want one", len(empty.Nodes), err)
	}
	if alone, err := (Options{ControlPlaneOnly: true}).complete(); err != nil || len(alone.Nodes) != 0 {
		t.Errorf("a control plane alone has %d nodes (%v), want none", len(alone.Nodes), err)
	}
}

func TestInvalidOptionsAreRefused(t *testing.T) {
	for _, test := range []struct {
		name, says string
		options    Options
	}{
		{"a long cluster name", `"abcdefghijklm"`, Options{Name: "abcdefghijklm"}},
		{"a path as cluster name", `"../x"`, Options{Name: "../x"}},
		{"a node name in capitals", `"Node"`, Options{Nodes: []NodeOptions{{Name: "Node"}}}},
		{"the same node twice", `"a"`, Options{Nodes: []NodeOptions{{Name: "a"}, {Name: "a"}}}},
		{"a name that the next default has", `"node2"`, Options{Nodes: []NodeOptions{{Name: "node2"}, {}}}},
		{"the control plane's name", `"control-plane"`, Options{Nodes: []NodeOptions{{Name: "control-plane"}}}},
		{"a relative hook", `"hook.sh"`, Options{Nodes: []NodeOptions{{BootHook: []string{"hook.sh"}}}}},
		{"a relative mount", `"data"`, Options{Nodes: []NodeOptions{{Mounts: []Mount{{Source: "data"}}}}}},
		{"nodes with a control plane alone", "control plane only", Options{ControlPlaneOnly: true, Nodes: make([]NodeOptions, 1)}},
		{"an unknown Kubernetes", "v1.37.2", Options{Kubernetes: "1.12"}},
		{"a path as version", `"../1.37"`, Options{Kubernetes: "../1.37"}},
		{"a containerd pre-release", "v1.7.35", Options{Containerd: "v1.7.0-rc.1"}},
		{"too many nodes", "101 nodes", Options{Nodes: make([]NodeOptions, 101)}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if _, err := test.options.complete(); err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("error is %v, want one that says %s", err, test.says)
			}
		})
	}
}
