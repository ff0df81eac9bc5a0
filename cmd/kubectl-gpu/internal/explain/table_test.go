package explain_test

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/explain"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fleettest"
)

type situation struct {
	name    string
	build   func(*fleettest.Cluster)
	ask     string // "pod p" if it is empty
	version string // v1.37.0 if it is empty
	state   explain.State
	want    []string
	not     []string
}

const (
	h100     = fleettest.H100
	gpuClass = "gpu.nvidia.com"
	migClass = "mig.nvidia.com"
	shared   = "shared.gpu.nvidia.com"
	xid      = "gpu.nvidia.com/xid"
)

// wants adds a claim and the Pod p, which uses it.
func wants(c *fleettest.Cluster, requests ...resourceapi.DeviceRequest) (*resourceapi.ResourceClaim, *corev1.Pod) {
	return c.Claim("want", requests...), c.Pod("p", "want")
}

func gpus(n int64, selectors ...string) resourceapi.DeviceRequest {
	return fleettest.Request("gpu", gpuClass, n, selectors...)
}

func profile(p string) resourceapi.DeviceRequest {
	return fleettest.Request("gpu", migClass, 1, fleettest.IsProfile(p))
}

func all(class string) resourceapi.DeviceRequest {
	r := fleettest.Request("gpu", class, 0)
	r.Exactly.AllocationMode = resourceapi.DeviceAllocationModeAll
	return r
}

func fraction(memory string) resourceapi.DeviceRequest {
	r := fleettest.Request("gpu", shared, 1)
	r.Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
		"memory": resource.MustParse(memory),
	}}
	return r
}

func admin(r resourceapi.DeviceRequest) resourceapi.DeviceRequest {
	r.Exactly.AdminAccess = ptr.To(true)
	return r
}

func match(attribute string, requests ...string) resourceapi.DeviceConstraint {
	return resourceapi.DeviceConstraint{Requests: requests, MatchAttribute: ptr.To(resourceapi.FullyQualifiedName(attribute))}
}

func deleted(m *metav1.ObjectMeta) {
	m.DeletionTimestamp, m.Finalizers = ptr.To(metav1.Unix(1, 0)), []string{"resource.kubernetes.io/delete-protection"}
}

// passthrough makes a device one for virtual machines.
func passthrough(c *fleettest.Cluster, node, name string) {
	for _, slice := range c.Slices {
		for i := range slice.Spec.Devices {
			if d := &slice.Spec.Devices[i]; slice.Spec.Pool.Name == node && d.Name == name {
				d.Attributes["type"] = resourceapi.DeviceAttribute{StringValue: ptr.To("vfio")}
			}
		}
	}
}

var gpu0, gpu1 = fleettest.Device(0), fleettest.Device(1)

const (
	id1g, id2g, id3g, id4g = 19, 14, 9, 5 // profile IDs of an H100
)

var situations = slices.Concat(deviceSituations, requestSituations, clusterSituations, allocatedSituations)
