// Package scheduler allocates devices of one node's ResourceSlices with the allocator of the
// Kubernetes scheduler. It is for tests and needs no cluster. The caller remembers which devices
// are allocated in a [Taken].
package scheduler

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

const node = "node"

// Scheduler allocates devices from the slices of one node.
type Scheduler struct {
	Slices  []*resourceapi.ResourceSlice
	Classes Classes
	// Features are the features of the Kubernetes allocator. [New] enables those of a current cluster.
	Features structured.Features
	// cache keeps compiled CEL expressions, as the Kubernetes scheduler does.
	cache *cel.Cache
}

// New returns a Scheduler for the slices that a driver has published on one node.
func New(driver string, published []resourceslice.Slice, classes Classes) *Scheduler {
	s := &Scheduler{
		Classes: classes,
		Features: structured.Features{
			AdminAccess: true, PrioritizedList: true, DeviceTaints: true, PartitionableDevices: true, ConsumableCapacity: true,
		},
		cache: cel.NewCache(1000, cel.Features{}),
	}
	for i, p := range published {
		s.Slices = append(s.Slices, &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("slice-%d", i)},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: driver, NodeName: ptr.To(node), Devices: p.Devices, SharedCounters: p.SharedCounters,
				Pool: resourceapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: int64(len(published))},
			},
		})
	}
	return s
}

// Device returns the allocation result for a device that is allocated to one claim alone.
func Device(driver, name string) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{Driver: driver, Pool: node, Device: name}
}

// Allocate allocates devices for a claim and adds them to taken. It returns nil if the free devices
// do not satisfy the claim.
func (s *Scheduler) Allocate(
	ctx context.Context, taken *Taken, spec resourceapi.DeviceClaim,
) ([]resourceapi.DeviceRequestAllocationResult, error) {
	a, err := structured.NewAllocator(ctx, s.Features, taken.state(), s.Classes, s.Slices, s.cache)
	if err != nil {
		return nil, err
	}
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "claim", UID: "claim"}, Spec: resourceapi.ResourceClaimSpec{Devices: spec},
	}
	results, err := a.Allocate(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, []*resourceapi.ResourceClaim{claim})
	if err != nil || len(results) == 0 {
		return nil, err
	}
	taken.Take(results[0].Devices.Results...)
	return results[0].Devices.Results, nil
}

// Classes maps the name of each DeviceClass to its CEL expression.
type Classes map[string]string

// List returns every DeviceClass.
func (c Classes) List() ([]*resourceapi.DeviceClass, error) {
	var all []*resourceapi.DeviceClass
	for name := range c {
		class, _ := c.Get(name)
		all = append(all, class)
	}
	return all, nil
}

// Get returns the DeviceClass with this name.
func (c Classes) Get(name string) (*resourceapi.DeviceClass, error) {
	expression, ok := c[name]
	if !ok {
		return nil, fmt.Errorf("no class %s", name)
	}
	return &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{
			{CEL: &resourceapi.CELDeviceSelector{Expression: expression}},
		}},
	}, nil
}
