package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

// Features says which optional fields of a ResourceSlice the API server keeps. Feature gates drop fields silently: the answer of a dry run is the
// only one that is true for the server that will store the slices.
type Features struct {
	DeviceTaints       bool `json:"deviceTaints"`
	PartitionedDevices bool `json:"partitionedDevices"` // shared counters, in another slice than the devices that consume them
	PartitionTypes     bool `json:"partitionTypes"`     // partitionTypeAttribute, from Kubernetes 1.37
	ConsumableCapacity bool `json:"consumableCapacity"`
	InformingTaints    bool `json:"informingTaints"` // taints with the effect None, from Kubernetes 1.35
}

// featureProbe creates small slices with DryRunAll, so that nothing is stored.
type featureProbe struct {
	client   kubernetes.Interface
	nodeName string
	// rejected has the API server's answers to slices that it finds invalid. Nothing that needs such
	// slices is offered.
	rejected []error
}

// probeError is of a slice that was never meant to be stored.
type probeError struct{ error }

func (e probeError) Unwrap() error { return e.error }

// probeFeatures also returns the API server's answer to what it rejected rather than dropped.
func probeFeatures(ctx context.Context, client kubernetes.Interface, nodeName string) (f Features, rejected []error, err error) {
	p := &featureProbe{client: client, nodeName: nodeName}
	f, err = p.run(ctx)
	return f, p.rejected, err
}

func (p *featureProbe) run(ctx context.Context) (f Features, err error) {
	all := probeDevice("probe", Features{DeviceTaints: true, ConsumableCapacity: true})
	plain, err := p.dryRun(ctx, resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{all}})
	if err != nil {
		return f, err // a server that takes not even one device gets nothing
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
	return p.keeps(ctx, resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{informing}}, func(s resourceapi.ResourceSliceSpec) bool {
		return len(s.Devices) == 1 && len(s.Devices[0].Taints) == 1
	})
}

// partitionedDevices asks for counter sets in one slice and devices that consume them in another, as
// the real slices have them. Kubernetes 1.34 wants both in one slice, later versions refuse that.
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
	const attribute = DriverName + "/probe"
	spec := resourceapi.ResourceSliceSpec{Devices: probeConsumers(f), PartitionTypeAttribute: ptr.To(resourceapi.FullyQualifiedName(attribute))}
	for i := range spec.Devices {
		spec.Devices[i].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{attribute: {StringValue: ptr.To("whole")}}
	}
	return p.keeps(ctx, spec, func(s resourceapi.ResourceSliceSpec) bool { return s.PartitionTypeAttribute != nil })
}

// keeps says whether the API server takes a slice and keeps what matters of it.
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
	spec.Driver = DriverName
	spec.NodeName = ptr.To(p.nodeName)
	// A pool of its own: a dry run is stored nowhere, and a reader of the audit log sees what it was.
	spec.Pool = resourceapi.ResourcePool{Name: "feature-probe", Generation: 1, ResourceSliceCount: 1}
	slice, err := p.client.ResourceV1().ResourceSlices().Create(ctx,
		&resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{GenerateName: "feature-probe-"}, Spec: spec},
		metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		return spec, fmt.Errorf("dry-run create of a ResourceSlice for node %s: %w", p.nodeName, err)
	}
	return slice.Spec, nil
}

// probeDevice has what a device of the real slices may have on a cluster with such features.
func probeDevice(name string, f Features) resourceapi.Device {
	d := resourceapi.Device{Name: name}
	if f.DeviceTaints {
		d.Taints = []resourceapi.DeviceTaint{{Key: DriverName + "/probe", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
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

// probeConsumers are a partition and a share of it.
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

// logFeatures logs what the cluster keeps and rejects, unless that is as it was before.
func logFeatures(ctx context.Context, before *Features, now Features, rejected []error) {
	if before != nil && *before == now {
		return
	}
	logger := klog.FromContext(ctx)
	logger.Info("ResourceSlice features that the cluster keeps", "features", now)
	for _, err := range rejected {
		logger.Info("The API server rejects a kind of ResourceSlice; nothing that needs it is offered", "reason", rejection(err))
	}
}

// shownCauses limits the API server's reasons in an Event: each of a slice's 64 devices may have one.
const shownCauses = 3

// rejection is why the API server finds an object invalid. It leaves out the object's name, which
// differs with each try and would make each Event another one.
func rejection(err error) string {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Details == nil {
		return err.Error()
	}
	var reasons []string
	for _, cause := range status.Status().Details.Causes {
		reason := cause.Message
		if cause.Field != "" {
			reason = cause.Field + ": " + reason
		}
		reasons = append(reasons, reason)
	}
	if more := len(reasons) - shownCauses; more > 0 {
		reasons = append(slices.Clip(reasons[:shownCauses]), fmt.Sprintf("and %d more", more))
	}
	if len(reasons) == 0 {
		return status.Status().Message
	}
	return strings.Join(reasons, "; ")
}
