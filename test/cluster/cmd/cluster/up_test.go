package main

import (
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

func TestMountsOnTheCommandLine(t *testing.T) {
	for text, want := range map[string]cluster.Mount{
		"/a":       {Source: "/a"},
		"/a:/b":    {Source: "/a", Target: "/b"},
		"/a:rw":    {Source: "/a", Writable: true},
		"/a:/b:rw": {Source: "/a", Target: "/b", Writable: true},
		"/a:/b:ro": {Source: "/a", Target: "/b"},
	} {
		if got, err := parseMount(text); err != nil || got != want {
			t.Errorf("%s is %+v, %v; want %+v", text, got, err, want)
		}
	}
	for _, bad := range []string{"/a:b", "/a:/b:/c"} {
		if _, err := parseMount(bad); err == nil || !strings.Contains(err.Error(), bad) {
			t.Errorf("%s: error is %v", bad, err)
		}
	}
}

func TestNodesWithoutCDIMustExist(t *testing.T) {
	options, err := upFlags{nodes: 2, noCDI: []string{"node2"}, hook: "/bin/hook a b"}.options("x")
	if err != nil {
		t.Fatal(err)
	}
	if options.Nodes[0].DisableCDI || !options.Nodes[1].DisableCDI || len(options.Nodes[0].BootHook) != 3 {
		t.Errorf("nodes are %+v", options.Nodes)
	}
	if _, err := (upFlags{nodes: 1, noCDI: []string{"node2"}}).options("x"); err == nil || !strings.Contains(err.Error(), "node2") {
		t.Errorf("error is %v", err)
	}
}

func TestFeatureGatesOnTheCommandLine(t *testing.T) {
	options, err := upFlags{gates: map[string]string{"A": "true", "B": "false"}}.options("x")
	if err != nil || !options.FeatureGates["A"] || options.FeatureGates["B"] {
		t.Errorf("gates are %v, %v", options.FeatureGates, err)
	}
	if _, err := (upFlags{gates: map[string]string{"A": "maybe"}}).options("x"); err == nil || !strings.Contains(err.Error(), "A=maybe") {
		t.Errorf("error is %v", err)
	}
}
