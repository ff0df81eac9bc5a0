package driver

import (
	"context"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
)

// Features says which optional fields of a ResourceSlice the API server keeps. Feature gates drop fields silently: the answer of a dry run is the
// only one that is true for the server that will store the slices.
type Features struct {
	DeviceTaints       bool `json:"deviceTaints"`
	PartitionedDevices bool `json:"partitionedDevices"` // shared counters
	PartitionTypes     bool `json:"partitionTypes"`     // partitionTypeAttribute, from Kubernetes 1.37
	ConsumableCapacity bool `json:"consumableCapacity"`
	InformingTaints    bool `json:"informingTaints"` // taints with the effect None, from Kubernetes 1.35
}

// probeFeatures creates small slices with DryRunAll, so that nothing is stored: a slice holds devices or counter sets, not both.
func probeFeatures(ctx context.Context, client kubernetes.Interface, nodeName string) (Features, error) {
	var f Features
	devices, err := dryRun(ctx, client, nodeName, resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{{
		Name: "probe",
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"probe": {
			Value: resource.MustParse("2"),
			RequestPolicy: &resourceapi.CapacityRequestPolicy{
				Default: ptr.To(resource.MustParse("1")), ValidValues: []resource.Quantity{resource.MustParse("1")},
			},
		}},
		AllowMultipleAllocations: ptr.To(true),
		Taints:                   []resourceapi.DeviceTaint{{Key: DriverName + "/probe", Effect: resourceapi.DeviceTaintEffectNoSchedule}},
	}}})
	if err != nil {
		return f, err
	}
	if len(devices.Devices) == 1 {
		d := devices.Devices[0]
		f.DeviceTaints = len(d.Taints) == 1
		f.ConsumableCapacity = d.AllowMultipleAllocations != nil && d.Capacity["probe"].RequestPolicy != nil
	}
	if f.DeviceTaints {
		informing, err := dryRun(ctx, client, nodeName, resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{{
			Name: "probe", Taints: []resourceapi.DeviceTaint{{Key: DriverName + "/probe", Effect: resourceapi.DeviceTaintEffectNone}},
		}}})
		switch {
		case apierrors.IsInvalid(err):
		case err != nil:
			return f, err
		default:
			f.InformingTaints = len(informing.Devices) == 1 && len(informing.Devices[0].Taints) == 1
		}
	}
	counters, err := dryRun(ctx, client, nodeName, resourceapi.ResourceSliceSpec{SharedCounters: []resourceapi.CounterSet{{
		Name: "probe", Counters: map[string]resourceapi.Counter{"probe": {Value: resource.MustParse("1")}},
	}}})
	switch {
	case apierrors.IsInvalid(err):
		// A server without the feature drops the counters and then refuses a slice with neither counters nor devices.
	case err != nil:
		return f, err
	default:
		f.PartitionedDevices = len(counters.SharedCounters) == 1
	}
	if !f.PartitionedDevices {
		return f, nil
	}
	typed, err := dryRun(ctx, client, nodeName, resourceapi.ResourceSliceSpec{
		Devices: []resourceapi.Device{{
			Name:       "probe",
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{DriverName + "/probe": {StringValue: ptr.To("whole")}},
			ConsumesCounters: []resourceapi.DeviceCounterConsumption{{
				CounterSet: "probe", Counters: map[string]resourceapi.Counter{"probe": {Value: resource.MustParse("1")}},
			}},
		}},
		PartitionTypeAttribute: ptr.To(resourceapi.FullyQualifiedName(DriverName + "/probe")),
	})
	switch {
	case apierrors.IsInvalid(err):
	case err != nil:
		return f, err
	default:
		f.PartitionTypes = typed.PartitionTypeAttribute != nil
	}
	return f, nil
}

func dryRun(ctx context.Context, client kubernetes.Interface, nodeName string, spec resourceapi.ResourceSliceSpec) (resourceapi.ResourceSliceSpec, error) {
	spec.Driver = DriverName
	spec.NodeName = ptr.To(nodeName)
	// A pool of its own: a dry run is stored nowhere, and a reader of the audit log sees what it was.
	spec.Pool = resourceapi.ResourcePool{Name: "feature-probe", Generation: 1, ResourceSliceCount: 1}
	slice, err := client.ResourceV1().ResourceSlices().Create(ctx,
		&resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{GenerateName: "feature-probe-"}, Spec: spec},
		metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		return spec, fmt.Errorf("dry-run create of a ResourceSlice for node %s: %w", nodeName, err)
	}
	return slice.Spec, nil
}
