// Package scheduler allocates devices as the cluster's scheduler does, with its own allocator, from what a driver publishes for one node. It is for tests;
// it needs no cluster, and forgets nothing that it has given: the caller keeps the account.
package scheduler

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

const node = "node"

// Scheduler has one node.
type Scheduler struct {
	Slices  []*resourceapi.ResourceSlice
	Classes Classes
	// cache keeps compiled expressions, as the scheduler does.
	cache *cel.Cache
}

// New publishes a driver's slices.
func New(driver string, published []resourceslice.Slice, classes Classes) *Scheduler {
	s := &Scheduler{Classes: classes, cache: cel.NewCache(1000, cel.Features{})}
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

// Device is how the scheduler remembers that a device is taken.
func Device(driver, name string) structured.DeviceID {
	return structured.MakeDeviceID(driver, node, name)
}

// Allocate returns the devices that a claim gets beside those that are taken, and adds them to these; it returns none if the claim gets nothing.
func (s *Scheduler) Allocate(ctx context.Context, taken sets.Set[structured.DeviceID], spec resourceapi.DeviceClaim) ([]string, error) {
	features := structured.Features{AdminAccess: true, PrioritizedList: true, DeviceTaints: true, PartitionableDevices: true, ConsumableCapacity: true}
	a, err := structured.NewAllocator(ctx, features, structured.AllocatedState{AllocatedDevices: taken}, s.Classes, s.Slices, s.cache)
	if err != nil {
		return nil, err
	}
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "claim", UID: "claim"}, Spec: resourceapi.ResourceClaimSpec{Devices: spec}}
	results, err := a.Allocate(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, []*resourceapi.ResourceClaim{claim})
	if err != nil || len(results) == 0 {
		return nil, err
	}
	var names []string
	for _, r := range results[0].Devices.Results {
		names = append(names, r.Device)
		taken.Insert(structured.MakeDeviceID(r.Driver, r.Pool, r.Device))
	}
	return names, nil
}

// Classes are the expressions of DeviceClasses, by the class's name.
type Classes map[string]string

// List has every class.
func (c Classes) List() ([]*resourceapi.DeviceClass, error) {
	var all []*resourceapi.DeviceClass
	for name := range c {
		class, _ := c.Get(name)
		all = append(all, class)
	}
	return all, nil
}

// Get has one class.
func (c Classes) Get(name string) (*resourceapi.DeviceClass, error) {
	expression, ok := c[name]
	if !ok {
		return nil, fmt.Errorf("no class %s", name)
	}
	return &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}},
	}, nil
}
