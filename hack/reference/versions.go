package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// supportPage has the tables of what works on which version. TestVersion in test/e2e writes the
// files in findingsDir, one for each pair of versions on which it ran.
const (
	supportPage = "docs/support.md"
	findingsDir = "test/e2e/testdata/versions"
)

// findings are what TestVersion found, as it writes it.
type findings struct {
	APIs  []string          `json:"apis"`
	Gates []string          `json:"gates"`
	Works map[string]string `json:"works"`
}

// run is one run of TestVersion: its findings by the choice of feature gates.
type run struct{ Defaults, All findings }

// updateSupport returns the page old with its tables replaced by current ones.
func updateSupport(root string, old []byte) ([]byte, error) {
	runs := map[string]run{}
	for _, release := range cluster.Releases() {
		for _, containerd := range cluster.ContainerdVersions() {
			r, err := readRun(root, release.Version, containerd)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, err
			}
			runs[release.Version+" "+containerd] = r
		}
	}
	var err error
	for name, table := range map[string]string{"pairs": pairTable(runs), "features": featureTable(runs), "apis": apiTable(runs)} {
		if old, err = replace(old, name, table); err != nil {
			return nil, fmt.Errorf("%s: %w", supportPage, err)
		}
	}
	return old, nil
}

func readRun(root, kubernetes, containerd string) (r run, err error) {
	path := filepath.Join(root, findingsDir, "kubernetes-"+kubernetes+"_containerd-"+strings.TrimPrefix(containerd, "v")+".json")
	content, err := os.ReadFile(path)
	if err != nil {
		return r, err
	}
	var byGates map[string]findings
	if err := json.Unmarshal(content, &byGates); err != nil {
		return r, fmt.Errorf("%s: %w", path, err)
	}
	return run{Defaults: byGates["defaults"], All: byGates["all gates"]}, nil
}

// pairTable says on which pairs of versions TestVersion ran.
func pairTable(runs map[string]run) string {
	var b strings.Builder
	b.WriteString("| Kubernetes |")
	for _, containerd := range cluster.ContainerdVersions() {
		fmt.Fprintf(&b, " containerd %s |", containerd)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(cluster.ContainerdVersions())) + "\n")
	for _, release := range cluster.Releases() {
		fmt.Fprintf(&b, "| %s |", release.Version)
		for _, containerd := range cluster.ContainerdVersions() {
			result := "not run"
			if _, ok := runs[release.Version+" "+containerd]; ok {
				result = "passed"
			}
			fmt.Fprintf(&b, " %s |", result)
		}
		b.WriteString("\n")
	}
	return b.String()
}

// featureTable says for each release of Kubernetes which features of the driver work there.
func featureTable(runs map[string]run) string {
	features := map[string]bool{}
	for _, r := range runs {
		for feature := range r.All.Works {
			features[feature] = true
		}
	}
	var b strings.Builder
	header(&b, "feature")
	for _, feature := range slices.Sorted(maps.Keys(features)) {
		row(&b, feature, runs, func(r run) string {
			defaults, all := r.Defaults.Works[feature], r.All.Works[feature]
			switch {
			case defaults == all:
				return defaults
			case all == "yes":
				return "with the gates"
			}
			return defaults + ". With the gates: " + all
		})
	}
	return b.String()
}

// apiTable says for each release of Kubernetes which APIs it serves and which gates it enables.
func apiTable(runs map[string]run) string {
	gates := map[string]bool{}
	for _, r := range runs {
		for _, gate := range r.All.Gates {
			gates[gate] = true
		}
	}
	var b strings.Builder
	header(&b, "")
	row(&b, "versions of `resource.k8s.io`", runs, func(r run) string { return strings.Join(r.Defaults.APIs, ", ") })
	for _, gate := range slices.Sorted(maps.Keys(gates)) {
		row(&b, "`"+gate+"`", runs, func(r run) string {
			switch {
			case slices.Contains(r.Defaults.Gates, gate):
				return "on"
			case slices.Contains(r.All.Gates, gate):
				return "off"
			}
			return "–"
		})
	}
	return b.String()
}

func header(b *strings.Builder, first string) {
	fmt.Fprintf(b, "| %s |", first)
	for _, release := range cluster.Releases() {
		fmt.Fprintf(b, " %s |", release.Version)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(cluster.Releases())) + "\n")
}

// row writes a row with a cell for each release. The cell is about the newest containerd with which
// the release ran.
func row(b *strings.Builder, first string, runs map[string]run, text func(run) string) {
	fmt.Fprintf(b, "| %s |", first)
	for _, release := range cluster.Releases() {
		content := "not run"
		for _, containerd := range cluster.ContainerdVersions() {
			if r, ok := runs[release.Version+" "+containerd]; ok {
				content = text(r)
			}
		}
		fmt.Fprintf(b, " %s |", content)
	}
	b.WriteString("\n")
}
