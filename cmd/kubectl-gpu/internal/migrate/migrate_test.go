package migrate_test

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/migrate"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fleettest"
)

func configured(c *resourceapi.ResourceClaim, text string) {
	c.Spec.Devices.Config = []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{
		Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: "gpu.nvidia.com", Parameters: runtime.RawExtension{Raw: []byte(text)}},
	}}}
}

// tolerates adds the claim a, which tolerates taints with these keys.
func tolerates(c *fleettest.Cluster, keys ...string) {
	r := fleettest.Request("gpu", "gpu.nvidia.com", 1)
	for _, key := range keys {
		t := resourceapi.DeviceToleration{Key: key, Operator: resourceapi.DeviceTolerationOpExists}
		r.Exactly.Tolerations = append(r.Exactly.Tolerations, t)
	}
	c.Claim("a", r)
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
		{"a known attribute", func(c *fleettest.Cluster) {
			for _, reads := range []string{
				"attributes['gpu.nvidia.com'].profile", "capacity['gpu.nvidia.com'].cores", "attributes['gpu.nvidia.com'].?index",
			} {
				c.Claim("a", fleettest.Request("gpu", "gpu.nvidia.com", 1, "device."+reads+" == 1"))
			}
		}, ""},
		{"an unknown attribute", func(c *fleettest.Cluster) {
			c.Claim("a", fleettest.Request("gpu", "gpu.nvidia.com", 1, `device.attributes["gpu.nvidia.com"].index == 0`))
		}, "claim team-a/a|a selector reads attribute index"},
		{"an unknown capacity in an alternative", func(c *fleettest.Cluster) {
			c.Claim("a", resourceapi.DeviceRequest{Name: "gpu", FirstAvailable: []resourceapi.DeviceSubRequest{
				fleettest.Alternative("whole", "gpu.nvidia.com", 1, "device.capacity['gpu.nvidia.com'].sm.isGreaterThan(quantity('1'))"),
			}})
		}, "claim team-a/a|a selector reads capacity sm"},
		{"a class by an unknown attribute", func(c *fleettest.Cluster) {
			c.Class("first", "device.attributes['gpu.nvidia.com'].minor == 0")
		}, "class first|a selector reads attribute minor"},
		{"tolerations of known taints", func(c *fleettest.Cluster) { tolerates(c, "gpu.nvidia.com/xid", "gpu.nvidia.com/unhealthy") }, ""},
		{"every taint is tolerated", func(c *fleettest.Cluster) { tolerates(c, "gpu.nvidia.com/xid", "") }, ""},
		{"only XIDs are tolerated", func(c *fleettest.Cluster) {
			tolerates(c, "gpu.nvidia.com/xid")
		}, "claim team-a/a|tolerate gpu.nvidia.com/unhealthy too"},
		{"an unknown taint is tolerated", func(c *fleettest.Cluster) {
			tolerates(c, "gpu.nvidia.com/broken")
		}, "tolerates the taint gpu.nvidia.com/broken|no device has this taint"},
		{"a rule for a device of the other driver", func(c *fleettest.Cluster) {
			rule := &resourceapi.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: "repair"}}
			rule.Spec.DeviceSelector = &resourceapi.DeviceTaintSelector{Device: ptr.To("gpu-0")}
			c.Rules = append(c.Rules, rule)
		}, "DeviceTaintRule repair|names device gpu-0"},
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
			report, err := migrate.Check(&fleet.Snapshot{
				Claims: cluster.Claims, Classes: cluster.Classes, Pods: cluster.Pods, TaintRules: cluster.Rules,
			})
			if err != nil {
				t.Fatal(err)
			}
			report.Text(&b, false)
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

func TestOtherDriversAndMissingClasses(t *testing.T) {
	d := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: "d"}}
	d.Spec.Template.Spec.Containers = []corev1.Container{{Image: "nvcr.io/nvidia/k8s-device-plugin:v0.17"}}
	s := &fleet.Snapshot{DaemonSets: []*appsv1.DaemonSet{d}}
	r, err := migrate.Check(s)
	if err != nil || len(r.Changes) != 1 || r.Changes[0].Object != "DaemonSet other/d" || r.Changes[0].Now != "runs NVIDIA's device plugin" {
		t.Errorf("%v, %+v", err, r.Changes)
	}
	s.Missing = []string{"DeviceClasses: forbidden"}
	if _, err := migrate.Check(s); err == nil || !strings.Contains(err.Error(), "DeviceClasses: forbidden") {
		t.Error(err)
	}
}
