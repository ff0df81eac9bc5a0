package publish

import (
	"context"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Features says which optional fields of ResourceSlices the API server keeps. It silently drops
// fields of disabled feature gates, so only a dry run shows what it will store.
type Features struct {
	DeviceTaints bool `json:"deviceTaints"`
	// PartitionedDevices means that devices can consume shared counters that are in another slice.
	PartitionedDevices bool `json:"partitionedDevices"`
	PartitionTypes     bool `json:"partitionTypes"` // the field partitionTypeAttribute, from Kubernetes 1.37
	ConsumableCapacity bool `json:"consumableCapacity"`
	InformingTaints    bool `json:"informingTaints"` // taints with the effect None, from Kubernetes 1.35
}

// featureProbe finds out which fields the API server keeps. It creates small slices as dry runs, so
// that nothing is stored.
type featureProbe struct {
	client   kubernetes.Interface
	nodeName string
	// rejected has the API server's errors for test slices that it rejects as invalid. The driver
	// offers no devices that need a slice like the rejected one.
	rejected []error
}

// probeFeatures finds out which fields the API server keeps. rejected has its errors for test
// slices that it rejects as invalid.
func probeFeatures(ctx context.Context, client kubernetes.Interface, nodeName string) (f Features, rejected []error, err error) {
	p := &featureProbe{client: client, nodeName: nodeName}
	f, err = p.run(ctx)
	return f, p.rejected, err
}

func (p *featureProbe) run(ctx context.Context) (f Features, err error) {
	all := probeDevice("probe", Features{DeviceTaints: true, ConsumableCapacity: true})
	plain, err := p.dryRun(ctx, resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{all}})
	if err != nil {
		return f, err // the server rejects even one plain device, so there is nothing to offer
	}
	if len(plain.Devices) == 1 {
		f.DeviceTaints = len(plain.Devices[0].Taints) == 1
		f.ConsumableCapacity = keepsCapacity(plain.Devices[0])
	}
	if f.DeviceTaints {
		if f.InformingTaints, err = p.informingTaints(ctx); err != nil {
			return f, err
		}
	}
	if f.PartitionedDevices, err = p.partitionedDevices(ctx, f); err != nil || !f.PartitionedDevices {
		return f, err
	}
	f.PartitionTypes, err = p.partitionTypes(ctx, f)
	return f, err
}

func (p *featureProbe) informingTaints(ctx context.Context) (bool, error) {
	informing := probeDevice("probe", Features{DeviceTaints: true})
	informing.Taints[0].Effect = resourceapi.DeviceTaintEffectNone
	spec := resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{informing}}
	return p.keeps(ctx, spec, func(s resourceapi.ResourceSliceSpec) bool {
		return len(s.Devices) == 1 && len(s.Devices[0].Taints) == 1
	})
}

// partitionedDevices reports whether counter sets can be in one slice and the devices that consume
// them in another, as in the driver's real slices. Kubernetes 1.34 requires both in one slice.
// Later versions forbid that.
func (p *featureProbe) partitionedDevices(ctx context.Context, f Features) (bool, error) {
	counters := resourceapi.ResourceSliceSpec{SharedCounters: []resourceapi.CounterSet{{Name: "probe", Counters: probeCounters()}}}
	kept, err := p.keeps(ctx, counters, func(s resourceapi.ResourceSliceSpec) bool { return len(s.SharedCounters) == 1 })
	if err != nil || !kept {
		return false, err
	}
	return p.keeps(ctx, resourceapi.ResourceSliceSpec{Devices: probeConsumers(f)}, func(s resourceapi.ResourceSliceSpec) bool {
		return len(s.Devices) == 2 && len(s.Devices[0].ConsumesCounters) == 1 && len(s.Devices[1].ConsumesCounters) == 1 &&
			(!f.ConsumableCapacity || keepsCapacity(s.Devices[1]))
	})
}

func (p *featureProbe) partitionTypes(ctx context.Context, f Features) (bool, error) {
	const attribute = device.DriverName + "/probe"
	spec := resourceapi.ResourceSliceSpec{
		Devices: probeConsumers(f), PartitionTypeAttribute: ptr.To(resourceapi.FullyQualifiedName(attribute)),
	}
	for i := range spec.Devices {
		spec.Devices[i].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{attribute: {StringValue: ptr.To("whole")}}
	}
	return p.keeps(ctx, spec, func(s resourceapi.ResourceSliceSpec) bool { return s.PartitionTypeAttribute != nil })
}

// keeps makes a dry run with a slice of this spec. It returns true if the API server accepts the
// slice and the function kept returns true for the spec that the server would store.
func (p *featureProbe) keeps(
	ctx context.Context, spec resourceapi.ResourceSliceSpec, kept func(resourceapi.ResourceSliceSpec) bool,
) (bool, error) {
	answer, err := p.dryRun(ctx, spec)
	if apierrors.IsInvalid(err) {
		p.rejected = append(p.rejected, err)
		return false, nil
	}
	return err == nil && kept(answer), err
}

func (p *featureProbe) dryRun(ctx context.Context, spec resourceapi.ResourceSliceSpec) (resourceapi.ResourceSliceSpec, error) {
	spec.Driver = device.DriverName
	spec.NodeName = ptr.To(p.nodeName)
	// The pool's name explains the dry run to readers of the audit log.
	spec.Pool = resourceapi.ResourcePool{Name: "feature-probe", Generation: 1, ResourceSliceCount: 1}
	slice, err := p.client.ResourceV1().ResourceSlices().Create(ctx,
		&resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{GenerateName: "feature-probe-"}, Spec: spec},
		metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		return spec, fmt.Errorf("create a ResourceSlice for node %s as a dry run: %w", p.nodeName, err)
	}
	return slice.Spec, nil
}

// probeDevice returns a device with the optional fields that f allows.
func probeDevice(name string, f Features) resourceapi.Device {
	d := resourceapi.Device{Name: name}
	if f.DeviceTaints {
		d.Taints = []resourceapi.DeviceTaint{{Key: device.DriverName + "/probe", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
	}
	if f.ConsumableCapacity {
		one, two := resource.MustParse("1"), resource.MustParse("2")
		d.AllowMultipleAllocations = ptr.To(true)
		d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"probe": {
			Value: two,
			RequestPolicy: &resourceapi.CapacityRequestPolicy{
				Default: &one, ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: &one, Max: &two, Step: &one},
			},
		}}
	}
	return d
}

// probeConsumers returns a partition and a shared partition that consume the same counter.
func probeConsumers(f Features) []resourceapi.Device {
	share := probeDevice("probe-share", f)
	f.ConsumableCapacity = false
	devices := []resourceapi.Device{probeDevice("probe", f), share}
	for i := range devices {
		devices[i].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: "probe", Counters: probeCounters()}}
	}
	return devices
}

func probeCounters() map[string]resourceapi.Counter {
	return map[string]resourceapi.Counter{"probe": {Value: resource.MustParse("1")}}
}

func keepsCapacity(d resourceapi.Device) bool {
	return d.AllowMultipleAllocations != nil && d.Capacity["probe"].RequestPolicy != nil
}

// logFeatures logs the features now, and the errors for the rejected test slices, if the features
// differ from those before. before is nil at the first call.
func logFeatures(ctx context.Context, before *Features, now Features, rejected []error) {
	if before != nil && *before == now {
		return
	}
	logger := klog.FromContext(ctx)
	logger.Info("Probed the ResourceSlice features of the cluster", "features", now)
	for _, err := range rejected {
		logger.Info("Not offering some devices because the API server rejects the ResourceSlices that they need", "reason", rejection(err))
	}
}
