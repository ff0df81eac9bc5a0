package cluster

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/toolchain"
)

// Release is a version of Kubernetes on which the driver is tested.
type Release struct {
	// Version is the exact version, like v1.37.2.
	Version string
	// gates are the feature gates for dynamic resource allocation that the release leaves off by
	// default (pkg/features/kube_features.go), and those that they need.
	gates []string
	// apis are the versions of APIs that the release does not serve by default. The API server gets
	// ready only if they include those that the gates need.
	apis []string
}

// Releases returns the versions of Kubernetes on which the driver is tested, oldest first. The one
// that tools/go.mod pins is among them.
func Releases() []Release { return slices.Clone(releases) }

// ContainerdVersions returns the versions of containerd on which the driver is tested, oldest
// first.
func ContainerdVersions() []string { return slices.Clone(containerds) }

var releases = []Release{
	{
		Version: "v1.34.4",
		gates: []string{
			"DRAConsumableCapacity", "DRADeviceBindingConditions", "DRADeviceTaints", "DRAExtendedResource", "DRAPartitionableDevices",
			"ResourceHealthStatus",
		},
		apis: []string{"resource.k8s.io/v1beta1", "resource.k8s.io/v1beta2", "resource.k8s.io/v1alpha3"},
	},
	{
		Version: "v1.35.4",
		gates: []string{
			"DRAConsumableCapacity", "DRADeviceBindingConditions", "DRADeviceTaintRules", "DRADeviceTaints", "DRAExtendedResource",
			"DRAPartitionableDevices", "ResourceHealthStatus",
		},
		apis: []string{"resource.k8s.io/v1beta1", "resource.k8s.io/v1beta2", "resource.k8s.io/v1alpha3"},
	},
	{
		Version: "v1.36.3",
		gates: []string{
			"DRADeviceTaintRules", "DRAListTypeAttributes", "DRANodeAllocatableResources", "DRAResourcePoolStatus",
			"DRAWorkloadResourceClaims", "GenericWorkload",
		},
		apis: []string{"resource.k8s.io/v1beta2", "resource.k8s.io/v1alpha3", "scheduling.k8s.io/v1alpha2"},
	},
	{
		Version: "v1.37.2",
		gates: []string{
			"DRADerivedAttributes", "DRADeviceCompatibilityGroups", "DRAListTypeAttributes", "DRANodeAllocatableResources",
			"DRAOptionalNodeOperations", "DRAPartitionableDevicesType", "DRAResourcePoolStatus", "DRAWorkloadResourceClaims",
			"GenericWorkload",
		},
		apis: []string{"resource.k8s.io/v1beta2", "resource.k8s.io/v1alpha3", "scheduling.k8s.io/v1beta1", "scheduling.k8s.io/v1alpha3"},
	},
}

// gateNeeds says which other gate these gates need. Components of 1.37 do not start if a gate is on
// and the other off.
var gateNeeds = map[string]string{
	"DRADeviceCompatibilityGroups": "DRAPartitionableDevices",
	"DRADeviceTaintRules":          "DRADeviceTaints",
	"DRAPartitionableDevicesType":  "DRAPartitionableDevices",
}

// containerds are the last release that many nodes in the field still have, and the one that
// tools/go.mod pins.
var containerds = []string{"v1.7.35", "v2.3.7"}

var exactVersion = regexp.MustCompile(`^v[0-9]+\.[0-9]+\.[0-9]+$`)

// versions completes the versions of the options: "1.37" becomes v1.37.2. Empty stays empty, which
// means the pinned version.
func (o Options) versions() (v toolchain.Versions, err error) {
	var known []string
	for _, r := range releases {
		known = append(known, r.Version)
	}
	if v.Kubernetes, err = exact("Kubernetes", o.Kubernetes, known); err != nil {
		return v, err
	}
	v.Containerd, err = exact("containerd", o.Containerd, containerds)
	return v, err
}

// exact returns the known version of the line that wanted names, such as 1.37. An exact version may
// be any, of a known line.
func exact(program, wanted string, known []string) (string, error) {
	if wanted == "" {
		return "", nil
	}
	version := "v" + strings.TrimPrefix(wanted, "v")
	for _, k := range known {
		if version == line(k) {
			return k, nil
		}
		if exactVersion.MatchString(version) && line(version) == line(k) {
			return version, nil
		}
	}
	return "", fmt.Errorf("version %q of %s: want one of %s, or another patch release of them", wanted, program, strings.Join(known, ", "))
}

// line returns the version without its patch number: v1.37 for v1.37.2.
func line(version string) string { return version[:strings.LastIndex(version, ".")] }

// releaseOf returns the release of the same line as version. Empty means the pinned version.
func releaseOf(version string) Release {
	if version == "" {
		version = toolchain.PinnedKubernetes
	}
	for _, r := range releases {
		if line(r.Version) == line(version) {
			return r
		}
	}
	return Release{}
}

// featureGates returns the release's gates as the components take them.
func (r Release) featureGates() map[string]bool {
	gates := map[string]bool{}
	for _, gate := range r.gates {
		gates[gate] = true
	}
	return gates
}

// runtimeConfig returns the release's API versions as the API server takes them.
func (r Release) runtimeConfig() string {
	var enabled []string
	for _, api := range r.apis {
		enabled = append(enabled, api+"=true")
	}
	return strings.Join(enabled, ",")
}
