package fleet

import (
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/dynamic-resource-allocation/structured"
)

// Feature gates of Kubernetes that decide what the scheduler's allocator does.
const (
	GateAdminAccess        = "DRAAdminAccess"
	GatePrioritizedList    = "DRAPrioritizedList"
	GatePartitions         = "DRAPartitionableDevices"
	GateConsumableCapacity = "DRAConsumableCapacity"
	GateTaints             = "DRADeviceTaints"
	GateBindingConditions  = "DRADeviceBindingConditions"
	GateCapacityRange      = "DRAFractionalCapacityRange"
	GateExtendedResource   = "DRAExtendedResource"
)

// onSince has the first version in which each gate is on by default.
// https://github.com/kubernetes/kubernetes/blob/v1.37.0/pkg/features/kube_features.go
var onSince = map[string]*version.Version{
	GateAdminAccess:        version.MustParseGeneric("1.34"),
	GatePrioritizedList:    version.MustParseGeneric("1.34"),
	GatePartitions:         version.MustParseGeneric("1.36"),
	GateConsumableCapacity: version.MustParseGeneric("1.36"),
	GateTaints:             version.MustParseGeneric("1.36"),
	GateBindingConditions:  version.MustParseGeneric("1.36"),
	GateExtendedResource:   version.MustParseGeneric("1.36"),
	GateCapacityRange:      version.MustParseGeneric("1.37"),
}

// On reports whether the feature gate is on: as the API server shows it, or else by default in its
// version. If the version is unknown too, the gate counts as on.
func (s *Snapshot) On(gate string) bool {
	if on, known := s.Gates[gate]; known {
		return on
	}
	since, known := onSince[gate]
	v, err := version.ParseGeneric(s.Version)
	return known && (err != nil || v.AtLeast(since))
}

// Features returns the allocator's features as this cluster's scheduler has them, if scheduler and
// API server have the same version and gates.
func (s *Snapshot) Features() structured.Features {
	return structured.Features{
		AdminAccess:             s.On(GateAdminAccess),
		PrioritizedList:         s.On(GatePrioritizedList),
		PartitionableDevices:    s.On(GatePartitions),
		ConsumableCapacity:      s.On(GateConsumableCapacity),
		DeviceTaints:            s.On(GateTaints),
		DeviceBindingAndStatus:  s.On(GateBindingConditions),
		FractionalCapacityRange: s.On(GateCapacityRange),
	}
}
