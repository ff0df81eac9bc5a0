package migrate_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/migrate"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fleettest"
)

func configured(c *resourceapi.ResourceClaim, text string) {
	c.Spec.Devices.Config = []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{
		Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: "gpu.nvidia.com", Parameters: runtime.RawExtension{Raw: []byte(text)}},
	}}}
}

func requests(p *corev1.Pod, name string) {
	p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceName(name): resource.MustParse("1")}
}

func TestCheck(t *testing.T) {
	for _, c := range []struct {
		name  string
		build func(*fleettest.Cluster)
		want  string // an object and a part of what to change. If it is empty, nothing changes.
	}{
		{"a plain claim", func(c *fleettest.Cluster) { c.Claim("a", fleettest.Request("gpu", "gpu.nvidia.com", 1)) }, ""},
		{"a valid configuration", func(c *fleettest.Cluster) {
			configured(c.Claim("a"), `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing"}}`)
		}, ""},
		{"an unknown field", func(c *fleettest.Cluster) {
			configured(c.Claim("a"), `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharding":1}`)
		}, "claim team-a/a|sharding"},
		{"a device of the other driver", func(c *fleettest.Cluster) { c.Held("a", "n1", "gpu-0") }, "claim team-a/a|delete the Pods"},
		{"a device of this driver", func(c *fleettest.Cluster) { c.Held("a", "n1", fleettest.Device(0)) }, ""},
		{"consumable shares", func(c *fleettest.Cluster) {
			r := fleettest.Request("gpu", "gpu.nvidia.com", 1)
			r.Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
				"memory": resource.MustParse("8Gi"),
			}}
			c.Claim("a", r)
		}, "claim team-a/a|shared.gpu.nvidia.com"},
		{"nvidia.com/gpu with its class", func(c *fleettest.Cluster) { requests(c.Pod("p"), "nvidia.com/gpu") }, ""},
		{"nvidia.com/gpu without a class", func(c *fleettest.Cluster) {
			c.Classes = nil
			requests(c.Pod("p"), "nvidia.com/gpu")
		}, "Pod team-a/p|deviceClasses.gpu.extendedResourceName"},
		{"a profile", func(c *fleettest.Cluster) { requests(c.Pod("p"), "nvidia.com/mig-1g.10gb") }, "Pod team-a/p|profile 1g.10gb"},
		{"equal Pods are one row", func(c *fleettest.Cluster) {
			requests(c.Pod("p"), "nvidia.com/gpu.shared")
			requests(c.Pod("q"), "nvidia.com/gpu.shared")
		}, "Pod team-a/p and 1 more|deviceClasses.shared"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cluster := fleettest.New()
			c.build(cluster)
			var b strings.Builder
			migrate.Check(&fleet.Snapshot{Claims: cluster.Claims, Classes: cluster.Classes, Pods: cluster.Pods}).Text(&b, false)
			want := c.want
			if want == "" {
				want = "Nothing would change."
			}
			for _, part := range strings.Split(want, "|") {
				if !strings.Contains(b.String(), part) {
					t.Errorf("lacks %q:\n%s", part, b.String())
				}
			}
		})
	}
}
